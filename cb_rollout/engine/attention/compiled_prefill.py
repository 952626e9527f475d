"""Compile the forward of packed prompts by `torch.compile`, with a user's settings.

The forward is traced on tensors without contents, like that of decode steps. Attention, and the
pages that it writes and reads, stay one call at each layer, so the graph takes prompts and chunks
of any lengths. Called by the thread that runs a prefill.

B: rows, N: new tokens of all rows, V: vocabulary, H: query heads, K: key heads, D: size of a key,
E: size of a value.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from cb_rollout.compat import dynamo, inductor
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.module_state import captured_weights
from cb_rollout.compat.moe import replacing_grouped_product
from cb_rollout.compat.torch import has_hooks
from cb_rollout.config.compilation import CompileSettings
from cb_rollout.engine.attention.compiled_graph import CompilationFailedError, CompiledGraph
from cb_rollout.engine.attention.decode_cache import (
    HARMLESS_ARGUMENTS,
    AttentionSpec,
    DecodeCache,
    DecodeLayer,
    UnsupportedAttentionError,
)
from cb_rollout.engine.attention.packed import PackedAttention
from cb_rollout.engine.attention.traced_forward import (
    TRIED_POSITIONS,
    UntraceableError,
    attend_to_new_token,
    difference,
    trial_noise,
)
from cb_rollout.engine.kv_cache.paged import PagedCache, PagedLayer
from cb_rollout.engine.memory.device import is_out_of_memory
from cb_rollout.engine.numerics.agreement import Precisely
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.errors import error_text

# Tokens and rows of the traced forward: different numbers, so that they stay two sizes.
TRACED_SIZES = (23, 3)

# The graph is compared with the model for these.
TRIED_SIZES = ((23, 3), (6, 2), (40, 5))

# Tracing never pays off for a model whose weights move at every sync.
MOST_TRACES = 3

_LOGGER = logging.getLogger(__name__)
_RUNNING = threading.local()


class AttentionCall(NamedTuple):
    """The attention of one layer of a traced forward."""

    layer: DecodeLayer
    own_attention: Callable[..., Any]
    module: torch.nn.Module
    arguments: dict[str, Any]


Attend = Callable[[AttentionCall, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attends from a query `[1, H, N, D]`, a key `[1, K, N, D]` and a value `[1, K, N, E]` of the new
tokens; returns `[1, N, H, E]`."""


class PrefillCache(DecodeCache):
    """The paged cache, as a model sees it while its prefill is traced or tried."""

    @contextmanager
    def calling(self, attend: Attend) -> Iterator[None]:
        """Make a forward with this cache attend with this function."""

        def attend_in_place(
            own_attention: Callable[..., Any],
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            **arguments: Any,
        ) -> tuple[torch.Tensor, None]:
            """Attend by the function of the block; Args: see `DecodeCache`."""
            layer = self.layer_of(key)
            if layer is None:
                raise UnsupportedAttentionError("its attention changes the keys that it caches")
            layer.new_states = None
            call = AttentionCall(
                layer=layer,
                own_attention=own_attention,
                module=module,
                arguments=_constant(arguments),
            )
            return attend(call, query, key, value), None

        for layer in self.paged:
            layer.new_states = None
        with (
            hf_compat.replacing_attention(attend_in_place),
            replacing_grouped_product(torch.ops.cb_rollout.grouped_product),
        ):
            yield


