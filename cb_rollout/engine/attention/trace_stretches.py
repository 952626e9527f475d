"""Neighbouring operators of a trace as one: what they take and give, and a call in their place."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from cb_rollout import _compat_tracing


def outputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Tensors among the nodes that others use."""
    inside = set(nodes)
    return [node for node in nodes if is_tensor(node) and any(u not in inside for u in node.users)]


def replace(
    nodes: Sequence[fx.Node],
    function: Callable[..., Any],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> None:
    """Have a graph call a function in the nodes' place, behind the last of them.

    Args:
        nodes: in the graph's order; numbers among them that others use stay.
        function: takes the inputs, and returns a tuple of the outputs.
        inputs: nodes before the last of `nodes`.
        outputs: those of `nodes`, see `outputs_of`.
    """
    graph = nodes[-1].graph
    with graph.inserting_after(nodes[-1]):
        results = graph.call_function(function, tuple(inputs))
    for index, output in reversed(list(enumerate(outputs))):
        with graph.inserting_after(results):
            result = graph.call_function(operator.getitem, (results, index))
        result.meta = dict(output.meta)
        output.replace_all_uses_with(result)
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)


class Stretch:
    """Nodes of a graph as a graph of their own, which takes and gives tensors only."""

    def __init__(self, owner: fx.GraphModule, nodes: list[fx.Node]) -> None:
        """Copy them.

        Args:
            owner: as traced.
            nodes: in its order.
        """
        self._nodes = nodes
        self.outputs = outputs_of(nodes)
        self._inputs = list(dict.fromkeys(_needed(nodes, set(nodes))))
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self._forms: list[str] = []
        for node in self._inputs:
            example = _compat_tracing.example(owner, node)
            copies[node] = graph.placeholder(f"input_{len(copies)}")
            copies[node].meta = {"val": example}
            self._forms.append(f"{example.dtype} {example.shape} {example.stride()}")
        for node in nodes:
            _copy(node, graph, copies)
        graph.output(tuple(copies[node] for node in self.outputs))
        self.module = fx.GraphModule({}, graph)

    @property
    def key(self) -> object:
        """Equal for stretches that one function does."""
        return self.module.code, tuple(self._forms)

    def replace(self, function: Callable[..., Any]) -> None:
        """Have the owner's graph call a function in the nodes' place."""
        replace(self._nodes, function, self._inputs, self.outputs)


def _needed(nodes: Iterable[fx.Node], inside: set[fx.Node]) -> Iterator[fx.Node]:
    """Tensors from outside; a number from outside is computed anew from the tensors it is of.

    Inductor knows a number of rows by the tensors that have them.
    """
    for node in nodes:
        for needed in node.all_input_nodes:
            if needed in inside:
                continue
            if is_tensor(needed):
                yield needed
            else:
                yield from _needed([needed], inside)


def _copy(node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    if node in copies:
        return
    for needed in node.all_input_nodes:
        _copy(needed, graph, copies)
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    # Names of its own would make every layer another function.
    copies[node] = graph.create_node(
        node.op, node.target, args, kwargs, name=f"value_{len(copies)}"
    )
    copies[node].meta = dict(node.meta)


def is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor) or node.op == "get_attr"
