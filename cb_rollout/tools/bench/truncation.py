"""What top-k, top-p and min-p take beside their forward, of a step at a real vocabulary's size.

The peers are transformers' own warpers, and sorting every row. Logits are those of a model that
is sure of some tokens and of others not: exponents of a power law, jittered.
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

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.sampling.truncation import create_truncation, truncate
from cb_rollout.tools.bench.sizes import SEED, Setup
from cb_rollout.tools.bench.turns import timed

ASKED = {
    "top_k=20": SamplingParams(top_k=20),
    "top_k=20, top_p=0.95": SamplingParams(top_k=20, top_p=0.95),
    "top_p=0.95": SamplingParams(top_p=0.95),
    "min_p=0.05": SamplingParams(min_p=0.05),
}

STEEPNESS, JITTER = 1.5, 1.0
# The r-th likeliest token of each row has about r ** -STEEPNESS of the first one's probability.


def bench(setup: Setup) -> dict[str, Any]:
    """Milliseconds of each rule and way, which take turns."""
    generator = torch.Generator().manual_seed(SEED)
    shape = setup.sizes.truncated_rows, setup.sizes.truncated_vocab
    ranks_RV = torch.rand(shape, generator=generator).argsort(-1) + 1
    jitter_RV = torch.randn(shape, generator=generator) * JITTER
    logits_RV = (jitter_RV - STEEPNESS * ranks_RV.log()).to(setup.device)
    return {name: _milliseconds(params, logits_RV, setup) for name, params in ASKED.items()}


def _milliseconds(
    params: SamplingParams, logits_RV: torch.Tensor, setup: Setup
) -> dict[str, float]:
    ways = _ways(params, logits_RV)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(setup.sizes.num_truncations * setup.repetitions + 1):
        for name, way in ways.items():
            taken = timed(way)
            # The first turn warms up.
            seconds[name] += [taken] if turn else []
    return {
        f"{name}, milliseconds": 1e3 * statistics.median(taken) for name, taken in seconds.items()
    }


def _ways(params: SamplingParams, logits_RV: torch.Tensor) -> dict[str, Callable[[], object]]:
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
    # Warpers say that they want tensors of types, which no tensor is.
    given: Any = torch.empty(num_rows, 0, dtype=torch.int64, device=logits_RV.device), logits_RV
    return {
        "cb_rollout": lambda: truncate(logits_RV, truncation),
        "all tokens sorted": lambda: truncate(logits_RV, whole),
        "transformers' warpers": lambda: warpers(*given),
    }
