"""The matrix products of a model's forwards: which ran, and how long they take by themselves."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from cb_rollout.engine.attention.backend import DecodePath, select_backend
from cb_rollout.engine.attention.cpu.few_row_linear import multiply
from cb_rollout.tools.bench.machine import best_seconds
from cb_rollout.tools.bench.model import linear_layers

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Where products are timed; between two of them, time grows evenly.

CALLS = 5
# Of all layers, in each of the runs of which the best counts.


class Products(NamedTuple):
    """Linear layers of one kind, all of them once."""

    is_head: bool
    num_rows: int


@contextmanager
def products_counted(model: Qwen3ForCausalLM) -> Iterator[Counter[Products]]:
    """How often the body's linear layers and the head ran inside, by number of rows.

    What replays a graph, or multiplies the weights by itself, is not seen.
    """
    counted: Counter[Products] = Counter()
    layers = linear_layers(model)

    def count(layer: torch.nn.Linear, inputs: tuple[torch.Tensor, ...]) -> None:
        num_rows = inputs[0].numel() // layer.in_features
        counted[Products(layer is model.lm_head, num_rows)] += 1

    # The first layer of the body stands for all of them.
    first = next(layer for layer in layers if layer is not model.lm_head)
    hooks = [layer.register_forward_pre_hook(count) for layer in (first, model.lm_head)]
    try:
        yield counted
    finally:
        for hook in hooks:
            hook.remove()


def num_flops(model: Qwen3ForCausalLM, counted: Counter[Products]) -> int:
    """Operations of products, padding included."""
    return sum(
        2 * products.num_rows * sum(layer.weight.numel() for layer in _layers(model, products)) * n
        for products, n in counted.items()
    )


def alone_seconds(model: Qwen3ForCausalLM, counted: Counter[Products]) -> float:
    """How long the same products take by themselves, each in the fastest way known here."""
    most = max(products.num_rows for products in counted)
    tried = [rows for rows in ROWS if rows < most] + [most]
    seconds = {
        is_head: [_seconds(model, Products(is_head, rows)) for rows in tried]
        for is_head in (False, True)
    }
    return sum(
        n * _between(tried, seconds[products.is_head], products.num_rows)
        for products, n in counted.items()
    )


def _layers(model: Qwen3ForCausalLM, products: Products) -> list[torch.nn.Linear]:
    return [x for x in linear_layers(model) if (x is model.lm_head) == products.is_head]


@torch.inference_mode()
def _seconds(model: Qwen3ForCausalLM, products: Products) -> float:
    weights = [layer.weight for layer in _layers(model, products)]
    inputs = [weight.new_ones(products.num_rows, weight.shape[1]) for weight in weights]
    pairs = list(zip(inputs, weights, strict=True))
    ways = ways_to_multiply(model.device).values()
    return min(best_seconds(lambda w=way: [w(*pair) for pair in pairs], CALLS) for way in ways)


def ways_to_multiply(device: torch.device) -> dict[str, Callable[..., torch.Tensor]]:
    """Who computes linear layers on a device, by name; each takes rows and a weight."""
    ways: dict[str, Callable[..., torch.Tensor]] = {"torch": functional.linear}
    if select_backend(device).path is DecodePath.CPP:
        ways["kernel"] = multiply
    return ways


def _between(points: list[int], values: list[float], point: int) -> float:
    """The value at a point, on the line between those at its neighbours."""
    index = bisect_left(points, point)
    if points[index] == point:
        return values[index]
    below, above = points[index - 1], points[index]
    share = (point - below) / (above - below)
    return values[index - 1] + share * (values[index] - values[index - 1])
