"""The workload `truncation`: top-k, top-p and min-p at a real vocabulary's size.

Compared with transformers' warpers and with sorting every row. Probabilities follow a power law
with jitter, as those of a model that is sure of some tokens and unsure of others.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from benchmarks.sizes import Setup
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.sampling.truncation import create_truncation, truncate
from cb_rollout.tools.bench import SEED, timed

PARAMS = {
    "top_k=20": SamplingParams(top_k=20),
    "top_k=20, top_p=0.95": SamplingParams(top_k=20, top_p=0.95),
    "top_p=0.95": SamplingParams(top_p=0.95),
    "min_p=0.05": SamplingParams(min_p=0.05),
}

# The token of rank r has about r ** -STEEPNESS of the first one's probability.
STEEPNESS, JITTER = 1.5, 1.0


def bench_truncation(setup: Setup) -> dict[str, Any]:
    """Return milliseconds of each rule and implementation, which take turns."""
    generator = torch.Generator().manual_seed(SEED)
    shape = setup.sizes.truncated_rows, setup.sizes.truncated_vocab
    ranks_RV = torch.rand(shape, generator=generator).argsort(-1) + 1
    jitter_RV = torch.randn(shape, generator=generator) * JITTER
    logits_RV = (jitter_RV - STEEPNESS * ranks_RV.log()).to(setup.device)
    return {name: _milliseconds(params, logits_RV, setup) for name, params in PARAMS.items()}


def _milliseconds(
    params: SamplingParams, logits_RV: torch.Tensor, setup: Setup
) -> dict[str, float]:
    works = _implementations(params, logits_RV)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    # The first turn warms up.
    for _ in range(setup.sizes.num_truncations * setup.repetitions + 1):
        for name, work in works.items():
            seconds[name].append(timed(work))
    return {
        f"{name}, milliseconds": 1e3 * statistics.median(values[1:])
        for name, values in seconds.items()
    }


def _implementations(
    params: SamplingParams, logits_RV: torch.Tensor
) -> dict[str, Callable[[], object]]:
    num_rows, vocab_size = logits_RV.shape
    truncation = create_truncation([params] * num_rows, logits_RV.device)
    assert truncation is not None
    whole = replace(truncation, num_candidates=vocab_size)
    warpers = LogitsProcessorList()
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    # The warpers' annotations name tensor types that no tensor has.
    given: Any = torch.empty(num_rows, 0, dtype=torch.int64, device=logits_RV.device), logits_RV
    return {
        "cb_rollout": lambda: truncate(logits_RV, truncation),
        "all tokens sorted": lambda: truncate(logits_RV, whole),
        "transformers' warpers": lambda: warpers(*given),
    }
