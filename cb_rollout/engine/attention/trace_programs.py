"""Has neighbouring operators of a trace run by one call: a program of kernels, for few rows.

Knows which operators of torch a program does, never models.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from cb_rollout import _compat_tracing
from cb_rollout.engine.attention.cpp_layers import gate, norm, rotate
from cb_rollout.engine.attention.program import Call, Program, Sizes
from cb_rollout.engine.attention.trace_stretches import outputs_of, replace
from cb_rollout.engine.native.program import Kind

aten = torch.ops.aten
PRODUCT = torch.ops.cb_rollout.product.default

LEAST_OPERATORS = 2
# Of a program: one alone is called as cheaply by itself.


def take_programs(
    module: fx.GraphModule,
    reader: fx.Node,
    attentions: Sequence[Sequence[Any]],
    *,
    has_products: bool,
) -> None:
    """Replace runs of known operators of a traced graph by one call each, in place.

    Programs are in the type that the graph multiplies in; without products there are none.

    Args:
        module: as traced, with `take_products`.
        reader: the input that is the step's reader.
        attentions: for each `mark`, the layer that attends and how.
        has_products: whether programs multiply too; not where rows are many.
    """
    graph = module.graph
    rows = graph.find_nodes(op="placeholder")[0]
    _count_rows_once(graph, rows, reader)
    products = graph.find_nodes(op="call_function", target=PRODUCT)
    if not products:
        return
    reading = _Reading(module, rows, attentions, products[0].meta["val"].dtype)
    if not has_products:
        reading.calls = {n: c for n, c in reading.calls.items() if c.kind is not Kind.PRODUCT}
    # The last first: what a program takes is then still where it was read.
    for run in reversed(list(_runs(graph, reading))):
        nodes = [node for node in run if node.users]
        calls = {node: reading.calls[node] for node in nodes if node in reading.calls}
        if len(calls) < LEAST_OPERATORS:
            continue
        given = dict.fromkeys(n for call in calls.values() for n in call.given if n is not None)
        inputs = [node for node in given if node not in calls]
        outputs = outputs_of(nodes)
        returned = [(reading.root(node), reading.sizes(node) or ()) for node in outputs]
        sizes = {node: reading.sizes(node) for node in (*inputs, *calls)}
        with_rows = {node: of_row for node, of_row in sizes.items() if of_row is not None}
        program = Program(calls, inputs, returned, with_rows, reading.dtype)
        replace(nodes, program, [reader, *inputs], outputs)
        # What only gave a program's inputs another shape is nobody's now.
        graph.eliminate_dead_code()
    graph.lint()


def _count_rows_once(graph: fx.Graph, rows: fx.Node, reader: fx.Node) -> None:
    """Have the number of rows asked of an input, not of what is computed."""
    num_rows = rows.meta["val"].shape[0]
    counts = graph.find_nodes(op="call_function", target=aten.sym_size.int)
    with graph.inserting_after(reader):
        count = graph.call_function(aten.sym_size.int, (rows, 0))
    count.meta["val"] = num_rows
    for node in counts:
        if _is_symbol(node.meta["val"], num_rows):
            node.replace_all_uses_with(count)
            graph.erase_node(node)


def _is_symbol(size: Any, symbol: Any) -> bool:
    return not isinstance(size, int) and str(size) == str(symbol)


def _runs(graph: fx.Graph, reading: "_Reading") -> Iterator[list[fx.Node]]:
    """Known operators such that nothing between them needs what they compute."""
    nodes: list[fx.Node] = []
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        depends = any(needed in inside for needed in node.all_input_nodes)
        if node in reading.calls or (depends and node in reading.sources):
            nodes.append(node)
            inside.add(node)
        elif depends or node.is_impure():
            yield nodes
            nodes, inside = [], set()
    yield nodes


class _Reading:
    """What the nodes of a graph are to a program."""

    def __init__(
        self,
        module: fx.GraphModule,
        rows: fx.Node,
        attentions: Sequence[Sequence[Any]],
        dtype: torch.dtype,
    ) -> None:
        self._module, self._num_rows = module, rows.meta["val"].shape[0]
        self.attentions, self.dtype = attentions, dtype
        self.calls: dict[fx.Node, Call] = {}
        """Operators that a program has."""
        self.sources: dict[fx.Node, fx.Node] = {}
        """Nodes whose numbers are those of another, in the same order."""
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            args = cast("tuple[Any, ...]", node.args)
            if node.target in _SHAPINGS and self._is_in_order(node, *args):
                self.sources[node] = args[0]
                continue
            is_known = node.target in _CALLS and not node.kwargs and self.sizes(node) is not None
            call = _CALLS[node.target](self, *args) if is_known else None
            if call is None:
                continue
            dtypes = {self.example(n).dtype for n in (node, *call.given) if n is not None}
            if dtypes == {dtype}:
                self.calls[node] = call._replace(given=tuple(map(self.root, call.given)))
        if any(node.op == "call_function" and node.is_impure() for node in module.graph.nodes):
            # A part would be a copy, which does not see what is written to the whole.
            self.calls = {n: c for n, c in self.calls.items() if c.kind is not Kind.NARROWING}

    def example(self, node: Any) -> torch.Tensor:
        """A tensor without contents, of a node's form."""
        return _compat_tracing.example(self._module, node)

    def sizes(self, node: Any) -> Sizes | None:
        """Of a node's tensor without its rows; None: it has none, or other sizes that vary."""
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or not value.dim():
            return None
        first, *others = value.shape
        is_row = _is_symbol(first, self._num_rows) and all(type(n) is int for n in others)
        return tuple(others) if is_row else None

    def _is_in_order(self, node: fx.Node, source: fx.Node, *dims: Any) -> bool:
        """Whether both have the same numbers in the same order."""
        after, before = self.sizes(node), self.sizes(source)
        if after is None or before is None or math.prod(after) != math.prod(before):
            return False
        if node.target is aten.transpose.int:
            first, second = sorted(int(dim) % (len(before) + 1) for dim in dims)
            moved = [n for n in before[max(first - 1, 0) : second] if n != 1]
            return first > 0 and len(moved) <= 1
        return True

    def root(self, node: Any) -> Any:
        """Whose numbers a node's are."""
        while node in self.sources:
            node = self.sources[node]
        return node


