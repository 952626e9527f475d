"""Run a model's decode forward by the model at first, and by a trace of it once that pays.

Most of a small decode step on a CPU is not arithmetic but Python: modules, decorators, arguments
passed on. A trace runs the same operators on the same weights and leaves the rest out. It is made
from one forward of tensors without contents, so it cannot depend on the tokens. Attention stays a
call to the step's `PagedAttention`, so a trace fits every length. On a GPU only a compiled trace
is run: inductor fuses what lies between two matrix products into one kernel.

Refuses to trace a forward that reads a number from a tensor, or that depends on the number of rows.
Called by the thread that runs a decode step, and by captures of CUDA graphs.

B: rows, V: vocabulary, H: query heads, D: size of a key, E: size of a value.
"""

import logging
import math
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import fx

from cb_rollout.compat import inductor
from cb_rollout.compat.module_state import captured_weights
from cb_rollout.compat.torch import has_hooks
from cb_rollout.engine.attention.decode_cache import (
    AttentionSpec,
    DecodeCache,
    DecodeInputs,
    DecodeLayer,
    PagedAttention,
)
from cb_rollout.engine.memory.device import is_out_of_memory
from cb_rollout.engine.numerics import operators
from cb_rollout.engine.numerics.agreement import Precisely, agrees, computed_in, rounding_noise
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.errors import error_text

# With the same weights, tracing pays off after 64 steps, and on a CPU compiling parts of a trace,
# which takes seconds, after 2,000.
STEPS_BEFORE_TRACE = 64
STEPS_BEFORE_COMPILING = 2_000

# Tracing never pays off for a model whose weights move at every sync.
MOST_TRACES = 3

# A trace is tried at these positions, which every model that passed its check has.
TRIED_POSITIONS = 8

_LOGGER = logging.getLogger(__name__)
_ATTENTION = threading.local()


@dataclass(frozen=True, slots=True)
class Tracing:
    """Settings of the traced forwards of one kind of device."""

    num_rows: int
    """Rows of the traced forward, equal to no other size of a model, so that a dimension of this
    size is the rows. Inductor chooses its tiles for so many."""
    tried_rows: Sequence[int]
    """A trace is compared with the model's own forward for these numbers of rows."""
    rewrite: Callable[[fx.Graph, list[torch.Tensor]], list[torch.Tensor]]
    """Changes a graph in place, whose last inputs are these weights; returns its new weights."""
    simplify: Callable[[fx.Graph, bool], None] | None
    """Prepares a graph to run in Python, in place; if told so, inductor compiles parts of it. None:
    inductor compiles the whole graph, or it is not run."""


@dataclass(frozen=True, slots=True)
class Traceable:
    """A model's decode forward, to be traced."""

    decode: Callable[[DecodeInputs], torch.Tensor]
    """Runs the model, held in evaluation mode; returns logits in the model's dtype."""
    cache: DecodeCache
    """Passed to the model as its cache; without recurrent layers."""
    token_ids: Sequence[int]
    """Ids of the model's vocabulary to try the trace with; at least one."""
    dtype: torch.dtype = torch.float32
    """The dtype that `decode` computes in."""
    precisely: Precisely = higher_precision
    """Returns a context in which `decode` computes in another dtype."""

    def run(
        self, attend: PagedAttention, tokens_B1: torch.Tensor, positions_B1: torch.Tensor
    ) -> torch.Tensor:
        """Run the model with this attention; return logits in its dtype."""
        # Where torch's product of experts would wait for the device.
        product, rows_B = torch.ops.cb_rollout.grouped_product, tokens_B1[:, 0]
        inputs = DecodeInputs(
            self.cache, attend, tokens_B1, positions_B1, rows_B, grouped_product=product
        )
        return self.decode(inputs)


