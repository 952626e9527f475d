"""Finds in a trace what takes several operators and one kernel does: norms, rotations and gates.

What is looked for is written down as the operators that models of transformers do it with. What is
not found stays as it is.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.passes.utils.matcher_utils import InternalMatch
from torch.fx.subgraph_rewriter import replace_pattern_with_filters

from cb_rollout.engine.attention.choice import CPU_DTYPES
from cb_rollout.engine.attention.cpp_layers import gate, norm, rotate

aten = torch.ops.aten

TO_THE_END = 2**63 - 1
# What tracing writes for the end of a slice that has none.


def _normed(rows: Any, epsilon: Any) -> Any:
    squares = aten.mean.dim(aten.pow.Tensor_Scalar(rows, 2), [-1], True)
    return aten.mul.Tensor(rows, aten.rsqrt.default(aten.add.Tensor(squares, epsilon)))


def _norm(rows: Any, weight: Any, epsilon: Any) -> Any:
    return aten.mul.Tensor(weight, _normed(rows, epsilon))


def _norm_weight_last(rows: Any, weight: Any, epsilon: Any) -> Any:
    return aten.mul.Tensor(_normed(rows, epsilon), weight)


def _rotation(heads: Any, cosines: Any, sines: Any, half: Any) -> Any:
    first = aten.slice.Tensor(heads, 3, 0, half)
    second = aten.slice.Tensor(heads, 3, half, TO_THE_END)
    turned = aten.cat.default([aten.neg.default(second), first], -1)
    return aten.add.Tensor(aten.mul.Tensor(heads, cosines), aten.mul.Tensor(turned, sines))


def _gate(gates: Any, values: Any) -> Any:
    return aten.mul.Tensor(aten.silu.default(gates), values)


def _gate_last(gates: Any, values: Any) -> Any:
    return aten.mul.Tensor(values, aten.silu.default(gates))


def _is_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: object) -> bool:
    return weight.shape == rows.shape[-1:] and isinstance(epsilon, float)


def _is_rotation(
    heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, half: object
) -> bool:
    row = (heads.shape[0], 1, 1, heads.shape[-1])
    is_one_token = heads.dim() == 4 and heads.shape[2] == 1
    return is_one_token and cosines.shape == sines.shape == row and half == heads.shape[-1] / 2


def _is_gate(gates: torch.Tensor, values: torch.Tensor) -> bool:
    return gates.shape == values.shape


class _Fusion(NamedTuple):
    """What is looked for."""

    pattern: Callable[..., Any]
    function: Callable[..., Any]
    """Does the same; takes the first of the pattern's inputs."""
    num_tensors: int
    """Of the inputs, those before the numbers."""
    fits: Callable[..., bool]
    """Whether the function takes such inputs: tensors without contents, and numbers."""


_FUSIONS = (
    _Fusion(_norm, norm, 2, _is_norm),
    _Fusion(_norm_weight_last, norm, 2, _is_norm),
    _Fusion(_rotation, rotate, 3, _is_rotation),
    _Fusion(_gate, gate, 2, _is_gate),
    _Fusion(_gate_last, gate, 2, _is_gate),
)


def fuse(module: fx.GraphModule) -> None:
    """Have a traced graph call one function for each of what is found, in place.

    The function runs where its result is first used. What a tensor is written to before that, but
    after the first of the operators, stays.
    """
    for fusion in _FUSIONS:
        pattern = fx.symbolic_trace(fusion.pattern).graph
        places = {node: place for place, node in enumerate(module.graph.nodes)}
        fits = [partial(_fits, fusion, places)]
        for found in replace_pattern_with_filters(module, pattern, _calling(fusion), fits):
            found.replacements[0].meta = dict(found.nodes_map[found.anchor].meta)


def _fits(fusion: _Fusion, places: dict[fx.Node, int], match: InternalMatch, *_: fx.Graph) -> bool:
    """Whether the function does what was found; `places` tells the order of the graph's nodes."""
    inputs = [
        given.meta["val"] if isinstance(given, fx.Node) else given
        for given in match.placeholder_nodes
    ]
    tensors = inputs[: fusion.num_tensors]
    dtypes = {given.dtype if isinstance(given, torch.Tensor) else None for given in tensors}
    is_kind = len(dtypes) == 1 and dtypes <= set(CPU_DTYPES) and fusion.fits(*inputs)
    return is_kind and not _is_written_within(match, places)


def _is_written_within(match: InternalMatch, places: dict[fx.Node, int]) -> bool:
    """Whether anything is written to between the first operator and the first use of the last."""
    found = [match.nodes_map[node] for node in match.nodes_map if node.op == "call_function"]
    first = min(places[node] for node in found)
    users = [places[user] for output in match.returning_nodes for user in output.users]
    last = min(users, default=len(places))
    return any(
        first < place < last and node.op == "call_function" and node.is_impure()
        for node, place in places.items()
    )


def _calling(fusion: _Fusion) -> fx.Graph:
    """A graph with the pattern's inputs that calls its function."""
    graph = fx.Graph()
    names, taken = (
        inspect.signature(function).parameters for function in (fusion.pattern, fusion.function)
    )
    inputs = [graph.placeholder(name) for name in names]
    graph.output(graph.call_function(fusion.function, tuple(inputs[: len(taken)])))
    return graph
