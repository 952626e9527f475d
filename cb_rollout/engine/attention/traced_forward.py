"""Run a model's decode forward through the model at first, and from a trace once that pays off.

On a CPU, a small decode step spends most of its time in Python: modules, decorators, argument
passing. A trace runs the same operators on the same weights without this overhead. It is recorded
from one forward on tensors without data, so it cannot depend on the tokens. Attention remains a
call to the step's `PagedAttention`, so a trace works for every length. On a GPU, only compiled
traces run: inductor fuses the operators between two matrix products into one kernel.

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
from torch.nn import functional

from cb_rollout.compat import dynamo, inductor
from cb_rollout.compat.module_state import captured_weights
from cb_rollout.compat.torch import has_hooks
from cb_rollout.config.compilation import CompileSettings
from cb_rollout.engine.attention.compiled_graph import CompilationFailedError, CompiledGraph
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
from cb_rollout.engine.numerics.redrawn_rounding import redrawn_rounding
from cb_rollout.errors import error_text

# With the same weights, tracing pays off after about 256 steps: SmolLM2's took 18 s on two cores,
# and saved 60 ms of each step of 16 rows. On a CPU, compiling parts of a trace takes seconds, and
# pays off after 2,000.
STEPS_BEFORE_TRACE = 256
STEPS_BEFORE_COMPILING = 2_000

# Tracing never pays off for a model whose weights move at every sync.
MOST_TRACES = 3

# A trace is tried at these positions, which every model that passed its check has.
TRIED_POSITIONS = 8

# Further forwards, whose rounding errors also measure the noise of a trial. For SmolLM2-135M in
# float32, the errors of one forward are up to 11 times smaller than a trace's, and the errors of
# all these forwards together up to 4 times.
NUM_REDRAWN = 4

_LOGGER = logging.getLogger(__name__)
_ATTENTION = threading.local()


@dataclass(frozen=True, slots=True)
class Tracing:
    """Settings of the traced forwards of one kind of device."""

    num_rows: int
    """Number of rows of the traced forward. No other size of a model equals it, so every dimension
    of this size is the rows. Inductor chooses its tiles for this number."""
    tried_rows: Sequence[int]
    """A trace is compared with the model's own forward for these numbers of rows."""
    rewrite: Callable[[fx.Graph, list[torch.Tensor]], list[torch.Tensor]]
    """Rewrites a graph, whose last inputs are these weights, in place; returns its new weights."""
    simplify: Callable[[fx.Graph, bool], None] | None
    """Prepares a graph to run in Python, in place; if told so, inductor compiles parts of it. None:
    inductor compiles the whole graph, or it is not run."""