class TracedForward:
    """Decide when to trace a model's decode forward, and run the trace.

    `tracing`: None where the forward cannot be traced, for example because it moves recurrent
    states.
    """

    def __init__(self, tracing: Tracing | None) -> None:
        self.trace: Trace | None = None
        """Runs the forward; None: the model itself runs."""
        self._tracing = tracing
        self._num_traces = 0
        self._num_steps = 0
        self._steps_before_trace = STEPS_BEFORE_TRACE
        self._steps_before_compiling = math.inf
        self.obstacle = ""
        """The reason why the forward is not compiled; "": it is, or was not to be."""
        self._weights: list[object] = []
        self._has_hooks = False

    def __str__(self) -> str:
        """Return a phrase for the log."""
        if self.trace is not None:
            return "compiled" if self.trace.is_compiled else "from a trace"
        if self.obstacle:
            return "by the model, not compiled"
        if not self.can_trace:
            return "by the model"
        if self._compiles_at_once:
            return "by the model, until compiled"
        return "by the model, until a trace pays off"

    @property
    def can_be_traced(self) -> bool:
        """Return whether the forward is only operators on its inputs."""
        return self._tracing is not None

    @property
    def can_trace(self) -> bool:
        """Return whether the forward has a trace, or may still get one."""
        if self._tracing is None:
            return False
        may_run = self._compiles_at_once or self._tracing.simplify is not None
        return self.trace is not None or (may_run and self._num_traces < MOST_TRACES)

    @property
    def _compiles_at_once(self) -> bool:
        return self._steps_before_compiling < 0

    def compile(self) -> None:
        """Make a trace in the first step, and compile it."""
        self._steps_before_compiling, self._steps_before_trace = -1, 0

    def compile_later(self) -> None:
        """Make another trace once compiling it pays off, and compile that."""
        self._steps_before_compiling = STEPS_BEFORE_COMPILING

    def check_weights(self, model: torch.nn.Module) -> None:
        """Drop the trace if a weight was replaced, an adapter switched, or a module has a hook.

        A trace would not call a forward hook. It holds tensors, whose storages may be allocated
        elsewhere.
        """
        if not self.can_trace:
            return
        weights = captured_weights(model, by_address=False)
        self._has_hooks = has_hooks(model)
        if self._has_hooks or weights != self._weights:
            self._weights, self.trace, self._num_steps = weights, None, 0

    def stay_untraced(self, obstacle: str = "") -> None:
        """Run the model itself from now on; `obstacle`: the reason why it is not compiled."""
        self._num_traces, self.trace, self.obstacle = MOST_TRACES, None, obstacle

    def count_step(self) -> bool:
        """Count a step on these weights; return whether to make a trace before it."""
        self._num_steps += 1
        self._drop_uncompiled(self._num_steps)
        return self._num_steps > self._steps_before_trace and self._may_make_trace

    def _drop_uncompiled(self, num_steps: float) -> None:
        """Drop a trace that is worth compiling for so many steps; it is not counted."""
        is_worthwhile = num_steps > self._steps_before_compiling
        if is_worthwhile and self.trace is not None and not self.trace.is_compiled:
            self._num_traces, self.trace = self._num_traces - 1, None

    def _stay_uncompiled(self, obstacle: str) -> None:
        """Give up a compiled trace, which is not counted; the next one is not compiled."""
        self._steps_before_compiling, self.obstacle = math.inf, obstacle
        self._num_traces, self.trace = self._num_traces - 1, None

    @property
    def _may_make_trace(self) -> bool:
        return self.trace is None and self.can_trace and not self._has_hooks

    def run(self, inputs: DecodeInputs) -> torch.Tensor | None:
        """Return float32 logits, `[B, V]`, from the trace; None: there is none, or it failed."""
        if self.trace is None:
            return None
        try:
            return self.trace(inputs.tokens_B1, inputs.positions_B1, inputs.attend)
        except Exception as error:
            # The model itself may succeed, but not where memory ran out.
            if is_out_of_memory(error):
                raise
            _LOGGER.warning("a trace is given up after it failed: %s", error_text(error))
            assert self._tracing is not None
            if self.trace.is_compiled and self._tracing.simplify is not None:
                self._stay_uncompiled(error_text(error))
            else:
                self.stay_untraced()
            return None

    def warm_up(self, traceable: Traceable, num_steps: float = 0) -> None:
        """Trace a forward if it may have a trace and has none, or go on without a trace.

        `num_steps`: to come; the trace is compiled where that pays off.
        """
        num_steps = max(num_steps, self._num_steps)
        self._drop_uncompiled(num_steps)
        if not self._may_make_trace:
            return
        assert self._tracing is not None
        self._num_traces += 1
        is_compiled = num_steps > self._steps_before_compiling
        if is_compiled:
            _LOGGER.info("decode forwards are compiled, which takes seconds")
        try:
            self.trace = Trace(traceable, self._tracing, is_compiled=is_compiled)
            _LOGGER.info("decode forwards run %s", self)
        except Exception as error:  # noqa: BLE001  a trace fails no request, whatever is wrong
            # Where memory ran out, the model's own forward says so itself.
            is_answer = isinstance(error, UntraceableError)
            reason = str(error) if is_answer else error_text(error)
            if is_compiled:
                # Where nothing else than a compiled trace runs, the engine warns of all its paths.
                is_asked = self._compiles_at_once and self._tracing.simplify is not None
                level = logging.WARNING if is_asked else logging.INFO
                _LOGGER.log(level, "decode forwards are not compiled: %s", reason)
                self._stay_uncompiled(reason)
                return
            self.stay_untraced()
            level = logging.INFO if is_answer else logging.WARNING
            _LOGGER.log(level, "decode forwards run by the model, not from a trace: %s", reason)


