"""Rewrite the graph of a traced forward for a CPU: cheap calls, and the product of few rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from cb_rollout.compat import inductor
from cb_rollout.engine.attention.cpu.few_row_linear import linear
from cb_rollout.engine.attention.traced_forward import call_attention
from cb_rollout.engine.numerics.native.library import TYPES

aten = torch.ops.aten

# torch's own functions take half the time to call that operators take.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.gelu.default: functional.gelu,
    aten.mean.dim: torch.mean,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.silu.default: functional.silu,
    aten.split.Tensor: torch.split,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    torch.ops.cb_rollout.attend.default: call_attention,
    torch.ops.cb_rollout.grouped_product.default: inductor.grouped_product,
    torch.ops.cb_rollout.linear.default: linear,
}

METHODS: dict[Any, str] = {
    # The C++ kernels return contiguous tensors even for other inputs, where `view` might fail.
    aten._unsafe_view.default: "reshape",
    aten.expand.default: "expand",
    aten.sym_size.int: "size",
    aten.view.default: "reshape",
}

RESHAPES = (aten.view.default, aten._unsafe_view.default)


def replace_linear_layers(graph: fx.Graph, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the linear layers of a traced graph by `few_row_linear`, in place."""
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *bias, rows, transposed = node.args
            outputs = node.meta["val"]
            is_kind = outputs.dtype in TYPES and not node.kwargs
            is_linear = is_kind and transposed.target is aten.t.default
            if is_linear and all(b.meta["val"].shape == outputs.shape[1:] for b in bias):
                node.target = torch.ops.cb_rollout.linear.default
                node.args = (rows, transposed.args[0], *(bias or [None]))
    return weights


def simplify(graph: fx.Graph) -> None:
    """Call the operators of a traced graph in the cheapest way, in place."""
    _join_reshapes(graph)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.target is aten.slice.Tensor:
            _narrow(node)
        elif node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
        elif node.target in METHODS:
            node.op, node.target = "call_method", METHODS[node.target]
    graph.lint()


def _join_reshapes(graph: fx.Graph) -> None:
    """Reshape each tensor of a traced graph once, whatever shapes it goes through, in place."""
    known: dict[object, fx.Node] = {}
    for node in graph.nodes:
        if node.target not in RESHAPES:
            continue
        if node.args[0].target in RESHAPES:
            node.args = (node.args[0].args[0], node.args[1])
        source, sizes = node.args
        if source.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(source)
        elif (first := known.setdefault((source, tuple(sizes)), node)) is not node:
            node.replace_all_uses_with(first)


def _narrow(node: fx.Node) -> None:
    """Replace a slice of known size by `narrow`, which takes a third of the time."""
    source, dim, start, end, *step = node.args
    assert isinstance(source, fx.Node)
    size = source.meta["val"].shape[dim]
    if step or not all(type(number) is int for number in (size, start, end)):
        return
    first, last, _ = slice(start, end).indices(size)
    node.target, node.args = torch.narrow, (source, dim, first, max(0, last - first))