@dataclass(frozen=True, slots=True)
class Traceable:
    """A model's decode forward, to be traced."""

    decode: Callable[[DecodeInputs], torch.Tensor]
    """Runs the model, held in evaluation mode; returns logits in the model's dtype."""
    cache: DecodeCache
    """The cache to pass to the model; without recurrent layers."""
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
        inputs = DecodeInputs(
            cache=self.cache,
            attend=attend,
            tokens_B1=tokens_B1,
            positions_B1=positions_B1,
            # There are no recurrent states, so any numbers will do.
            table_rows_B=tokens_B1[:, 0],
            # Used where torch's product of experts would wait for the device.
            grouped_product=torch.ops.cb_rollout.grouped_product,
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
        self.settings: CompileSettings | None = None
        """Arguments of `torch.compile` for the trace; None: the engine compiles it by inductor."""
        self._row_interval = 0
        self._max_graphs = 0
        self.obstacle = ""
        """The reason why the forward is not compiled; "": it is, or was not meant to be."""
        self._weights: list[object] = []
        self._has_hooks = False
        self._is_comparison_due = False

    def __str__(self) -> str:
        """Return a phrase for the log."""
        if self.trace is not None and self.trace.is_compiled:
            return "compiled"
        if self.trace is not None:
            return "from a trace"
        if self.obstacle:
            return "by the model, not compiled"
        if not self.can_trace:
            return "by the model"
        if self._compiles_at_once:
            return "by the model, until compiled"
        return "by the model, until a trace pays off"

    @property
    def can_be_traced(self) -> bool:
        """Return whether the forward consists only of operators on its inputs."""
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
        self._steps_before_compiling = -1
        self._steps_before_trace = 0

    def compile_by(
        self, settings: CompileSettings, *, row_interval: int = 0, max_graphs: int = 0
    ) -> None:
        """Make a trace in the first step, and compile it by `torch.compile` with these settings.

        `row_interval` and `max_graphs` as `CompiledGraph` takes them.
        """
        self.settings = settings
        self._row_interval = row_interval
        self._max_graphs = max_graphs
        self.compile()

    def compile_later(self) -> None:
        """Make and compile another trace once compiling pays off."""
        self._steps_before_compiling = STEPS_BEFORE_COMPILING

    def check_weights(self, model: torch.nn.Module) -> None:
        """Drop the trace if a weight was replaced, an adapter switched, or a module has a hook.

        A trace does not call forward hooks, and it refers to tensors that may be reallocated.
        """
        if not self.can_trace:
            return
        weights = captured_weights(model, by_address=False)
        self._has_hooks = has_hooks(model)
        if self._has_hooks or weights != self._weights:
            self._weights = weights
            self.trace = None
            self._num_steps = 0
            if self.settings is not None and not self.can_trace:
                self.obstacle = f"the weights moved {MOST_TRACES} times"
                _LOGGER.warning("decode forwards are no longer compiled: %s", self.obstacle)

    def compare_before_next_step(self) -> None:
        """Compare the trace with the model again: a sync may have changed what the model computes.

        A trace keeps every Python value that the forward read, and `check_weights` sees only plain
        attributes.
        """
        self._is_comparison_due = self.trace is not None

    def stay_untraced(self, obstacle: str = "") -> None:
        """Run the model itself from now on; `obstacle`: the reason why it is not compiled."""
        self._num_traces = MOST_TRACES
        self.trace = None
        self.obstacle = obstacle

    def count_step(self) -> bool:
        """Count a step on these weights; return whether to call `warm_up` before it."""
        self._num_steps += 1
        self._drop_uncompiled(self._num_steps)
        if self._is_comparison_due and self.trace is not None:
            return True
        return self._num_steps > self._steps_before_trace and self._may_make_trace

    def _drop_uncompiled(self, num_steps: float) -> None:
        """Drop a trace if compiling it pays off for this many steps; the drop is not counted."""
        is_worthwhile = num_steps > self._steps_before_compiling
        if is_worthwhile and self.trace is not None and not self.trace.is_compiled:
            self._num_traces -= 1
            self.trace = None

    def _stay_uncompiled(self, obstacle: str) -> None:
        """Drop a compiled trace without counting it; the next trace is not compiled."""
        self._steps_before_compiling = math.inf
        self.obstacle = obstacle
        self._num_traces -= 1
        self.trace = None

    @property
    def _may_make_trace(self) -> bool:
        return self.trace is None and self.can_trace and not self._has_hooks

    def run(self, inputs: DecodeInputs, *, raises: bool = False) -> torch.Tensor | None:
        """Return float32 logits, `[B, V]`, from the trace; None: there is none, or it failed.

        With `raises`, an exception is passed on, and the trace is kept.
        """
        if self.trace is None:
            return None
        try:
            return self.trace(inputs.tokens_B1, inputs.positions_B1, inputs.attend)
        except Exception as error:
            # The model itself may succeed, but not where memory ran out.
            if raises or is_out_of_memory(error):
                raise
            reason = error_text(dynamo.cause_of(error))
            self._require_no_failure(reason, error)
            _LOGGER.warning(
                "a trace of the decode forward failed and is no longer used: %s", reason
            )
            assert self._tracing is not None
            if self.trace.is_compiled and self._tracing.simplify is not None:
                self._stay_uncompiled(reason)
            else:
                self.stay_untraced()
            return None

    def warm_up(self, traceable: Traceable, num_steps: float = 0) -> None:
        """Compare the trace if that is due; trace the forward if it has no trace and can have one.

        `num_steps`: number of coming steps; the trace is compiled if that pays off.
        """
        num_steps = max(num_steps, self._num_steps)
        self._drop_uncompiled(num_steps)
        self._drop_outdated(traceable)
        if not self._may_make_trace:
            return
        assert self._tracing is not None
        self._num_traces += 1
        is_compiled = num_steps > self._steps_before_compiling
        if is_compiled:
            self._announce_compilation()
        try:
            self.trace = Trace(
                traceable,
                self._tracing,
                is_compiled=is_compiled,
                settings=self.settings if is_compiled else None,
                row_interval=self._row_interval,
                max_graphs=self._max_graphs,
            )
            _LOGGER.info("decode forwards run %s", self)
        except Exception as error:  # noqa: BLE001  a trace fails no request, whatever is wrong
            # Where memory ran out, the model's own forward says so itself.
            if is_compiled:
                self._go_on_uncompiled(error)
            else:
                self._go_on_untraced(error)

    def _drop_outdated(self, traceable: Traceable) -> None:
        """Drop the trace if a comparison is due, and the model computes something else now."""
        is_due = self._is_comparison_due
        self._is_comparison_due = False
        if not is_due or self.trace is None:
            return
        reason = self.trace.difference_from(traceable)
        if reason:
            _LOGGER.info("the model's forward has changed; its trace is dropped: %s", reason)
            self.trace = None

    def _go_on_uncompiled(self, error: Exception) -> None:
        """Stop compiling after a compiled trace failed; raise if the settings require one."""
        assert self._tracing is not None
        reason = _reason_of(error)
        self._require_no_failure(reason, error)
        # If only a compiled trace can run, the engine warns of all its paths.
        runs_otherwise = self._tracing.simplify is not None
        is_asked = self.settings is not None or (self._compiles_at_once and runs_otherwise)
        level = logging.WARNING if is_asked else logging.INFO
        _LOGGER.log(level, "decode forwards are not compiled: %s", reason)
        self._stay_uncompiled(reason)

    def _go_on_untraced(self, error: Exception) -> None:
        """Stop tracing after a trace failed."""
        self.stay_untraced()
        is_answer = isinstance(error, UntraceableError)
        level = logging.INFO if is_answer else logging.WARNING
        reason = _reason_of(error)
        _LOGGER.log(level, "decode forwards run by the model, not from a trace: %s", reason)

    def _announce_compilation(self) -> None:
        """Log that a compilation begins; a whole forward may take minutes."""
        assert self._tracing is not None
        if self._tracing.simplify is None:
            _LOGGER.warning(
                "compiling decode forwards now, which takes seconds to minutes; "
                "use_default_compile_configs=False starts sooner but generates more slowly"
            )
        else:
            _LOGGER.info("decode forwards are compiled, which takes seconds")

    def _require_no_failure(self, reason: str, error: Exception) -> None:
        """Raise `ConfigurationError` if the settings do not tolerate a failed compilation."""
        settings = self.settings
        if settings is not None and settings.raises_failure and not is_out_of_memory(error):
            raise CompilationFailedError(
                f"{settings.source}: decode steps cannot be compiled with it ({reason}); leave it "
                "None."
            ) from error


class UntraceableError(Exception):
    """A model's forward cannot be traced."""


def _reason_of(error: Exception) -> str:
    """Return why a forward has no trace."""
    return str(error) if isinstance(error, UntraceableError) else error_text(error)


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """The operators of one decode forward."""

    graph: fx.Graph
    """Takes token ids and positions, `[B, 1]`, and the weights; returns logits in their dtype."""
    weights: list[torch.Tensor]
    calls: list[tuple[DecodeLayer, AttentionSpec]]
    """The layer and the attention spec of each `cb_rollout::attend` call."""


def trace(traceable: Traceable, tokens_B1: torch.Tensor, positions_B1: torch.Tensor) -> TracedGraph:
    """Trace a decode forward for any number of rows, on tensors without data.

    Raises:
        UntraceableError: the forward reads contents, or depends on the number of rows.
    """
    module, calls = trace_module(traceable, tokens_B1, positions_B1)
    weights = _lift_weights(module)
    return TracedGraph(graph=module.graph, weights=weights, calls=calls)


def trace_module(
    traceable: Traceable, tokens_B1: torch.Tensor, positions_B1: torch.Tensor
) -> tuple[fx.GraphModule, list[tuple[DecodeLayer, AttentionSpec]]]:
    """Trace as `trace` does; return a module that holds the weights, and the calls."""
    calls: list[tuple[DecodeLayer, AttentionSpec]] = []

    def record(
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Attend through an operator that records this call; for `Args:` see `PagedAttention`."""
        calls.append((layer, spec))
        # In the pages' dtype, which the output of attention has too.
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
    return module, calls


class Trace:
    """Run decode forwards of one model from a traced graph."""

    def __init__(
        self,
        traceable: Traceable,
        tracing: Tracing,
        *,
        is_compiled: bool = False,
        settings: CompileSettings | None = None,
        row_interval: int = 0,
        max_graphs: int = 0,
    ) -> None:
        """Trace a forward.

        Args:
            traceable: the forward.
            tracing: the settings of the cache's device.
            is_compiled: whether the graph is compiled.
            settings: arguments of `torch.compile`, which compiles the model's operators unchanged;
                None: inductor compiles the graph that `tracing` rewrote.
            row_interval: as `CompiledGraph` takes it.
            max_graphs: as `CompiledGraph` takes it.

        Raises:
            UntraceableError: the forward reads contents, depends on the number of rows or does not
                compile, or the trace computes something else.
        """
        self.is_compiled = is_compiled
        self.compiled: CompiledGraph | None = None
        """The graph for `torch.compile`; None: `settings` is None."""
        self._weights: list[torch.Tensor] = []
        self._noise_B: torch.Tensor | None = None
        """Rounding noise of the rows of the last trial; None: no bit may differ."""
        self._fewest_rows = min(tracing.tried_rows)
        inputs = example(tracing.num_rows, traceable.token_ids, traceable.cache.device)
        if settings is not None:
            module, self._calls = trace_module(traceable, *inputs)
            self.graph = module.graph
            self.compiled = CompiledGraph(
                module, settings, interval=row_interval, max_graphs=max_graphs
            )
            # Each size of a static graph is compiled, which takes seconds.
            tried_rows = [self._fewest_rows] if settings.is_static else tracing.tried_rows
            self._try(traceable, tried_rows)
            return
        traced = trace(traceable, *inputs)
        self.graph, self._calls = traced.graph, traced.calls
        self._weights = tracing.rewrite(self.graph, traced.weights)
        self._compute = self._computation(tracing, is_compiled)
        self._try(traceable, tracing.tried_rows)

    def _computation(self, tracing: Tracing, is_compiled: bool) -> Callable[..., torch.Tensor]:
        """Return the function that runs the rewritten graph."""
        try:
            if tracing.simplify is None:
                assert is_compiled
                return inductor.compile_graph(self.graph)
            tracing.simplify(self.graph, is_compiled)
            return fx.GraphModule(torch.nn.Module(), self.graph).forward
        except Exception as error:
            if not is_compiled:
                raise
            raise UntraceableError(f"it does not compile: {error_text(error)}") from error

    def __call__(
        self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, attend: PagedAttention
    ) -> torch.Tensor:
        """Return float32 logits, `[B, V]`."""
        if self.compiled is not None:
            return self._run_compiled(self.compiled, tokens_B1, positions_B1, attend)
        _ATTENTION.attend = attend
        _ATTENTION.calls = self._calls
        try:
            # Only operators run here, so no inference tensor outlives the call.
            with torch.inference_mode():
                return self._compute(tokens_B1, positions_B1, *self._weights)
        finally:
            _ATTENTION.attend = None
            _ATTENTION.calls = None

    def _run_compiled(
        self,
        compiled: CompiledGraph,
        tokens_B1: torch.Tensor,
        positions_B1: torch.Tensor,
        attend: PagedAttention,
    ) -> torch.Tensor:
        """Return float32 logits, `[B, V]`; rows are padded to a compiled size."""
        num_rows = len(tokens_B1)
        padded = compiled.padded(num_rows)
        if padded > num_rows:
            padding = (0, 0, 0, padded - num_rows)
            tokens_B1 = functional.pad(tokens_B1, padding)
            positions_B1 = functional.pad(positions_B1, padding)
            attend = _without_padding(attend, num_rows)
        _ATTENTION.attend = attend
        _ATTENTION.calls = self._calls
        try:
            return compiled((padded,), tokens_B1, positions_B1)[:num_rows]
        finally:
            _ATTENTION.attend = None
            _ATTENTION.calls = None

    def _try(self, traceable: Traceable, tried_rows: Sequence[int]) -> None:
        """Raise `UntraceableError` if the trace differs from the model by more than rounding.

        Rounding is measured on the largest batch, whose first rows are those of each smaller batch.
        """
        self._measure_noise(traceable, max(tried_rows))
        for num_rows in tried_rows:
            try:
                reason = self._difference(traceable, num_rows)
            except Exception as error:
                reason = error_text(dynamo.cause_of(error))
                raise UntraceableError(f"with {num_rows} rows: {reason}") from error
            if reason:
                computed = f"with {num_rows} rows it computes something else"
                raise UntraceableError(f"{computed}: {reason}")

    def difference_from(self, traceable: Traceable) -> str:
        """Return how the trace differs from the model as it is now; "": by rounding at most."""
        reason = self._difference(traceable, self._fewest_rows)
        if reason and self._noise_B is not None:
            # The present weights may round more than those of the trial.
            self._measure_noise(traceable, self._fewest_rows)
            reason = self._difference(traceable, self._fewest_rows)
        return reason

    def _measure_noise(self, traceable: Traceable, num_rows: int) -> None:
        self._noise_B = trial_noise(
            lambda: _plain_logits(traceable, num_rows), traceable.dtype, traceable.precisely
        )

    def _difference(self, traceable: Traceable, num_rows: int) -> str:
        """Return how logits for this number of rows differ; "": they agree."""
        inputs = example(num_rows, traceable.token_ids, traceable.cache.device)
        found_BV = self(*inputs, attend_to_new_token)
        noise_B = None if self._noise_B is None else self._noise_B[:num_rows]
        return difference(found_BV, _plain_logits(traceable, num_rows), noise_B)


def _plain_logits(traceable: Traceable, num_rows: int) -> torch.Tensor:
    """Return the logits of the model's own forward, `[B, V]`, for as many rows as given."""
    inputs = example(num_rows, traceable.token_ids, traceable.cache.device)
    with torch.no_grad():
        return traceable.run(attend_to_new_token, *inputs)


def _without_padding(attend: PagedAttention, num_rows: int) -> PagedAttention:
    """Return an attention that computes only the first rows; other outputs are 0."""

    def attend_to_first(
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Attend in the first rows; Args: see `PagedAttention`."""
        num_padded = len(query) - num_rows
        outputs = attend(layer, query[:num_rows], key[:num_rows], value[:num_rows], spec)
        return functional.pad(outputs, (0, 0, 0, 0, 0, 0, 0, num_padded))

    return attend_to_first


def trial_noise(
    run: Callable[[], torch.Tensor], dtype: torch.dtype, precisely: Precisely
) -> torch.Tensor | None:
    """Return the rounding noise of each row in `dtype`; None: no bit may differ.

    It is the root-mean-square of several forwards, because a single one can be far too accurate by
    chance.
    """
    if operators.are_installed():
        return None
    other = torch.float32 if dtype.itemsize < torch.float32.itemsize else torch.float64
    higher_BV = computed_in(other, run, precisely)
    noise_B = rounding_noise(run(), higher_BV, dtype)
    if higher_BV is None:
        return noise_B
    squares = [noise_B.square()]
    for seed in range(NUM_REDRAWN):
        with redrawn_rounding(dtype, seed):
            redrawn_BV = run()
        squares.append(rounding_noise(redrawn_BV, higher_BV, dtype).square())
    return torch.stack(squares).mean(0).sqrt()


def difference(
    found_BV: torch.Tensor, expected_BV: torch.Tensor, noise_B: torch.Tensor | None
) -> str:
    """Return how logits differ beyond `noise`, or in any bit if it is None; "": they agree."""
    if found_BV.shape != expected_BV.shape:
        return f"logits of shape {tuple(found_BV.shape)}, not {tuple(expected_BV.shape)}"
    if noise_B is None and torch.equal(found_BV, expected_BV):
        return ""
    if noise_B is None:
        return "other bits"
    agreement = agrees(found_BV, expected_BV, noise_B)
    return "" if agreement else str(agreement)


def example(
    num_rows: int, token_ids: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token and a position for each row, as different as the model allows."""
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
    """Attend only to the new token, such that the output depends on every input.

    Keys are shifted by one channel. Otherwise the output would not depend on the position: RoPE
    rotates a query and a key at the same position by the same angles, which cancel in their
    product.

    Args:
        layer: the layer that attends.
        query: `[B, H, 1, D]`.
        key: `[B, key heads, 1, D]`.
        value: `[B, key heads, 1, E]`.
        spec: the layer's attention; only its scale is used here.

    Returns:
        `[B, 1, H, E]`, in the dtype of the pages of values.
    """
    times = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(times, 1)
    values = value.repeat_interleave(times, 1)
    scores = (query * keys.roll(1, -1)).sum(-1, keepdim=True) * spec.scale
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
                last = graph.placeholder(f"weight_{len(inputs)}")
            inputs[name] = last
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
