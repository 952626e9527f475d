"""Rollouts of contenders in turns: the workloads `rollout`, `bfloat16`, `serve` and `drafts`.

`rollout` adds to each figure the share of its time that matrix products need. `matmul_share`: the
products that the workload needs at least, at the rate of a large product. `forwards_matmul_share`:
those of the contender's own forwards, padding and repeats included, at that rate.
`forwards_products_share`: the same products, in the time that they take alone with the number of
rows that they had, since a few rows never reach the rate of a large product.
"""

import random
from collections import Counter
from copy import deepcopy
from typing import Any

from cb_rollout.compat.inductor import compiler_obstacle
from cb_rollout.tools.bench.peers.contenders import (
    Contender,
    generate,
    of_another_model,
    ours,
    ours_at_temperature,
    served,
    transformers_batching,
)
from cb_rollout.tools.bench.peers.vllm_process import vllm_contenders
from cb_rollout.tools.bench.roofline.machine import (
    Products,
    matmul_flops,
    needed_flops,
    num_flops,
    products_counted,
    products_seconds,
)
from cb_rollout.tools.bench.timing import interleaved, throughput
from cb_rollout.tools.bench.workload import (
    SEED,
    Setup,
    Workload,
    create_model,
    equal_lengths,
    long_tailed,
    random_prompts,
)

# The best for `generate` on the CPU model: a larger batch waits longer for its longest sequence.
BATCH_OF_TAILS = 64

# No decode step of more requests has drafts.
DRAFTED_REQUESTS = (1, 4, 8)

# A forward is traced after 64 steps, and with drafts a rollout has few steps.
NUM_DRAFT_WARM_UPS = 4

# Random weights repeat themselves when greedy, and never at temperature 1: best and worst case.
DRAFT_TEMPERATURES = {"greedy": 0.0, "at temperature 1": 1.0}


def bench_rollout(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of long-tailed groups and of equal lengths."""
    sizes = setup.sizes
    workloads = {
        "long_tailed_groups": (long_tailed(sizes), setup.batch_size or BATCH_OF_TAILS),
        "equal_lengths": (equal_lengths(sizes), setup.batch_size or sizes.num_sequences),
    }
    model, results = create_model(sizes.shape, setup.device), {}
    with vllm_contenders(model, [workload for workload, _ in workloads.values()]) as vllm:
        for name, (workload, batch_size) in workloads.items():
            count = len(workload.prompts)
            print(f"rollout, {name}: {count} sequences, {workload.num_tokens} tokens")
            results[name] = _bench_workload(setup, model, workload, batch_size, vllm)
    return results


def _bench_workload(
    setup: Setup, model: Any, workload: Workload, batch_size: int, vllm: dict[str, Contender]
) -> dict[str, Any]:
    contenders = {
        "cb_rollout": ours(),
        **vllm,
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
        # Another process runs no layers of this model.
        if not setup.sizes.counts_forwards or contender.pid is not None:
            continue
        counted = _count_products(contender, model, workload)
        # Fewer operations than needed mean that some forwards could not be counted.
        if (flops := num_flops(model, counted)) >= needed:
            results[name] |= {
                "forwards_matmul_share": flops / rate * speed,
                "forwards_products_share": products_seconds(model, counted) * speed,
            }
    return results


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
    results = {}
    for name, workload in workloads.items():
        print(f"{name}: {len(workload.prompts)} sequences, {workload.num_tokens} tokens")
        results[name] = throughputs(contenders, model, workload, setup.repetitions)
    return results


def bench_serve(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of one rollout called in this process and served over HTTP."""
    model, workload = create_model(setup.sizes.shape, setup.device), long_tailed(setup.sizes)
    contenders = {"cb_rollout": ours(), "served on loopback": served()}
    return {"served": throughputs(contenders, model, workload, setup.repetitions)}


def bench_drafts(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of few requests, with and without drafts."""
    sizes = setup.sizes
    model = create_model(sizes.shape, setup.device)
    draws = random.Random(SEED)
    results = {}
    for mode, temperature in DRAFT_TEMPERATURES.items():
        contenders = {
            "cb_rollout": ours_at_temperature(temperature),
            "cb_rollout, no drafts": ours_at_temperature(temperature, num_speculative_tokens=0),
        }
        for count in DRAFTED_REQUESTS:
            prompts = random_prompts(draws, count, sizes.prompt_tokens, sizes.shape["vocab_size"])
            workload = Workload(prompts, [sizes.longest_in_step] * count)
            print(f"drafts, {mode}: {count} requests, {workload.num_tokens} tokens")
            results[f"{count} requests, {mode}"] = throughputs(
                contenders, model, workload, setup.repetitions, NUM_DRAFT_WARM_UPS
            )
    return results


def throughputs(
    contenders: dict[str, Contender],
    model: Any,
    workload: Workload,
    repetitions: int,
    num_warm_ups: int = 1,
) -> dict[str, Any]:
    """Return tokens per second of each contender, which take turns."""
    turns = interleaved(contenders, model, workload, repetitions, num_warm_ups)
    return {
        name: throughput(contender, turns[name], workload.num_tokens)
        for name, contender in contenders.items()
    }
