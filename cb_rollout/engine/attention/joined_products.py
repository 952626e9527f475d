"""Join the products of a traced graph that multiply the same rows by neighbouring weights.

Query, key and value are then one product, and so are gate and up. Neighbours are weights that lie
one after the other in one storage, as `weights.replica` places them; nothing is copied.

B: rows, K: inputs of a product, N: its outputs.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise

import torch
from torch import fx

from cb_rollout.compat import inductor

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)


def join_products(graph: fx.Graph, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join products, in place.

    Args:
        graph: its last inputs are the weights.
        weights: their tensors.

    Returns:
        The weights, and after them the joined ones, which are views of the same storage.
    """
    inputs = graph.find_nodes(op="placeholder")
    held = dict(zip(inputs[-len(weights) :], weights, strict=True)) if weights else {}
    joined = _JoinedWeights(graph, held)
    products: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs:
            *bias, rows, weight = node.args
            source = rows.args[0] if rows.target in _VIEWS else rows
            if weight.target is aten.t.default and all(
                one in held for one in (weight.args[0], *bias)
            ):
                products.setdefault((source, len(bias)), []).append(node)
    for nodes in products.values():
        for neighbours in _runs_of_neighbours(nodes, held):
            if len(neighbours) > 1:
                _join(graph, neighbours, joined)
    return [*weights, *joined.added]


class _JoinedWeights:
    """Adds weights to a graph that span several of its own."""

    def __init__(self, graph: fx.Graph, held: dict[fx.Node, torch.Tensor]) -> None:
        self.added: list[torch.Tensor] = []
        self._graph, self._held = graph, held
        self._last = next(reversed(graph.find_nodes(op="placeholder")))

    def spanning(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """Return the input of a weight that spans these neighbours."""
        parts = [self._held[node] for node in nodes]
        shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
        first = parts[0].detach()
        self.added.append(first.as_strided(shape, first.stride(), first.storage_offset()))
        with self._graph.inserting_after(self._last):
            self._last = self._graph.placeholder(f"joined_{len(self.added)}")
        self._last.meta["val"] = inductor.fake_weight(self._graph, self.added[-1])
        return self._last


def _weights_of(product: fx.Node) -> list[fx.Node]:
    """Return the weight of a product, and its bias if it has one."""
    *bias, _, weight = product.args
    assert isinstance(weight, fx.Node)
    return [weight.args[0], *bias]  # pyright: ignore[reportReturnType]


def _runs_of_neighbours(
    nodes: Sequence[fx.Node], held: dict[fx.Node, torch.Tensor]
) -> list[list[fx.Node]]:
    """Split products of the same rows where a weight does not follow the one before it."""
    runs: list[int] = [0]
    for before, after in pairwise(nodes):
        pairs = zip(_weights_of(before), _weights_of(after), strict=True)
        follows = all(_follows(held[one], held[other]) for one, other in pairs)
        runs.append(runs[-1] + (not follows))
    numbered = zip(runs, nodes, strict=True)
    return [[node for _, node in run] for _, run in groupby(numbered, lambda pair: pair[0])]


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether a contiguous weight begins where another one ends, and has equal columns."""
    return (
        before.untyped_storage()._cdata == after.untyped_storage()._cdata
        and before.dtype == after.dtype
        and before.shape[1:] == after.shape[1:]
        and before.is_contiguous()
        and after.is_contiguous()
        and before.storage_offset() + before.numel() == after.storage_offset()
    )


def _join(graph: fx.Graph, nodes: Sequence[fx.Node], joined: _JoinedWeights) -> None:
    """Replace products by parts of one product of all their weights."""
    first = nodes[0]
    wholes = [joined.spanning(parts) for parts in zip(*map(_weights_of, nodes), strict=True)]
    rows = first.args[-2]
    with graph.inserting_before(first):
        transposed = inductor.call_function(graph, aten.t.default, wholes[0])
        whole = inductor.call_function(graph, first.target, *wholes[1:], rows, transposed)
        start = 0
        for node in nodes:
            end = start + node.meta["val"].shape[1]
            part = inductor.call_function(graph, aten.slice.Tensor, whole, 1, start, end)
            node.replace_all_uses_with(part)
            start = end
    for node in nodes:
        graph.erase_node(node)
