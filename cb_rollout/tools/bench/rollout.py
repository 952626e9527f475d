"""The workload `rollout`: prompts in, completions out, of long-tailed and of equal lengths."""

from typing import Any

from cb_rollout.compat.inductor import compiler_obstacle
from cb_rollout.tools.bench.contenders import Contender, generate, ours, transformers_batching
from cb_rollout.tools.bench.timing import throughputs
from cb_rollout.tools.bench.workload import (
    Setup,
    Workload,
    create_model,
    equal_lengths,
    long_tailed,
)

# The best for `generate` on the CPU model: a larger batch waits longer for its longest sequence.
BATCH_OF_TAILS = 64


def bench_rollout(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of long-tailed groups and of equal lengths."""
    model = create_model(setup.sizes.shape, setup.device)
    return {
        name: run_race(name, contenders, model, workload, setup.repetitions)
        for name, (workload, contenders) in races(setup).items()
    }


def races(setup: Setup) -> dict[str, tuple[Workload, dict[str, Contender]]]:
    """Return the workloads with the contenders that run them, by name."""
    tailed, equal = long_tailed(setup.sizes), equal_lengths(setup.sizes)
    return {
        "long_tailed_groups": (tailed, _contenders(setup, BATCH_OF_TAILS)),
        "equal_lengths": (equal, _contenders(setup, setup.sizes.num_sequences)),
    }


def _contenders(setup: Setup, batch_size: int) -> dict[str, Contender]:
    contenders = {
        "cb_rollout": ours(),
        "transformers CB": transformers_batching(),
        "model.generate": generate(setup.batch_size or batch_size),
    }
    if setup.device == "cpu" and compiler_obstacle() is None:
        contenders["cb_rollout, compiled"] = ours(use_default_compile_configs=True)
    return contenders


def run_race(
    name: str,
    contenders: dict[str, Contender],
    model: Any,
    workload: Workload,
    repetitions: int,
    num_warm_ups: int = 1,
    warm_up: Workload | None = None,
) -> dict[str, Any]:
    """Announce a workload, and return tokens per second of each contender."""
    print(f"{name}: {len(workload.prompts)} sequences, {workload.num_tokens} tokens")
    return throughputs(contenders, model, workload, repetitions, num_warm_ups, warm_up)
