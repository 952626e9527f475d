"""The workload `rollout`: prompts in, completions out, of long-tailed and of equal lengths.

Each figure has its `matmul_share`: the share of its time that the matrix products which the
workload needs would take, at the rate of a large product.
"""

from typing import Any, NamedTuple

from cb_rollout.compat.inductor import compiler_obstacle
from cb_rollout.tools.bench.contenders import Contender, generate, ours, transformers_batching
from cb_rollout.tools.bench.matmul_bound import matmul_flops, needed_flops
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


class Race(NamedTuple):
    """One workload and the contenders that run it."""

    workload: Workload
    contenders: dict[str, Contender]


def bench_rollout(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of long-tailed groups and of equal lengths."""
    model = create_model(setup.sizes.shape, setup.device)
    return {name: run_race(name, race, model, setup) for name, race in races(setup).items()}


def races(setup: Setup) -> dict[str, Race]:
    """Return the workloads with their contenders, by name."""
    sizes = setup.sizes
    tailed, equal = long_tailed(sizes), equal_lengths(sizes)
    return {
        "long_tailed_groups": Race(tailed, _contenders(setup, BATCH_OF_TAILS)),
        "equal_lengths": Race(equal, _contenders(setup, sizes.num_sequences)),
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


def run_race(name: str, race: Race, model: Any, setup: Setup) -> dict[str, Any]:
    """Return tokens per second of each contender, with its share of the matmul bound."""
    workload, contenders = race
    print(f"rollout, {name}: {len(workload.prompts)} sequences, {workload.num_tokens} tokens")
    bound = workload.num_tokens / needed_flops(model, workload)
    bound *= matmul_flops(model, len(workload.prompts))
    rows = throughputs(contenders, model, workload, setup.repetitions)
    return {row: x | {"matmul_share": x["median"] / bound} for row, x in rows.items()}
