"""Find the linear layers of a traced graph, and join those with the same input into one product."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from cb_rollout.compat import inductor

aten = torch.ops.aten

RESHAPES = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True, slots=True)
class LinearNode:
    """A linear layer of a traced graph."""

    node: fx.Node
    """The product, with its bias if it has one."""
    rows: fx.Node
    weights: list[fx.Node]
    """The weight, and the bias if it has one."""


def linear_nodes(graph: fx.Graph) -> list[list[LinearNode]]:
    """Return a graph's linear layers, grouped by input rows and by whether they have a bias."""
    groups: dict[tuple[object, ...], list[LinearNode]] = {}
    for node in graph.nodes:
        if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            continue
        # `mm` takes rows and a weight, `addmm` a bias before them.
        *biases, rows, transposed = node.args
        if transposed.target is not aten.t.default:
            continue
        num_outputs = node.meta["val"].shape[1:]
        if any(bias.meta["val"].shape != num_outputs for bias in biases):
            continue
        (weight,) = transposed.args
        source = rows.args[0] if rows.target in RESHAPES else rows
        num_inputs = transposed.meta["val"].shape[0]
        key = (source, num_inputs, bool(biases))
        layer = LinearNode(node=node, rows=rows, weights=[weight, *biases])
        groups.setdefault(key, []).append(layer)
    return list(groups.values())


def replace_by_columns(graph: fx.Graph, layers: Sequence[LinearNode], product: fx.Node) -> None:
    """Replace layers by columns of one product, which stands before the first layer."""
    start = 0
    with graph.inserting_after(product):
        for layer in layers:
            node = layer.node
            end = start + node.meta["val"].shape[1]
            columns = inductor.call_function(graph, aten.slice.Tensor, product, 1, start, end)
            node.replace_all_uses_with(columns)
            graph.erase_node(node)
            start = end
