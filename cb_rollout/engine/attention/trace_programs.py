"""Has neighbouring operators of a trace run by one call: a program of kernels, for few rows.

What an operator computes takes less time, for few rows, than to call it from Python. So a program
lists what is to be called, with where its numbers are, and C++ goes through the list. Operators that
only give a tensor another shape are nothing at all there: every tensor of a program lies in order.

B: rows.
"""

import ctypes
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from cb_rollout import _compat_tracing
from cb_rollout.engine.attention.choice import CPU_DTYPES
from cb_rollout.engine.attention.cpp_layers import gate, layers_library, norm, rotate
from cb_rollout.engine.attention.trace_stretches import outputs_of, replace
from cb_rollout.engine.native.library import COUNT, TENSOR

aten = torch.ops.aten

NOWHERE = -(2**63)
# The place of a tensor that is not there.

LEAST_OPERATORS = 2
# Of a program: one alone is called as cheaply by itself.


class Kind(IntEnum):
    """What an operator of a program does; as program.cpp has it."""

    PRODUCT = 0
    NORM = 1
    ROTATION = 2
    GATE = 3
    SUM = 4
    PROPORTION = 5
    NARROWING = 6


class _Operator(ctypes.Structure):
    """As program.cpp has it."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("given", ctypes.c_int64 * 3),
        ("output", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * 4),
        ("number", ctypes.c_double),
    )


class _Step(NamedTuple):
    """An operator of a program, and the nodes that it reads."""

    kind: Kind
    given: tuple[fx.Node | None, ...]
    sizes: tuple[int, ...]
    number: float = 0.0


def take_programs(module: fx.GraphModule) -> None:
    """Replace runs of known operators of a traced graph by one call each, in place."""
    graph = module.graph
    rows = next(node for node in graph.nodes if node.op == "placeholder")
    _count_rows_once(graph, rows)
    reading = _Reading(module, rows)
    # The last first: what a program takes is then still where it was read.
    for run in reversed(list(_runs(graph, reading))):
        nodes = [node for node in run if node.users]
        if sum(node in reading.steps for node in nodes) < LEAST_OPERATORS:
            continue
        program = Program(nodes, reading)
        replace(nodes, program, program.inputs, program.outputs)
        # What only gave a program's inputs another shape is nobody's now.
        graph.eliminate_dead_code()
    graph.lint()


def _count_rows_once(graph: fx.Graph, rows: fx.Node) -> None:
    """Have the number of rows asked of an input, not of what is computed."""
    num_rows = rows.meta["val"].shape[0]
    counts = graph.find_nodes(op="call_function", target=aten.sym_size.int)
    with graph.inserting_after([n for n in graph.nodes if n.op == "placeholder"][-1]):
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
        if node in reading.steps or (depends and node in reading.sources):
            nodes.append(node)
            inside.add(node)
        elif depends or node.is_impure():
            yield nodes
            nodes, inside = [], set()
    yield nodes


class _Reading:
    """What the nodes of a graph are to a program."""

    def __init__(self, module: fx.GraphModule, rows: fx.Node) -> None:
        self._module, self._num_rows = module, rows.meta["val"].shape[0]
        self.steps: dict[fx.Node, _Step] = {}
        """Operators that a program has."""
        self.sources: dict[fx.Node, fx.Node] = {}
        """Nodes whose numbers are those of another, in the same order."""
        dtype = None
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target in _SHAPINGS and self.is_in_order(node, node.args[0]):
                self.sources[node] = node.args[0]
                continue
            step = _STEPS[node.target](node, self) if node.target in _STEPS else None
            if step is None:
                continue
            dtypes = {self.example(n).dtype for n in (node, *step.given) if n is not None}
            dtype = dtype or dtypes
            if dtypes == dtype and dtypes <= set(CPU_DTYPES):
                self.steps[node] = step

    def example(self, node: fx.Node) -> torch.Tensor:
        """A tensor without contents, of a node's form."""
        return _compat_tracing.example(self._module, node)

    def sizes(self, node: Any) -> tuple[int, ...] | None:
        """Of a node's tensor without its rows; None: it has none, or other sizes that vary."""
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or not value.dim():
            return None
        first, *others = value.shape
        is_row = _is_symbol(first, self._num_rows) and all(type(n) is int for n in others)
        return tuple(others) if is_row else None

    def is_in_order(self, node: fx.Node, source: Any) -> bool:
        """Whether both have the same numbers in the same order."""
        after, before = self.sizes(node), self.sizes(source)
        if after is None or before is None or math.prod(after) != math.prod(before):
            return False
        if node.target is aten.transpose.int:
            first, second = sorted(int(dim) % (len(before) + 1) for dim in node.args[1:])
            moved = [n for n in before[max(first - 1, 0) : second] if n != 1]
            return first > 0 and len(moved) <= 1
        return True

    def root(self, node: fx.Node) -> fx.Node:
        """Whose numbers a node's are."""
        while node in self.sources:
            node = self.sources[node]
        return node


