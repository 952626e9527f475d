"""A trace of a model's decode forward: its operators, run without the model's Python.

Most of a small decode step on a CPU is not arithmetic but Python: modules, decorators, arguments
handed on. A trace runs the same operators on the same weights and leaves the rest out. The model's
own forward runs once on tensors without contents, so the trace cannot depend on the tokens.
Attention stays a call to the step's attention, so a trace fits every length.

Refuses a forward that asks for a number, or that does another thing for another number of rows.
Called by the thread that runs a decode step.

B: rows, V: vocabulary, H: query heads, D: size of a key, E: size of a value.
"""

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from cb_rollout.compat import inductor
from cb_rollout.engine.attention.backend import CPU_DTYPES, AttentionSpec, Forward
from cb_rollout.engine.attention.cpu.few_row_linear import MAX_ROWS, linear
from cb_rollout.engine.attention.decode_cache import DecodeCache, DecodeLayer, PagedAttention
from cb_rollout.errors import said

aten = torch.ops.aten

# Equal to no other size of a model, so that a dimension of this size is the rows.
TRACED_ROWS = 3
# A trace is compared with the model's own forward for so many rows before it is used.
TRIED_ROWS = (1, 3, 8, MAX_ROWS + 1)
# Relative to the largest logit: a trace may sum in another order, and may differ in nothing else.
LARGEST_DIFFERENCE = 1e-3

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
    torch.ops.cb_rollout.attend.default: inductor.attend,
    torch.ops.cb_rollout.grouped_product.default: inductor.grouped_product,
    torch.ops.cb_rollout.linear.default: linear,
}

METHODS: dict[Any, str] = {
    # A kernel's outputs are contiguous, even where its inputs are not; a view might be refused.
    aten._unsafe_view.default: "reshape",
    aten.expand.default: "expand",
    aten.sym_size.int: "size",
    aten.view.default: "reshape",
}

RESHAPES = (aten.view.default, aten._unsafe_view.default)


class UntraceableError(Exception):
    """A model's forward cannot be traced."""


class Trace:
    """Runs decode forwards of one model from a traced graph."""

    def __init__(
        self,
        forward: Forward,
        cache: DecodeCache,
        inductor_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Trace a forward.

        Args:
            forward: of the model, held in evaluation mode.
            cache: what it is given as its cache; no recurrent layers.
            inductor_options: inductor compiles the graph with these; None: it is not compiled.

        Raises:
            UntraceableError: it asks for contents, or depends on the number of rows, or does not
                compile, or the trace computes something else.
        """
        recorder = _Recorder()

        def traced(tokens_B1: torch.Tensor, positions_B1: torch.Tensor) -> torch.Tensor:
            return _run(forward, cache, recorder, tokens_B1, positions_B1)

        try:
            module, has_guards = inductor.traced(traced, *_example(TRACED_ROWS))
        except Exception as error:
            raise UntraceableError(said(error)) from error
        if has_guards:
            raise UntraceableError("its forward depends on the number of rows")
        self.graph = module.graph
        self._calls = recorder.calls
        self._weights = _take_weights(module)
        _take_linear_layers(self.graph)
        if inductor_options is None:
            _simplify(self.graph)
            self._compute = fx.GraphModule(torch.nn.Module(), self.graph).forward
        else:
            try:
                self._compute = inductor.compiled(self.graph, inductor_options)
            except Exception as error:
                raise UntraceableError(f"it does not compile: {said(error)}") from error
        for num_rows in TRIED_ROWS:
            self._try(forward, cache, num_rows)

    def __call__(
        self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        """Return float32 logits, `[B, V]`, as `Forward` with a cache that `attention` reads."""
        # Only operators run here: nothing can keep a tensor that remembers the mode.
        with torch.inference_mode(), inductor.attending(partial(self._attend, attention)):
            return self._compute(tokens_B1, positions_B1, *self._weights)

    def _attend(
        self,
        attention: PagedAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: int,
    ) -> torch.Tensor:
        layer, spec = self._calls[call]
        return attention.attend(layer, query, key, value, spec)

    def _try(self, forward: Forward, cache: DecodeCache, num_rows: int) -> None:
        inputs = _example(num_rows)
        with torch.no_grad():
            expected_BV = _run(forward, cache, _StandIn(), *inputs)
        try:
            got_BV = self(*inputs, _StandIn())
        except Exception as error:
            raise UntraceableError(f"with {num_rows} rows: {said(error)}") from error
        allowed = LARGEST_DIFFERENCE * expected_BV.abs().max()
        if got_BV.shape != expected_BV.shape or not (got_BV - expected_BV).abs().max() <= allowed:
            raise UntraceableError(f"with {num_rows} rows it computes something else")


def _run(
    forward: Forward,
    cache: DecodeCache,
    attention: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    return cache.run(forward, attention, tokens, positions, tokens[:, 0])


def _example(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows_B1 = torch.arange(num_rows)[:, None]
    return rows_B1, rows_B1 + 1


class _Recorder:
    """Attention that records each attention of a forward, and leaves an operator in its place."""

    def __init__(self) -> None:
        self.calls: list[tuple[DecodeLayer, AttentionSpec]] = []

    def attend(
        self,
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        self.calls.append((layer, spec))
        return torch.ops.cb_rollout.attend(query, key, value, len(self.calls) - 1)


class _StandIn:
    """Attention that attends to the new token alone; its output depends on every input."""

    def attend(
        self,
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        times = query.shape[1] // key.shape[1]
        keys, values = (states.repeat_interleave(times, 1) for states in (key, value))
        scores = (query * keys).sum(-1, keepdim=True) * spec.scale
        return (values * scores.sigmoid()).transpose(1, 2).contiguous()


def _take_weights(module: fx.GraphModule) -> list[torch.Tensor]:
    """Make the weights of a traced graph inputs of it, behind the others, in place.

    Returns:
        The weights, in the order of the new inputs.
    """
    graph = module.graph
    last = graph.find_nodes(op="placeholder")[-1]
    inputs: dict[str, fx.Node] = {}
    weights: list[torch.Tensor] = []
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in inputs:
            weights.append(operator.attrgetter(name)(module))
            with graph.inserting_after(last):
                last = inputs[name] = graph.placeholder(f"weight_{len(inputs)}")
            last.meta["val"] = inductor.without_contents(graph, weights[-1])
        node.replace_all_uses_with(inputs[name])
        graph.erase_node(node)
    return weights


def _take_linear_layers(graph: fx.Graph) -> None:
    """Have linear layers of a traced graph run by `few_row_linear`, in place."""
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *bias, rows, transposed = node.args
            outputs = node.meta["val"]
            is_kind = outputs.dtype in CPU_DTYPES and not node.kwargs
            is_linear = is_kind and transposed.target is aten.t.default
            if is_linear and all(b.meta["val"].shape == outputs.shape[1:] for b in bias):
                node.target = torch.ops.cb_rollout.linear.default
                node.args = (rows, transposed.args[0], *(bias or [None]))


def _simplify(graph: fx.Graph) -> None:
    """Rewrite a traced graph, in place, to call the same operators in the cheapest way."""
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
    """Reshape a tensor of a traced graph once, whatever shapes it goes through, in place."""
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
    """Make a slice of known size a narrowing, which takes a third of the time."""
    source, dim, start, end, *step = node.args
    assert isinstance(source, fx.Node)
    size = source.meta["val"].shape[dim]
    if step or not all(type(number) is int for number in (size, start, end)):
        return
    first, last, _ = slice(start, end).indices(size)
    node.target, node.args = torch.narrow, (source, dim, first, max(0, last - first))