class UntraceableError(Exception):
    """A model's forward cannot be traced."""


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """The operators of one decode forward."""

    graph: fx.Graph
    """Takes token ids and positions, `[B, 1]`, and the weights; returns logits in their dtype."""
    weights: list[torch.Tensor]
    calls: list[tuple[DecodeLayer, AttentionSpec]]
    """The layer and the attention of each `cb_rollout::attend`."""


def trace(traceable: Traceable, tokens_B1: torch.Tensor, positions_B1: torch.Tensor) -> TracedGraph:
    """Trace a decode forward of any number of rows, on tensors without contents.

    Raises:
        UntraceableError: the forward reads contents, or depends on the number of rows.
    """
    calls: list[tuple[DecodeLayer, AttentionSpec]] = []

    def record(
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        calls.append((layer, spec))
        # As the pages keep it; what is attended has their dtype.
        value = value.to(layer.value_dtype)
        return torch.ops.cb_rollout.attend(query, key, value, len(calls) - 1)

    def run(tokens_B1: torch.Tensor, positions_B1: torch.Tensor) -> torch.Tensor:
        return traceable.run(record, tokens_B1, positions_B1)

    try:
        module, has_guards = inductor.trace_graph(run, tokens_B1, positions_B1)
    except Exception as error:
        raise UntraceableError(error_text(error)) from error
    if has_guards:
        raise UntraceableError("its forward depends on the number of rows")
    return TracedGraph(module.graph, _lift_weights(module), calls)


class Trace:
    """Run decode forwards of one model from a traced graph."""

    def __init__(
        self,
        traceable: Traceable,
        tracing: Tracing,
        *,
        is_compiled: bool = False,
    ) -> None:
        """Trace a forward.

        Args:
            traceable: the forward.
            tracing: of the cache's device.
            is_compiled: whether inductor compiles the graph.

        Raises:
            UntraceableError: the forward reads contents, depends on the number of rows or does not
                compile, or the trace computes something else.
        """
        token_ids, device = traceable.token_ids, traceable.cache.device
        traced = trace(traceable, *example(tracing.num_rows, token_ids, device))
        self.graph, self._calls = traced.graph, traced.calls
        self._weights = tracing.rewrite(self.graph, traced.weights)
        self.is_compiled = is_compiled
        try:
            if tracing.simplify is None:
                assert is_compiled
                self._compute = inductor.compile_graph(self.graph)
            else:
                tracing.simplify(self.graph, is_compiled)
                self._compute = fx.GraphModule(torch.nn.Module(), self.graph).forward
        except Exception as error:
            if not is_compiled:
                raise
            raise UntraceableError(f"it does not compile: {error_text(error)}") from error
        self._try(traceable, tracing.tried_rows)

    def __call__(
        self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, attend: PagedAttention
    ) -> torch.Tensor:
        """Return float32 logits, `[B, V]`."""
        _ATTENTION.attend, _ATTENTION.calls = attend, self._calls
        try:
            # Only operators run here, so no inference tensor outlives the call.
            with torch.inference_mode():
                return self._compute(tokens_B1, positions_B1, *self._weights)
        finally:
            _ATTENTION.attend = _ATTENTION.calls = None

    def _try(self, traceable: Traceable, tried_rows: Sequence[int]) -> None:
        """Raise `UntraceableError` if the trace and the model differ by more than rounding.

        Rounding is measured with most rows, which begin with the rows of each smaller batch.
        """
        token_ids, device = traceable.token_ids, traceable.cache.device

        def run(num_rows: int) -> torch.Tensor:
            with torch.no_grad():
                inputs = example(num_rows, token_ids, device)
                return traceable.run(attend_to_new_token, *inputs)

        most, dtype, noise_B = max(tried_rows), traceable.dtype, None
        if not operators.are_installed():
            other = torch.float32 if dtype.itemsize < torch.float32.itemsize else torch.float64
            higher_BV = computed_in(other, lambda: run(most), traceable.precisely)
            noise_B = rounding_noise(run(most), higher_BV, dtype)
        for num_rows in tried_rows:
            try:
                found_BV = self(*example(num_rows, token_ids, device), attend_to_new_token)
            except Exception as error:
                raise UntraceableError(f"with {num_rows} rows: {error_text(error)}") from error
            if reason := _difference(found_BV, run(num_rows), noise_B):
                computed = f"with {num_rows} rows it computes something else"
                raise UntraceableError(f"{computed}: {reason}")


def _difference(
    found_BV: torch.Tensor, expected_BV: torch.Tensor, noise_B: torch.Tensor | None
) -> str:
    """Return how logits differ by more than a noise, or by any bit if it is None; "": not."""
    if found_BV.shape != expected_BV.shape:
        return f"logits of shape {tuple(found_BV.shape)}, not {tuple(expected_BV.shape)}"
    if noise_B is None:
        return "" if torch.equal(found_BV, expected_BV) else "other bits"
    agreement = agrees(found_BV, expected_BV, noise_B[: len(found_BV)])
    return "" if agreement else str(agreement)


def example(
    num_rows: int, token_ids: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token and a position of each row, as different as the model allows."""
    tokens = list(islice(cycle(token_ids), num_rows))
    tokens_B1 = torch.tensor(tokens, device=device)[:, None]
    return tokens_B1, torch.arange(num_rows, device=device)[:, None] % TRIED_POSITIONS + 1


def attend_to_new_token(
    layer: DecodeLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Attend to the new token alone, so that the output depends on every input."""
    times = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(times, 1) for states in (key, value))
    scores = (query * keys).sum(-1, keepdim=True) * spec.scale
    outputs = (values * scores.sigmoid()).to(layer.value_dtype)
    return outputs.transpose(1, 2).contiguous()


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


def call_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int
) -> torch.Tensor:
    """Compute the `call`-th attention of the trace that this thread runs."""
    layer, spec = _ATTENTION.calls[call]
    return _ATTENTION.attend(layer, query, key, value, spec)


torch.library.define(
    "cb_rollout::attend", "(Tensor query, Tensor key, Tensor value, int call) -> Tensor"
)
for _key in ("CPU", "CUDA"):
    torch.library.impl("cb_rollout::attend", _key, call_attention)


@torch.library.register_fake("cb_rollout::attend")
def _output_of_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int
) -> torch.Tensor:
    return value.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])