def _attention(
    reading: _Reading, query: fx.Node, key: fx.Node, value: fx.Node, index: int
) -> Call | None:
    layer, form = reading.attentions[index]
    states = query, key, value
    sizes = [reading.sizes(given) for given in states]
    kept = {layer.key_dtype, layer.value_dtype}
    if None in sizes or kept != {reading.example(given).dtype for given in states}:
        return None
    (num_heads, _, key_size), (num_key_heads, *_), (*_, value_size) = cast("list[Sizes]", sizes)
    heads = num_heads, num_key_heads, key_size, value_size
    return Call(Kind.ATTENTION, states, heads, layer=layer, form=form)


def _product(
    reading: _Reading, rows: fx.Node, weight: fx.Node, *bias: fx.Node | None
) -> Call | None:
    sizes, matrix = reading.sizes(rows), reading.example(weight)
    if sizes is None or len(sizes) != 1 or not matrix.is_contiguous():
        return None
    return Call(Kind.PRODUCT, (rows, weight, *bias), (sizes[0], matrix.shape[0]))


def _norm(reading: _Reading, rows: fx.Node, weight: fx.Node, epsilon: float) -> Call | None:
    sizes = reading.sizes(rows)
    if sizes is None or not sizes:
        return None
    return Call(Kind.NORM, (rows, weight), (math.prod(sizes[:-1]), sizes[-1]), epsilon)


def _rotation(reading: _Reading, heads: fx.Node, cosines: fx.Node, sines: fx.Node) -> Call | None:
    sizes = reading.sizes(heads)
    if sizes is None or reading.sizes(cosines) is None:
        return None
    return Call(Kind.ROTATION, (heads, cosines, sines), (sizes[0], sizes[-1]))


def _gate(reading: _Reading, gates: fx.Node, values: fx.Node) -> Call | None:
    return _of_two(reading, Kind.GATE, gates, values)


def _sum(reading: _Reading, first: fx.Node, second: fx.Node) -> Call | None:
    return _of_two(reading, Kind.SUM, first, second)


def _of_two(reading: _Reading, kind: Kind, first: fx.Node, second: fx.Node) -> Call | None:
    sizes = reading.sizes(first)
    if sizes is None or sizes != reading.sizes(second):
        return None
    return Call(kind, (first, second), (math.prod(sizes),))


def _scaling(reading: _Reading, source: fx.Node, factor: object) -> Call | None:
    sizes = reading.sizes(source)
    if sizes is None or not isinstance(factor, int | float):
        return None
    return Call(Kind.SCALING, (source,), (math.prod(sizes),), factor)


def _slice(
    reading: _Reading, source: fx.Node, dim: Any, start: Any, end: Any, *step: Any
) -> Call | None:
    sizes = reading.sizes(source)
    if step or sizes is None or not all(type(n) is int for n in (dim, start, end)):
        return None
    axis = dim % (len(sizes) + 1)
    if not axis:
        return None
    first, last, _ = slice(start, end).indices(sizes[axis - 1])
    return _narrowing(source, sizes, axis, first, last - first)


def _split_part(reading: _Reading, split: fx.Node, index: int) -> Call | None:
    """Of what was split."""
    if split.target not in _SPLITS:
        return None
    source, lengths, *dim = cast("tuple[Any, ...]", split.args)
    sizes = reading.sizes(source)
    axis = dim[0] % (len(sizes) + 1) if sizes is not None and dim else 0
    if sizes is None or not axis:
        return None
    if isinstance(lengths, int):
        lengths = [lengths] * (index + 1)
    start, total = sum(lengths[:index]), sizes[axis - 1]
    return _narrowing(source, sizes, axis, start, min(lengths[index], total - start))


def _narrowing(source: fx.Node, sizes: Sizes, dim: int, start: int, length: int) -> Call | None:
    if length <= 0:
        return None
    inner = math.prod(sizes[dim:])
    counts = math.prod(sizes[: dim - 1]), sizes[dim - 1] * inner, start * inner, length * inner
    return Call(Kind.NARROWING, (source,), counts)


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)

_SHAPINGS = (
    aten._unsafe_view.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
)
# What may leave a tensor's numbers as they are.

_CALLS: dict[Any, Callable[..., Call | None]] = {
    aten.add.Tensor: _sum,
    aten.mul.Tensor: _scaling,
    aten.slice.Tensor: _slice,
    gate: _gate,
    norm: _norm,
    operator.getitem: _split_part,
    rotate: _rotation,
    torch.ops.cb_rollout.attend.default: _attention,
    PRODUCT: _product,
}
