"""The workload `rollout`: prompts in, completions out, of long-tailed and of equal lengths.

Each figure has its `matmul_share`: the share of its time that the matrix products which the
workload needs would take, at the rate of a large product.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from cb_rollout.compat.inductor import compiler_obstacle
from cb_rollout.tools.bench.contenders import Contender, generate, ours, transformers_batching
from cb_rollout.tools.bench.timing import best_seconds, throughputs
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


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """Return the linear layers, the head included."""
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def matmul_parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Return the parameters that multiply every token, and the head's, which multiply the last."""
    head = model.lm_head.weight.numel()
    return sum(layer.weight.numel() for layer in linear_layers(model)) - head, head


def matmul_flops(model: PreTrainedModel, num_rows: int) -> float:
    """Return the operations per second of a layer's largest product with `num_rows` rows."""
    layer: Any = model.model.layers[0]
    weight = layer.mlp.up_proj.weight.detach()
    rows = torch.randn(num_rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
    seconds = best_seconds(lambda: functional.linear(rows, weight), 200)
    return 2 * num_rows * weight.numel() / seconds


def needed_flops(model: PreTrainedModel, workload: Workload) -> int:
    """Return the operations of the matrix products that a workload needs at least.

    Each distinct prompt is computed once, and each completion except for its last token.
    """
    body, head = matmul_parameters(model)
    prompts = {tuple(prompt) for prompt in workload.prompts}
    num_decoded = workload.num_tokens - len(workload.prompts)
    num_tokens = sum(map(len, prompts)) + num_decoded
    return 2 * (body * num_tokens + head * (len(prompts) + num_decoded))
