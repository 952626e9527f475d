"""One rollout, prompts in and completions out: long-tailed groups, and equal lengths.

Beside each figure stands the share of its time that matrix products need. `matmul_share`: those
that the workload cannot do without, at the rate of a large product. `forwards_matmul_share`: those
of the forwards that the contender ran, with all their padding and repeats, at that rate.
`forwards_products_share`: the same, as long as they take by themselves with as many rows as they
had, for few rows never reach that rate.
"""

from collections import Counter
from typing import Any

from cb_rollout.compat.inductor import compiler_obstacle
from cb_rollout.tools.bench.contenders import Contender, generate, ours, transformers_batching
from cb_rollout.tools.bench.machine import matmul_flops, needed_flops
from cb_rollout.tools.bench.model import create_model
from cb_rollout.tools.bench.products import Products, alone_seconds, num_flops, products_counted
from cb_rollout.tools.bench.sizes import Setup
from cb_rollout.tools.bench.turns import interleaved, throughput
from cb_rollout.tools.bench.workload import Workload, equal_lengths, long_tailed

BATCH_OF_TAILS = 64
# The best for `generate` on the CPU model: a larger batch waits longer for its longest sequence.


def bench(setup: Setup) -> dict[str, Any]:
    """Useful tokens per second of both kinds."""
    sizes = setup.sizes
    kinds = {
        "long_tailed_groups": (long_tailed(sizes), setup.batch_size or BATCH_OF_TAILS),
        "equal_lengths": (equal_lengths(sizes), setup.batch_size or sizes.num_sequences),
    }
    results = {}
    for kind, (workload, batch_size) in kinds.items():
        print(f"rollout, {kind}: {len(workload.prompts)} sequences, {workload.num_tokens} tokens")
        results[kind] = _bench_kind(setup, workload, batch_size)
    return results


def _bench_kind(setup: Setup, workload: Workload, batch_size: int) -> dict[str, Any]:
    model = create_model(setup.sizes.shape, setup.device)
    contenders = {
        "cb_rollout": ours(),
        "transformers CB": transformers_batching(),
        "model.generate": generate(batch_size),
    }
    if setup.device == "cpu" and compiler_obstacle() is None:
        contenders["cb_rollout, compiled"] = ours(use_default_compile_configs=True)
    rate = matmul_flops(model, len(workload.prompts))
    turns = interleaved(contenders, model, workload, setup.repetitions)
    needed = needed_flops(model, workload)
    results = {}
    for name, contender in contenders.items():
        figures = throughput(contender, turns[name], workload.num_tokens)
        speed = figures["median"] / workload.num_tokens
        results[name] = figures | {"matmul_share": needed / rate * speed}
        ran = _products_run(contender, model, workload)
        if (flops := num_flops(model, ran)) >= needed:
            results[name] |= {
                "forwards_matmul_share": flops / rate * speed,
                "forwards_products_share": alone_seconds(model, ran) * speed,
            }
    return results


def _products_run(contender: Contender, model: Any, workload: Workload) -> Counter[Products]:
    """The matrix products of a contender's forwards, as far as they were seen."""
    with contender.create(model, workload) as run, products_counted(model) as counted:
        run(workload)
    return counted
