"""Contenders of a workload, each with the settings that make it fast, and the reasons for them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from cb_rollout.tools import bench
from cb_rollout.tools.bench import MAX_BATCH_TOKENS, PAGE_SIZE, Run, Workload

BATCHING_SETTINGS = (
    f"pages of {PAGE_SIZE}, since the default of 256 is mostly empty here; on a CPU, pages for all "
    f"sequences at once and batches of {MAX_BATCH_TOKENS} tokens, elsewhere as it infers"
)


class Contender(NamedTuple):
    """A way to run a workload."""

    create: Callable[[Any, Workload], AbstractContextManager[Run]]
    """Create what runs the workload on a model, and remove it on exit."""
    settings: str
    """The contender's settings, and why they are the best for it."""
    pid: int | None = None
    """Process that computes; None: this process."""


def ours(*, temperature: float = 1.0, syncs_weights: bool = True, **settings: Any) -> Contender:
    """Create a contender of this package, with `settings` of `RolloutConfig` besides the seed."""
    given = ", ".join(["its defaults", *(f"{name}={value}" for name, value in settings.items())])
    return Contender(
        partial(bench.ours, temperature=temperature, syncs_weights=syncs_weights, **settings),
        f"{given}; temperature {temperature}, log-probabilities are checked",
    )


def transformers_batching(**settings: Any) -> Contender:
    """Create a contender of transformers' continuous batching, with a persistent manager."""
    return Contender(
        partial(bench.transformers_batching, **settings),
        f"a persistent manager with log-probabilities; {BATCHING_SETTINGS}",
    )


def generate(batch_size: int) -> Contender:
    """Create a contender of `model.generate` on left-padded batches."""
    return Contender(
        partial(bench.generate, batch_size=batch_size),
        f"left-padded batches of {batch_size}, which --batch-size changes; no log-probabilities, "
        "and a batch ends with its longest sequence",
    )
