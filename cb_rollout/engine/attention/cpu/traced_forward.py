"""Run a model's decode forward by the model at first, and by a trace of it once that pays.

Most of a small decode step on a CPU is not arithmetic but Python: modules, decorators, arguments
passed on. A trace runs the same operators on the same weights and leaves the rest out. It is made
from one forward of tensors without contents, so it cannot depend on the tokens. Attention stays a
call to the step's `PagedAttention`, so a trace fits every length.

Refuses to trace a forward that reads a number from a tensor, or that depends on the number of rows.
Called by the thread that runs a decode step.

B: rows, V: vocabulary, H: query heads, D: size of a key, E: size of a value.
"""

import logging
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from cb_rollout.compat import inductor
from cb_rollout.compat.torch import captured_weights, has_hooks
from cb_rollout.engine.attention.backend import AttentionSpec
from cb_rollout.engine.attention.cpu.few_row_linear import MAX_ROWS, linear
from cb_rollout.engine.attention.decode_cache import (
    DecodeCache,
    DecodeInputs,
    DecodeLayer,
    PagedAttention,
)
from cb_rollout.engine.memory.device import is_out_of_memory
from cb_rollout.engine.native.library import TYPES
from cb_rollout.errors import error_text

# With the same weights, tracing pays off after 64 steps.
STEPS_BEFORE_TRACE = 64

# Tracing never pays off for a model whose weights move at every sync.
MOST_TRACES = 3

# Equal to no other size of a model, so that a dimension of this size is the rows.
TRACED_ROWS = 3

# A trace is compared with the model's own forward for these numbers of rows before it is used.
TRIED_ROWS = (1, 3, 8, MAX_ROWS + 1)

# Relative to the largest logit: a trace may sum in another order, and may differ in nothing else.
LARGEST_DIFFERENCE = 1e-3

# A trace is tried at these positions, which every model that passed its check has.
TRIED_POSITIONS = 8

# Runs the model on the inputs of a decode step; returns float32 logits.
Decode = Callable[[DecodeInputs], torch.Tensor]

_LOGGER = logging.getLogger(__name__)
_ATTENTION = threading.local()


class TracedForward:
    """Decide when to trace a model's decode forward, and run the trace.

    `can_be_traced`: whether the forward is only operators on the tensors that it is given; False
    where it moves recurrent states.
    """

    def __init__(self, *, can_be_traced: bool) -> None:
        self.trace: Trace | None = None
        """Runs the forward; None: the model itself runs."""
        self.can_be_traced = can_be_traced
        self._num_traces = 0 if can_be_traced else MOST_TRACES
        self._num_steps = 0
        self._steps_before_trace = STEPS_BEFORE_TRACE
        self._inductor_options: Mapping[str, Any] | None = None
        self._weights: list[object] = []
        self._has_hooks = False

    def __str__(self) -> str:
        """Return a phrase for the log."""
        if self.trace is not None:
            return "from a trace"
        return "by the model, until a trace pays off" if self.can_trace else "by the model"

    @property
    def can_trace(self) -> bool:
        """True: the forward has a trace, or may still get one."""
        return self.trace is not None or self._num_traces < MOST_TRACES

    def compile_with(self, inductor_options: Mapping[str, Any]) -> None:
        """Make a trace in the first step, and compile it."""
        self._inductor_options, self._steps_before_trace = inductor_options, 0

    def check_weights(self, model: torch.nn.Module) -> None:
        """Drop the trace if a weight has moved, an adapter was switched, or a module has a hook.

        A trace would not call a forward hook.
        """
        if not self.can_trace:
            return
        weights, self._has_hooks = captured_weights(model), has_hooks(model)
        if self._has_hooks or weights != self._weights:
            self._weights, self.trace, self._num_steps = weights, None, 0

    def stay_untraced(self) -> None:
        """Run the model itself from now on."""
        self._num_traces, self.trace = MOST_TRACES, None

    def is_due(self) -> bool:
        """Count a step, and decide whether to make a trace before it."""
        self._num_steps += 1
        return self._num_steps > self._steps_before_trace and self._may_make_trace

    @property
    def _may_make_trace(self) -> bool:
        return self.trace is None and self._num_traces < MOST_TRACES and not self._has_hooks

    def warm_up(self, decode: Decode, cache: DecodeCache, token_ids: Sequence[int]) -> None:
        """Make the trace before it is due."""
        if self._may_make_trace:
            self.make_trace(decode, cache, token_ids)

    def run(self, inputs: DecodeInputs) -> torch.Tensor | None:
        """Return float32 logits, `[B, V]`, from the trace; None: there is none, or it failed."""
        if self.trace is None:
            return None
        try:
            return self.trace(inputs.tokens_B1, inputs.positions_B1, inputs.attention)
        except Exception as error:
            # The model itself may succeed, but not where memory ran out.
            if is_out_of_memory(error):
                raise
            _LOGGER.warning("a trace is given up after it failed: %s", error_text(error))
            self.stay_untraced()
            return None

    def make_trace(self, decode: Decode, cache: DecodeCache, token_ids: Sequence[int]) -> None:
        """Trace `decode` with inputs that have this cache, or go on without a trace.

        Args:
            decode: runs the model.
            cache: of the inputs.
            token_ids: ids of the model's vocabulary to try the trace with.
        """
        self._num_traces += 1
        try:
            self.trace = Trace(decode, cache, token_ids, self._inductor_options)
            _LOGGER.info("decode forwards run from a trace")
        except Exception as error:  # noqa: BLE001  a trace fails no request, whatever is wrong
            # Where memory ran out, the model's own forward says so itself.
            is_answer = isinstance(error, UntraceableError)
            reason = str(error) if is_answer else error_text(error)
            if self._inductor_options is not None:
                _LOGGER.warning("decode forwards are not compiled, as was asked: %s", reason)
                self._inductor_options = None
                self._num_traces -= 1
                return
            self.stay_untraced()
            _LOGGER.log(
                logging.INFO if is_answer else logging.WARNING,
                "decode forwards run by the model itself, not from a trace: %s",
                reason,
            )


