"""Rollouts of contenders in turns: the workloads `rollout`, `bfloat16` and `serve`.

`rollout` adds vLLM to the wheel's, and to each figure the share of its time that matrix products
need. `matmul_share`: the products that the workload needs at least, at the rate of a large product.
`forwards_matmul_share`: those of the contender's own forwards, padding and repeats included, at
that rate. `forwards_products_share`: the same products, in the time that they take alone with the
number of rows that they had, since a few rows never reach the rate of a large product.
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from benchmarks.harness.contenders import Contender, generate, ours, transformers_batching
from benchmarks.harness.timing import throughputs
from benchmarks.harness.workload import equal_lengths, long_tailed
from benchmarks.peers.contenders import of_another_model, served
from benchmarks.peers.vllm_process import vllm_contenders
from benchmarks.roofline.machine import (
    Products,
    matmul_flops,
    needed_flops,
    num_flops,
    products_counted,
    products_seconds,
)
from benchmarks.sizes import Setup, Sizes
from cb_rollout.tools.bench import BATCH_SIZE, Workload, create_model


def bench_rollout(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of long-tailed groups and of equal lengths."""
    workloads = races(setup.sizes, setup.batch_size)
    return race(create_model(setup.sizes.shape, setup.device), workloads, setup)


def races(
    sizes: Sizes, batch_size: int | None = None
) -> dict[str, tuple[Workload, dict[str, Contender]]]:
    """Return the workloads by name, with contenders; `batch_size`: of `generate`, or the best."""

    def contenders(best: int) -> dict[str, Contender]:
        return {
            "cb_rollout": ours(),
            "transformers CB": transformers_batching(),
            "model.generate": generate(batch_size or best),
        }

    return {
        "long_tailed_groups": (long_tailed(sizes), contenders(BATCH_SIZE)),
        "equal_lengths": (equal_lengths(sizes), contenders(sizes.num_sequences)),
    }


def race(
    model: Any,
    workloads: dict[str, tuple[Workload, dict[str, Contender]]],
    setup: Setup,
    warm_up: Callable[[Workload], Workload] | None = None,
) -> dict[str, Any]:
    """Return tokens per second of contenders and of vLLM, with the shares of their products.

    `warm_up` returns what a contender runs before its turn; None: the whole workload.
    """
    results = {}
    with vllm_contenders(model, [workload for workload, _ in workloads.values()]) as vllm:
        for name, (workload, shipped) in workloads.items():
            first, *others = shipped.items()
            contenders = dict([first, *vllm.items(), *others])
            bound = workload.num_tokens / needed_flops(model, workload)
            bound *= matmul_flops(model, len(workload.prompts))
            rows = run_race(
                name,
                contenders,
                model,
                workload,
                setup.repetitions,
                warm_up=warm_up and warm_up(workload),
            )
            for row, contender in contenders.items():
                rows[row]["matmul_share"] = rows[row]["median"] / bound
                if setup.sizes.counts_forwards:
                    rows[row] |= _forwards_shares(contender, rows[row], model, workload)
            results[name] = rows
    return results


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


def _forwards_shares(
    contender: Contender, figures: dict[str, Any], model: Any, workload: Workload
) -> dict[str, float]:
    """Return the shares of its time that products of a contender's own forwards need."""
    # Another process runs no layers of this model.
    if contender.pid is not None:
        return {}
    counted = _count_products(contender, model, workload)
    flops, needed = num_flops(model, counted), needed_flops(model, workload)
    # Fewer operations than needed mean that some forwards could not be counted.
    if (times_needed := flops / needed) < 1:
        return {}
    speed = figures["median"] / workload.num_tokens
    return {
        "forwards_matmul_share": figures["matmul_share"] * times_needed,
        "forwards_products_share": products_seconds(model, counted) * speed,
    }


def _count_products(contender: Contender, model: Any, workload: Workload) -> Counter[Products]:
    with contender.create(model, workload) as run, products_counted(model) as counted:
        run(workload)
    return counted


def bench_bfloat16(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of the same weights in bfloat16, beside float32."""
    sizes = setup.sizes
    model = create_model(sizes.shape, setup.device).float()
    half = deepcopy(model).bfloat16()
    contenders = {
        "cb_rollout": of_another_model(ours(), half),
        "cb_rollout, float32": ours(),
        "transformers CB": of_another_model(transformers_batching(), half),
    }
    # The tables of `rollout` have the names without the suffix.
    workloads = {
        "long_tailed_groups_bfloat16": long_tailed(sizes),
        "equal_lengths_bfloat16": equal_lengths(sizes),
    }
    return {
        name: run_race(name, contenders, model, workload, setup.repetitions)
        for name, workload in workloads.items()
    }


def bench_serve(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of one rollout called in this process and served over HTTP."""
    model, workload = create_model(setup.sizes.shape, setup.device), long_tailed(setup.sizes)
    contenders = {"cb_rollout": ours(), "served on loopback": served()}
    return {"served": throughputs(contenders, model, workload, setup.repetitions)}