def _product(node: fx.Node, reading: _Reading) -> _Step | None:
    rows, weight, *bias = node.args
    assert isinstance(rows, fx.Node) and isinstance(weight, fx.Node)
    sizes, matrix = reading.sizes(rows), reading.example(weight)
    if sizes is None or len(sizes) != 1 or not matrix.is_contiguous():
        return None
    return _Step(Kind.PRODUCT, (rows, weight, *bias), (sizes[0], matrix.shape[0]))


def _norm(node: fx.Node, reading: _Reading) -> _Step | None:
    rows, weight, epsilon = node.args
    sizes = reading.sizes(rows)
    if sizes is None or not sizes:
        return None
    return _Step(Kind.NORM, (rows, weight), (math.prod(sizes[:-1]), sizes[-1]), epsilon)


def _rotation(node: fx.Node, reading: _Reading) -> _Step | None:
    sizes = [reading.sizes(given) for given in node.args]
    if sizes[0] is None or None in sizes:
        return None
    return _Step(Kind.ROTATION, node.args, (sizes[0][0], sizes[0][-1]))


def _gate(node: fx.Node, reading: _Reading) -> _Step | None:
    sizes = [reading.sizes(given) for given in node.args]
    if sizes[0] is None or sizes[0] != sizes[1]:
        return None
    return _Step(Kind.GATE, node.args, (math.prod(sizes[0]),))


def _sum(node: fx.Node, reading: _Reading) -> _Step | None:
    sizes = [reading.sizes(given) for given in node.args]
    if node.kwargs or sizes[0] is None or sizes[0] != sizes[1]:
        return None
    return _Step(Kind.SUM, node.args, (math.prod(sizes[0]),))


def _proportion(node: fx.Node, reading: _Reading) -> _Step | None:
    source, factor = node.args
    sizes = reading.sizes(source)
    if sizes is None or type(factor) not in (int, float):
        return None
    return _Step(Kind.PROPORTION, (source,), (math.prod(sizes),), factor)


def _slice(node: fx.Node, reading: _Reading) -> _Step | None:
    source, dim, start, end, *step = node.args
    sizes = reading.sizes(source)
    if step or sizes is None or not all(type(n) is int for n in (dim, start, end)):
        return None
    first, last, _ = slice(start, end).indices(((None,) + sizes)[dim] or 0)
    return _narrowing(source, sizes, dim, first, last - first)


def _part(node: fx.Node, reading: _Reading) -> _Step | None:
    """Of what was split."""
    split, index = node.args
    if not isinstance(split, fx.Node) or split.target not in _SPLITS:
        return None
    source, lengths, *dim = split.args
    sizes = reading.sizes(source)
    if sizes is None or type(index) is not int:
        return None
    axis = int(dim[0]) % (len(sizes) + 1) if dim else 0
    if not axis:
        return None
    total = sizes[axis - 1]
    if type(lengths) is int:
        starts = range(0, total, lengths)
        lengths = [min(lengths, total - start) for start in starts]
    start = sum(lengths[:index])
    return _narrowing(source, sizes, axis, start, lengths[index])


def _narrowing(
    source: fx.Node, sizes: tuple[int, ...], dim: int, start: int, length: int
) -> _Step | None:
    if dim <= 0 or length <= 0:
        return None
    inner = math.prod(sizes[dim:])
    counts = math.prod(sizes[: dim - 1]), sizes[dim - 1] * inner, start * inner, length * inner
    return _Step(Kind.NARROWING, (source,), counts)


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

