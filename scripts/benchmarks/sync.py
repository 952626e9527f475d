"""The workload `sync`: a weight sync, beside bare tensor copies of the same bytes.

All take turns, each after a rollout, so that caches are as in training.
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.sizes import Setup
from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.tools.bench import SEED, create_model, timed

PROMPTS = [[2, 3, 4]] * 4
PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)


def bench_sync(setup: Setup) -> dict[str, Any]:
    """Return milliseconds of each kind of sync, and bandwidths."""
    model = create_model(setup.sizes.shape, setup.device)
    with ExitStack() as stack:
        generators = {
            kind: stack.enter_context(
                RolloutGenerator(model, RolloutConfig(seed=SEED, weight_sync=kind))
            )
            for kind in ("shared", "copy")
        }
        works: dict[str, Callable[[], Any]] = {"bare copies": _bare_copies(model)}
        works |= {f"{kind} sync": generator.sync_weights for kind, generator in generators.items()}
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(setup.sizes.num_syncs * setup.repetitions + 1):
            for name, work in works.items():
                for generator in generators.values():
                    generator.generate_batch(PROMPTS, sampling_params=PARAMS)
                seconds[name].append(timed(work))
        num_bytes = generators["copy"].sync_weights().bytes_copied
    # The first turn warms up.
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {"sync": _figures(medians, num_bytes)}


def _bare_copies(model: torch.nn.Module) -> Callable[[], None]:
    tensors = [*model.parameters(), *model.buffers()]
    targets = [torch.empty_like(tensor) for tensor in tensors]

    @torch.no_grad()
    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    return copy


def _figures(medians: dict[str, float], num_bytes: int) -> dict[str, float]:
    bare, copied = (2 * num_bytes / medians[name] / 1e9 for name in ("bare copies", "copy sync"))
    return {f"{name}, milliseconds": 1000 * value for name, value in medians.items()} | {
        "megabytes": num_bytes / 1e6,
        "bare copies, GB/s read and written": bare,
        "copy sync, GB/s read and written": copied,
        "copy sync, percent of bare": 100 * copied / bare,
    }
