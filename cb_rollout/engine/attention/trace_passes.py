"""Makes a trace cheap to run: the same operators, called in the cheapest way that there is."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from cb_rollout import _compat_tracing
from cb_rollout.engine.attention.choice import CPU_DTYPES
from cb_rollout.engine.attention.cpp_layers import product

aten = torch.ops.aten

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
    operator.getitem: operator.getitem,
    torch.ops.cb_rollout.grouped_product.default: _compat_tracing.grouped_product,
    torch.ops.cb_rollout.product.default: product,
}
# torch's own functions take half the time to call that operators take.

METHODS: dict[Any, str] = {
    # A kernel's outputs lie in order, whatever its inputs do; a view might be refused.
    aten._unsafe_view.default: "reshape",
    aten.expand.default: "expand",
    aten.sym_size.int: "size",
    aten.view.default: "reshape",
}

RESHAPES = (aten.view.default, aten._unsafe_view.default)


def take_products(graph: fx.Graph) -> None:
    """Have linear layers of a traced graph multiply by the kernel, in place."""
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *bias, rows, transposed = node.args
            outputs = node.meta["val"]
            is_kind = outputs.dtype in CPU_DTYPES and not node.kwargs
            is_linear = is_kind and transposed.target is aten.t.default
            if is_linear and all(b.meta["val"].shape == outputs.shape[1:] for b in bias):
                node.target = torch.ops.cb_rollout.product.default
                node.args = (rows, transposed.args[0], *(bias or [None]))


def _join_reshapes(graph: fx.Graph) -> None:
    """Have a tensor of a traced graph reshaped once, whatever shapes it goes through, in place."""
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


def add_reader(graph: fx.Graph) -> None:
    """Have a traced graph take the step's reader too, behind its other inputs."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        graph.placeholder("reader")


def reader_of(graph: fx.Graph) -> fx.Node:
    """The input that `add_reader` made; while there are no constants behind it."""
    return graph.find_nodes(op="placeholder")[-1]


def simplify(module: fx.GraphModule, calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Rewrite a traced graph in place.

    Afterwards it takes the trace's own inputs, then what is returned.

    Args:
        module: as traced, with `add_reader`.
        calls: for each `mark`, the layer that attends and how.

    Returns:
        The weights, layers and forms that the graph takes.
    """
    graph, reader, constants = module.graph, reader_of(module.graph), _Constants(module)
    _join_reshapes(graph)
    for node in list(graph.nodes):
        if node.op == "get_attr":
            node.replace_all_uses_with(constants.of(_attribute(module, node.target)))
        elif _compat_tracing.is_mark(node):
            query, key, value, call = node.args
            layer, form = (constants.of(constant) for constant in calls[call])
            with graph.inserting_before(node):
                attended = graph.call_method("attend", (reader, layer, query, key, value, form))
            node.replace_all_uses_with(attended)
        elif node.target is aten.slice.Tensor:
            _narrow(node)
    # Inputs stay, used or not: the trace is called with all of them.
    graph.eliminate_dead_code(lambda node: node.op == "call_method" or node.is_impure())
    for node in graph.nodes:
        if node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
        elif node.target in METHODS:
            node.op, node.target = "call_method", METHODS[node.target]
    graph.lint()
    return constants.values


class _Constants:
    """Inputs of a graph that are the same at every call, each once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._graph = module.graph
        self._after = reader_of(module.graph)
        self._inputs: dict[int, fx.Node] = {}
        self.values: list[Any] = []

    def of(self, value: Any) -> fx.Node:
        if id(value) not in self._inputs:
            with self._graph.inserting_after(self._after):
                self._after = self._graph.placeholder(f"constant_{len(self.values)}")
            self._inputs[id(value)] = self._after
            self._after.meta["val"] = value
            self.values.append(value)
        return self._inputs[id(value)]


def _attribute(module: fx.GraphModule, name: Any) -> Any:
    return operator.attrgetter(name)(module)


def _narrow(node: fx.Node) -> None:
    """Write a slice of known size as a narrowing, which takes a third of the time."""
    source, dim, start, end, *step = node.args
    assert isinstance(source, fx.Node)
    size = source.meta["val"].shape[dim]
    if step or not all(type(number) is int for number in (size, start, end)):
        return
    first, last, _ = slice(start, end).indices(size)
    node.target, node.args = torch.narrow, (source, dim, first, max(0, last - first))