def _constant(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an attention function without tensors of the traced forward."""
    kept: dict[str, Any] = {}
    for name, value in arguments.items():
        values = value if isinstance(value, tuple | list) else [value]
        if not any(isinstance(x, FakeTensor) for x in values):
            kept[name] = value
        elif name not in HARMLESS_ARGUMENTS:
            raise UnsupportedAttentionError(f"its attention takes {name}, a tensor")
    return kept


@dataclass(frozen=True, slots=True)
class TraceablePrefill:
    """A model's forward of packed tokens, to be traced."""

    run: Callable[[DecodeCache, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """Runs the model, held in evaluation mode, on a cache, token ids and positions `[1, N]`, and
    each row's last index `[B]`; returns logits in its dtype, `[B, V]`."""
    cache: PrefillCache
    token_ids: Sequence[int]
    """Ids of the model's vocabulary to try the graph with; at least one."""
    dtype: torch.dtype = torch.float32
    """The dtype that `run` computes in."""
    precisely: Precisely = higher_precision
    """Returns a context in which `run` computes in another dtype."""


class CompiledPrefill:
    """Decide when to compile a model's prefill, and run it compiled."""

    def __init__(
        self, settings: CompileSettings, *, interval: int = 0, max_graphs: int = 0
    ) -> None:
        """Compile nothing yet; `interval` and `max_graphs` as `CompiledGraph` takes them."""
        self.settings = settings
        self.graph: PrefillGraph | None = None
        """Runs the forward; None: the model itself runs."""
        self.obstacle = ""
        """The reason why the forward is not compiled; "": it is, or may still be."""
        self._interval = interval
        self._max_graphs = max_graphs
        self._num_traces = 0
        self._weights: list[object] = []
        self._has_hooks = False

    def __str__(self) -> str:
        """Return a phrase for the log."""
        if self.graph is not None:
            return "compiled"
        return "not compiled" if self.obstacle else "until compiled"

    def check_weights(self, model: torch.nn.Module) -> None:
        """Drop the graph if a weight was replaced, an adapter switched, or a module has a hook."""
        weights = captured_weights(model, by_address=False)
        self._has_hooks = has_hooks(model)
        if self._has_hooks or weights != self._weights:
            self._weights = weights
            self.graph = None

    def compile(self, prefill: TraceablePrefill) -> None:
        """Trace and compile the forward, unless it is compiled, or cannot be.

        Raises:
            ConfigurationError: it cannot, and `settings.raises_failure` says so.
        """
        if self.graph is not None or self.obstacle or self._has_hooks:
            return
        if self._num_traces == MOST_TRACES:
            self.obstacle = f"the weights moved {MOST_TRACES} times"
            _LOGGER.warning("prefill is no longer compiled: %s", self.obstacle)
            return
        self._num_traces += 1
        _LOGGER.info("prefill is compiled as %s asks", self.settings.source)
        try:
            self.graph = PrefillGraph(
                prefill, self.settings, interval=self._interval, max_graphs=self._max_graphs
            )
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = str(error) if isinstance(error, UntraceableError) else error_text(error)
            self._fail(reason, error)

    def run(
        self,
        ids_1N: torch.Tensor,
        positions_1N: torch.Tensor,
        last_B: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor | None:
        """Return float32 logits, `[B, V]`, from the compiled forward; None: there is none.

        Raises:
            ConfigurationError: it failed, and `settings.raises_failure` says so.
        """
        if self.graph is None:
            return None
        try:
            return self.graph(ids_1N, positions_1N, last_B, attend)
        except Exception as error:
            # The model itself may succeed, but not where memory ran out.
            if is_out_of_memory(error):
                raise
            self._fail(error_text(dynamo.cause_of(error)), error)
            return None

    def give_up(self, obstacle: str) -> None:
        """Run the model itself from now on, for this reason."""
        self.graph = None
        self.obstacle = obstacle
        _LOGGER.warning("prefill is not compiled as %s asks: %s", self.settings.source, obstacle)

    def _fail(self, reason: str, error: Exception) -> None:
        if self.settings.raises_failure:
            raise CompilationFailedError(
                f"{self.settings.source}: prefill cannot be compiled with it ({reason}); leave it "
                "None."
            ) from error
        self.give_up(reason)


class PrefillGraph:
    """Run the prefill of one model from a compiled graph."""

    def __init__(
        self,
        prefill: TraceablePrefill,
        settings: CompileSettings,
        *,
        interval: int,
        max_graphs: int,
    ) -> None:
        """Trace a forward, compile it, and compare it with the model.

        Raises:
            UntraceableError: the forward reads contents, depends on the number of rows or tokens,
                does not compile, or the graph computes something else.
        """
        calls: list[AttentionCall] = []
        module = _trace(prefill, calls)
        self._calls = calls
        self.compiled = CompiledGraph(module, settings, interval=interval, max_graphs=max_graphs)
        tried = TRIED_SIZES[:1] if settings.is_static else TRIED_SIZES
        self._try(prefill, tried)

    def __call__(
        self,
        ids_1N: torch.Tensor,
        positions_1N: torch.Tensor,
        last_B: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Return float32 logits, `[B, V]`."""
        num_tokens = ids_1N.shape[1]
        num_rows = len(last_B)
        padded_tokens = self.compiled.padded(num_tokens)
        padded_rows = self.compiled.padded(num_rows)
        ids = functional.pad(ids_1N, (0, padded_tokens - num_tokens))
        positions = functional.pad(positions_1N, (0, padded_tokens - num_tokens))
        last = functional.pad(last_B, (0, padded_rows - num_rows))
        _RUNNING.attend = attend
        _RUNNING.calls = self._calls
        _RUNNING.num_tokens = num_tokens
        try:
            logits = self.compiled((padded_tokens, padded_rows), ids, positions, last)
            return logits[:num_rows].float()
        finally:
            _RUNNING.attend = None
            _RUNNING.calls = None

    def _try(self, prefill: TraceablePrefill, tried: Sequence[tuple[int, int]]) -> None:
        """Raise `UntraceableError` if the graph differs from the model by more than rounding.

        Rounding is measured at every token of the largest size, which begins with the other sizes'.
        """

        def run(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
            with torch.no_grad(), prefill.cache.calling(_attend_to_self):
                return prefill.run(prefill.cache, *inputs)

        most = max(num_tokens for num_tokens, _ in tried)
        all_tokens = example(most, most, prefill.token_ids, prefill.cache.device)
        noise_B = trial_noise(lambda: run(all_tokens), prefill.dtype, prefill.precisely)
        for num_tokens, num_rows in tried:
            inputs = example(num_tokens, num_rows, prefill.token_ids, prefill.cache.device)
            last_B = inputs[-1]
            # The last token comes first in `all_tokens`.
            noise = None if noise_B is None else noise_B.flip(0)[last_B]
            label = f"with {num_tokens} tokens of {num_rows} rows"
            try:
                found_BV = self(*inputs, _attend_to_self)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                reason = error_text(dynamo.cause_of(error))
                raise UntraceableError(f"{label}: {reason}") from error
            reason = difference(found_BV, run(inputs), noise)
            if reason:
                raise UntraceableError(f"{label} it computes something else: {reason}")


def _trace(prefill: TraceablePrefill, calls: list[AttentionCall]) -> fx.GraphModule:
    def record(
        call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        calls.append(call)
        # In the pages' dtype, which the output of attention has too.
        value = value.to(call.layer.value_dtype)
        return torch.ops.cb_rollout.attend_packed(query, key, value, len(calls) - 1)

    def run(ids_1N: torch.Tensor, positions_1N: torch.Tensor, last_B: torch.Tensor) -> torch.Tensor:
        with prefill.cache.calling(record):
            return prefill.run(prefill.cache, ids_1N, positions_1N, last_B)

    inputs = example(*TRACED_SIZES, prefill.token_ids, prefill.cache.device)
    try:
        module, has_guards = inductor.trace_graph(run, *inputs)
    except Exception as error:
        raise UntraceableError(error_text(error)) from error
    if has_guards:
        raise UntraceableError("its forward depends on the number of rows or tokens")
    return module


def example(
    num_tokens: int, num_rows: int, token_ids: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids and positions, `[1, N]`, and each row's last index, `[B]`."""
    tokens = list(islice(cycle(token_ids), num_tokens))
    ids_1N = torch.tensor(tokens, device=device)[None]
    positions_1N = torch.arange(num_tokens, device=device)[None] % TRIED_POSITIONS + 1
    last = [num_tokens - 1 - row for row in range(num_rows)]
    return ids_1N, positions_1N, torch.tensor(last, device=device)


def _attend_to_self(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    spec = AttentionSpec(query.shape[-1] ** -0.5)
    return attend_to_new_token(call.layer, query, key, value, spec)


def attend_to_pages(
    cache: PagedCache,
    attention: PackedAttention,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Attend:
    """Return the attention of one prefill: write the new states to the pages, and read histories.

    `autocast`: returns a context with the precision of the model's forward.
    """

    def attend(
        call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        layer = cache.layers[call.layer.index]
        assert isinstance(layer, PagedLayer)
        keys, values = layer.update(key, value)
        with autocast():
            outputs, _ = attention(
                call.own_attention, call.module, query, keys, values, None, **call.arguments
            )
        return outputs

    return attend


def call_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int
) -> torch.Tensor:
    """Compute the `call`-th attention of the prefill that this thread runs, without its padding."""
    num_tokens, num_padded = _RUNNING.num_tokens, query.shape[2] - _RUNNING.num_tokens
    query, key, value = (states[:, :, :num_tokens] for states in (query, key, value))
    outputs = _RUNNING.attend(_RUNNING.calls[call], query, key, value).to(value.dtype)
    # A result may not share memory with an argument.
    return functional.pad(outputs, (0, 0, 0, 0, 0, num_padded)).contiguous()


torch.library.define(
    "cb_rollout::attend_packed", "(Tensor query, Tensor key, Tensor value, int call) -> Tensor"
)
for _key in ("CPU", "CUDA"):
    torch.library.impl("cb_rollout::attend_packed", _key, call_packed)


@torch.library.register_fake("cb_rollout::attend_packed")
def _output_of_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int
) -> torch.Tensor:
    return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