class UntraceableError(Exception):
    """A model's forward cannot be traced."""


class Trace:
    """Run decode forwards of one model from a traced graph."""

    def __init__(
        self,
        decode: Decode,
        cache: DecodeCache,
        token_ids: Sequence[int],
        inductor_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Trace a forward.

        Args:
            decode: runs the model, held in evaluation mode.
            cache: passed to the model as its cache; without recurrent layers.
            token_ids: ids of the model's vocabulary to try the trace with; at least one.
            inductor_options: inductor compiles the graph with these; None: it is not compiled.

        Raises:
            UntraceableError: the forward reads contents, depends on the number of rows or does not
                compile, or the trace computes something else.
        """
        recorder = _Recorder()

        def run(tokens_B1: torch.Tensor, positions_B1: torch.Tensor) -> torch.Tensor:
            return _run(decode, cache, recorder, tokens_B1, positions_B1)

        try:
            module, has_guards = inductor.trace_graph(run, *_example(TRACED_ROWS, token_ids))
        except Exception as error:
            raise UntraceableError(error_text(error)) from error
        if has_guards:
            raise UntraceableError("its forward depends on the number of rows")
        self.graph = module.graph
        self._calls = recorder.calls
        self._weights = _lift_weights(module)
        _replace_linear_layers(self.graph)
        if inductor_options is None:
            _simplify(self.graph)
            self._compute = fx.GraphModule(torch.nn.Module(), self.graph).forward
        else:
            try:
                self._compute = inductor.compile_graph(self.graph, inductor_options)
            except Exception as error:
                raise UntraceableError(f"it does not compile: {error_text(error)}") from error
        for num_rows in TRIED_ROWS:
            self._try(decode, cache, _example(num_rows, token_ids))

    def __call__(
        self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        """Return float32 logits, `[B, V]`."""
        # Only operators run here, so no inference tensor outlives the call.
        with torch.inference_mode(), _attending(partial(self._attend, attention)):
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

    def _try(
        self, decode: Decode, cache: DecodeCache, inputs: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        num_rows = len(inputs[0])
        with torch.no_grad():
            expected_BV = _run(decode, cache, _NewTokenAttention(), *inputs)
        try:
            got_BV = self(*inputs, _NewTokenAttention())
        except Exception as error:
            raise UntraceableError(f"with {num_rows} rows: {error_text(error)}") from error
        allowed = LARGEST_DIFFERENCE * expected_BV.abs().max()
        if got_BV.shape != expected_BV.shape or not (got_BV - expected_BV).abs().max() <= allowed:
            raise UntraceableError(f"with {num_rows} rows it computes something else")


def _run(
    decode: Decode,
    cache: DecodeCache,
    attention: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    return decode(DecodeInputs(cache, attention, tokens, positions, tokens[:, 0]))


def _example(num_rows: int, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token and a position of each row, as different as the model allows."""
    tokens_B1 = torch.tensor(list(islice(cycle(token_ids), num_rows)))[:, None]
    return tokens_B1, torch.arange(num_rows)[:, None] % TRIED_POSITIONS + 1


class _Recorder:
    """A `PagedAttention` that records each attention of a forward as an operator."""

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


class _NewTokenAttention:
    """A `PagedAttention` over the new token alone; its output depends on every input."""

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


def _lift_weights(module: fx.GraphModule) -> list[torch.Tensor]:
    """Make the weights of a traced graph its last inputs, in place.

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
            last.meta["val"] = inductor.fake_weight(graph, weights[-1])
        node.replace_all_uses_with(inputs[name])
        graph.erase_node(node)
    return weights


def _replace_linear_layers(graph: fx.Graph) -> None:
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


def _simplify(graph: fx.Graph) -> None:
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


@contextmanager
def _attending(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Have `cb_rollout::attend` call a function, in this thread."""
    _ATTENTION.function = function
    try:
        yield
    finally:
        _ATTENTION.function = None


def _call_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int
) -> torch.Tensor:
    """Compute the `call`-th attention of a trace; only inside of `_attending`."""
    return _ATTENTION.function(query, key, value, call)


torch.library.define(
    "cb_rollout::attend", "(Tensor query, Tensor key, Tensor value, int call) -> Tensor"
)
torch.library.impl("cb_rollout::attend", "CPU", _call_attention)


@torch.library.register_fake("cb_rollout::attend")
def _output_of_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int
) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


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
    torch.ops.cb_rollout.attend.default: _call_attention,
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