_STEPS: dict[Any, Callable[[fx.Node, _Reading], _Step | None]] = {
    aten.add.Tensor: _sum,
    aten.mul.Tensor: _proportion,
    aten.slice.Tensor: _slice,
    gate: _gate,
    norm: _norm,
    operator.getitem: _part,
    rotate: _rotation,
    torch.ops.cb_rollout.product.default: _product,
}


class Program:
    """Runs a list of operators on few rows."""

    def __init__(self, nodes: Sequence[fx.Node], reading: _Reading) -> None:
        """Lay out its numbers.

        Args:
            nodes: operators that `reading` knows, in order, and such as reshape what they give.
            reading: of their graph.
        """
        steps = [(node, reading.steps[node]) for node in nodes if node in reading.steps]
        given = [reading.root(n) for _, step in steps for n in step.given if n is not None]
        computed = [node for node, _ in steps]
        self.inputs = [node for node in dict.fromkeys(given) if node not in set(computed)]
        """Nodes whose tensors a call takes, in order."""
        self.outputs = outputs_of(nodes)
        """Nodes whose tensors it returns."""
        self._row_input = next(i for i, n in enumerate(self.inputs) if reading.sizes(n) is not None)
        returned = list(dict.fromkeys(reading.root(node) for node in self.outputs))
        self._sizes = [reading.sizes(node) or () for node in returned]
        self._views = [
            (returned.index(reading.root(node)), reading.sizes(node) or ()) for node in self.outputs
        ]
        places: dict[fx.Node | None, int] = {None: NOWHERE}
        places |= {node: place for place, node in enumerate((*self.inputs, *returned))}
        workspace = _Workspace()
        uses = [[reading.root(n) for n in step.given if n is not None] for _, step in steps]
        last_use = {node: index for index, used in enumerate(uses) for node in used}
        listed: list[_Operator] = []
        for index, (node, step) in enumerate(steps):
            if node not in places:
                places[node] = workspace.take(math.prod(reading.sizes(node) or ()))
            given_places = [places[n and reading.root(n)] for n in step.given]
            given_places += [NOWHERE] * (3 - len(given_places))
            listed.append(
                _Operator(
                    step.kind,
                    (ctypes.c_int64 * 3)(*given_places),
                    places[node],
                    (ctypes.c_int64 * 4)(*step.sizes),
                    step.number,
                )
            )
            for done in {n for n in uses[index] if last_use[n] == index}:
                workspace.give_back(places[done])
        self._operators = (_Operator * len(listed))(*listed)
        self._workspace_size = workspace.size
        self._run = _kernel(reading.example(computed[0]).dtype)
        self.__name__ = "program"

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the nodes compute.

        Args:
            inputs: as `inputs` says.

        Returns:
            A tensor for each of `outputs`, in order.
        """
        rows = inputs[self._row_input]
        num_rows = rows.shape[0]
        tensors = [tensor.contiguous() for tensor in inputs]
        returned = [rows.new_empty(num_rows, *sizes) for sizes in self._sizes]
        workspace = rows.new_empty(num_rows * self._workspace_size)
        addresses = [tensor.data_ptr() for tensor in (*tensors, *returned)]
        self._run(
            self._operators,
            len(self._operators),
            (TENSOR * len(addresses))(*addresses),
            workspace.data_ptr(),
            num_rows,
        )
        return tuple(returned[index].view(num_rows, *sizes) for index, sizes in self._views)


class _Workspace:
    """Where a program's numbers lie that nobody else needs, each for as long as it is needed."""

    def __init__(self) -> None:
        self.size = 0
        """Numbers of a row."""
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._sizes: dict[int, int] = {}

    def take(self, size: int) -> int:
        """A place for so many numbers of each row."""
        if self._free[size]:
            return self._free[size].pop()
        place = -1 - self.size
        self.size += size
        self._sizes[place] = size
        return place

    def give_back(self, place: int) -> None:
        """Have it used again; other places are nobody's to give back."""
        if place in self._sizes:
            self._free[self._sizes[place]].append(place)


@cache
def _kernel(dtype: torch.dtype) -> Callable[..., Any]:
    kernel = layers_library(dtype).run
    kernel.argtypes = (ctypes.POINTER(_Operator), COUNT, ctypes.POINTER(TENSOR), TENSOR, COUNT)
    kernel.restype = None
    return kernel
