"""Upper bounds of this machine: rates of matrix products and copies.

Own the counting and timing of the matrix products of a model's forwards, and the workload
`roofline`, which prints the rates.
"""

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from benchmarks.sizes import Setup
from cb_rollout.engine.attention.cpu.backend import CpuBackend
from cb_rollout.engine.attention.selector import select_backend
from cb_rollout.engine.numerics.kernels import multiply, multiply_many
from cb_rollout.tools.bench import Workload, create_model, timed

# Numbers of rows at which products are timed; times between two of them are interpolated.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# Numbers of rows of a decode step that the workload `roofline` prints.
DECODE_ROWS = ROWS[:8]

# Calls of all layers in each of the runs of which the best counts.
CALLS = 5


class Products(NamedTuple):
    """The matrix products of one forward: those of the head, or those of all other layers."""

    is_head: bool
    num_rows: int


def bench_roofline(setup: Setup) -> dict[str, Any]:
    """Return rates, and the tokens per second that matrix products alone would allow."""
    model = create_model(setup.sizes.shape, setup.device)
    flops = matmul_flops(model, setup.sizes.num_sequences)
    machine = {
        "matmul_gflops": flops / 1e9,
        "copy_gb_per_second": bandwidth(setup.sizes.copied_bytes, setup.device) / 1e9,
        "matmul_bound_tokens_per_second": flops / (2 * sum(matmul_parameters(model))),
    }
    layers = linear_layers(model)
    return {"machine": machine} | {
        f"linear layers of {num_rows} rows": {
            f"{name}, milliseconds": 1e3 * seconds
            for name, seconds in _seconds_by_kernel(layers, num_rows, 10).items()
        }
        for num_rows in DECODE_ROWS
    }


def bandwidth(num_bytes: int, device: str) -> float:
    """Return the bytes per second of a large copy, both read and written ones counted."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    times = [timed(lambda: target.copy_(source)) for _ in range(8)]
    return 2 * num_bytes / statistics.median(times[3:])


@contextmanager
def products_counted(model: PreTrainedModel) -> Iterator[Counter[Products]]:
    """Count the forwards of the linear layers inside, by number of rows.

    CUDA graphs, and code that reads the weights without calling the layers, are not counted.
    """
    counted: Counter[Products] = Counter()

    def count(layer: torch.nn.Linear, inputs: tuple[torch.Tensor, ...]) -> None:
        num_rows = inputs[0].numel() // layer.in_features
        counted[Products(layer is model.lm_head, num_rows)] += 1

    # The first layer of the body stands for all of them.
    first = next(layer for layer in linear_layers(model) if layer is not model.lm_head)
    hooks = [layer.register_forward_pre_hook(count) for layer in (first, model.lm_head)]
    try:
        yield counted
    finally:
        for hook in hooks:
            hook.remove()


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """Return the linear layers, the head included."""
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def matmul_parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Return the parameters that multiply every token, and the head's, which multiply the last."""
    head = model.lm_head.weight.numel()
    return sum(layer.weight.numel() for layer in linear_layers(model)) - head, head


def matmul_flops(model: PreTrainedModel, num_rows: int) -> float:
    """Return the operations per second of a layer's largest product, by the fastest kernel."""
    layer: Any = model.model.layers[0]
    seconds = min(_seconds_by_kernel([layer.mlp.up_proj], num_rows, 200).values())
    return 2 * num_rows * layer.mlp.up_proj.weight.numel() / seconds


def needed_flops(model: PreTrainedModel, workload: Workload) -> int:
    """Return the operations of the matrix products that a workload needs at least.

    Each distinct prompt is computed once, and each completion except for its last token.
    """
    body, head = matmul_parameters(model)
    prompts = {tuple(prompt) for prompt in workload.prompts}
    num_decoded = workload.num_tokens - len(workload.prompts)
    num_tokens = sum(map(len, prompts)) + num_decoded
    return 2 * (body * num_tokens + head * (len(prompts) + num_decoded))


def best_seconds(work: Callable[[], object], count: int) -> float:
    """Return the seconds of one call, from the best of five runs of `count` calls."""

    def many() -> None:
        for _ in range(count):
            work()

    many()
    return min(timed(many) for _ in range(5)) / count


def num_flops(model: PreTrainedModel, counted: Counter[Products]) -> int:
    """Return the operations of counted products, padding included."""
    body, head = matmul_parameters(model)
    return sum(2 * p.num_rows * (head if p.is_head else body) * n for p, n in counted.items())


def products_seconds(model: PreTrainedModel, counted: Counter[Products]) -> float:
    """Return the seconds that counted products take alone, each by the fastest kernel."""
    most = max(products.num_rows for products in counted)
    tried = [rows for rows in ROWS if rows < most] + [most]
    seconds = {
        is_head: [_best_kernel_seconds(model, Products(is_head, rows)) for rows in tried]
        for is_head in (False, True)
    }
    return sum(
        n * _interpolated(tried, seconds[products.is_head], products.num_rows)
        for products, n in counted.items()
    )


def _best_kernel_seconds(model: PreTrainedModel, products: Products) -> float:
    layers = [x for x in linear_layers(model) if (x is model.lm_head) == products.is_head]
    return min(_seconds_by_kernel(layers, products.num_rows, CALLS).values())


@torch.inference_mode()
def _seconds_by_kernel(
    layers: list[torch.nn.Linear], num_rows: int, num_calls: int
) -> dict[str, float]:
    device = layers[0].weight.device
    kernels: dict[str, Callable[..., torch.Tensor]] = {"torch": functional.linear}
    if select_backend(device).backend is CpuBackend:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        packed = {id(x.weight): reorder(x.weight, num_rows) for x in layers}
        kernels |= {
            "few": multiply,
            "many": lambda rows_BK, weight_NK: multiply_many(rows_BK, [weight_NK]),
            "packed": partial(_packed, packed),
        }
    pairs = [(x.weight.new_ones(num_rows, x.weight.shape[1]), x.weight) for x in layers]
    return {
        name: best_seconds(lambda linear=linear: [linear(*pair) for pair in pairs], num_calls)
        for name, linear in kernels.items()
    }


def _packed(
    packed: dict[int, torch.Tensor], rows_BK: torch.Tensor, weight_NK: torch.Tensor
) -> torch.Tensor:
    """Compute a layer by oneDNN from a weight in its own order, as vLLM does."""
    product = torch.ops.mkldnn._linear_pointwise
    return product(rows_BK, packed[id(weight_NK)], None, "none", [], "")


def _interpolated(points: list[int], values: list[float], point: int) -> float:
    index = bisect_left(points, point)
    if points[index] == point:
        return values[index]
    below, above = points[index - 1], points[index]
    share = (point - below) / (above - below)
    return values[index - 1] + share * (values[index] - values[index - 1])
