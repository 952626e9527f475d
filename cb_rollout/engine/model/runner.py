"""Run the model's own forward over rows of new tokens: packed, or left-padded.

B: rows, Q: new tokens of the longest row, S: tokens of the longest row, T: tokens, V: vocabulary.
Of routes: N: tokens, L: routers, K: experts of a token.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from cb_rollout.compat import accelerate as accelerate_compat
from cb_rollout.compat import inductor, multimodal
from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.module_state import forward_identity, with_active_adapter
from cb_rollout.compat.moe import without_router_logits
from cb_rollout.compat.rope import RowRope
from cb_rollout.engine.attention.backend import AttentionBackend
from cb_rollout.engine.attention.compiled_prefill import (
    CompiledPrefill,
    PrefillCache,
    TraceablePrefill,
    attend_to_pages,
)
from cb_rollout.engine.attention.cpu.linear import replacing_linear
from cb_rollout.engine.attention.decode_cache import DecodeInputs, UnsupportedAttentionError
from cb_rollout.engine.attention.packed import PackedAttention, Segment, no_mask
from cb_rollout.engine.attention.selector import BackendSelection, select_backend
from cb_rollout.engine.attention.traced_forward import Traceable
from cb_rollout.engine.images.prompt_images import ImageInputs, PromptImages
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.recurrent import PROBE_ROWS, OpaqueStateAdapter
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.adapters import AdapterSource, LayerAdapters
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.execution import BatchLayout, ImageCheck, PagedExecution
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.model.forward_inputs import ForwardInputs, packed_inputs, padded_inputs
from cb_rollout.engine.model.mixing import AdapterMixing
from cb_rollout.engine.model.probe import PROBE_TOKENS, probe
from cb_rollout.engine.model.routers import (
    RouteRecorder,
    Routers,
    find_routers,
    joined_routes,
)
from cb_rollout.engine.numerics.bitwise import bitwise
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.draw import chosen_logprobs
from cb_rollout.engine.sampling.mask import masked_logprobs
from cb_rollout.errors import ConfigurationError


class ModelRunner:
    """Run forwards of one unwrapped model, unchanged and on its own device."""

    def __init__(
        self,
        model: PreTrainedModel,
        autocast_dtype: torch.dtype | None,
        *,
        is_bitwise: bool = False,
        is_split: bool = False,
        reads_pages: bool = True,
    ) -> None:
        """Run nothing yet.

        Args:
            model: the model, on one device.
            autocast_dtype: run forwards under autocast to this dtype; None: no autocast.
            is_bitwise: True: a row must have the same bits in every batch.
            is_split: True: other processes compute parts of each layer in the same forwards.
            reads_pages: True: decode steps may read keys in the pages; False: they gather them.

        Raises:
            ConfigurationError: the model's forward takes no cache.
        """
        self.model = model
        self.device = next(model.parameters()).device
        self.execution = PagedExecution(
            backend_selection=select_backend(self.device), rope=RowRope(model)
        )
        """Layouts and backend with which rows are computed on pages; see `use`."""
        self.is_bitwise = is_bitwise
        self.is_split = is_split
        self.reads_pages = reads_pages
        self._autocast_dtype = autocast_dtype
        self._higher_dtype: torch.dtype | None = None
        self.facts = ModelFacts.of(model)
        self.image_inputs = ImageInputs(model)
        self._has_linear_kernels = self.device.type == "cpu" and not is_bitwise
        self.compiled_prefill: CompiledPrefill | None = None
        """Runs packed prompts compiled; None: nothing asks for it."""
        self.recorder: RouteRecorder | None = None
        """Records the experts that tokens take; None: they are not recorded."""
        self.adapters: AdapterSource = LayerAdapters(model)
        """The adapters that sequences may name; another source where a copy generates."""
        self.mixing = AdapterMixing(self)
        """Knows which adapters one forward may mix."""
        self._runs_named_adapters = False
        """True while adapters other than the active ones compute."""
        cache_argument = self.facts.cache_argument
        if cache_argument is None:
            raise ConfigurationError(
                f"{self.facts.name}.forward accepts no transformers cache, so its keys and values "
                "cannot be kept; use model.generate for this model."
            )
        self._cache_argument = cache_argument

    def use(self, execution: PagedExecution) -> None:
        """Set how rows are computed on pages from now on."""
        self.execution = execution

    @contextmanager
    def using(self, execution: PagedExecution) -> Iterator[None]:
        """Change how rows are computed on pages, inside the block."""
        before = self.execution
        self.execution = execution
        try:
            yield
        finally:
            self.execution = before

    def use_images(self, checked: ImageCheck) -> None:
        """Pass pixels to the model as a check found, from now on."""
        self.image_inputs.casts_pixels = checked.casts_pixels

    def numerics(self) -> AbstractContextManager[Any]:
        """Return the context of forwards: `numerics="bitwise"` operators, or a null context."""
        return bitwise(self.model) if self.is_bitwise else nullcontext()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run forwards on the model's device, without the calling thread's autocast."""
        with devices.current(self.device), devices.plain_modes(), self.numerics():
            yield

    @property
    def batch_layout(self) -> BatchLayout:
        return self.execution.batch_layout

    @property
    def packing_obstacle(self) -> str:
        """Return the reason why `batch_layout` is not PACKED."""
        return self.execution.packing_obstacle

    @property
    def backend_selection(self) -> BackendSelection:
        return self.execution.backend_selection

    @property
    def attention_backend(self) -> AttentionBackend | None:
        """Return the backend that reads pages in decode steps; None: histories are gathered."""
        return self.execution.attention_backend

    @property
    def rope(self) -> RowRope:
        return self.execution.rope

    @property
    def forward_identity(self) -> tuple[Any, ...]:
        is_autocast = self._autocast_dtype is not None
        return forward_identity(self.model, is_autocast=is_autocast)

    def probe(self) -> CacheLayout:
        """Return the layout of a model that keeps its past in transformers' cache."""

        def forward(input_ids: torch.Tensor, cache: Cache) -> object:
            return self.forward(input_ids.to(self.device), None, None, cache)

        with self.using(replace(self.execution, opaque_states=None)), eval_mode(self.model):
            return probe(self.model.config, forward)

    def record_routes(self) -> Routers:
        """Record what the model's routers choose from now on; `ConfigurationError`: it has none."""

        def forward(input_ids: torch.Tensor) -> torch.Tensor:
            return self._run(input_ids, {"use_cache": False}).logits

        with eval_mode(self.model):
            self.recorder = RouteRecorder(find_routers(self.model, forward))
        return self.recorder.routers

    def forget_routes(self) -> None:
        """Stop recording routers' choices."""
        self.recorder = None

    @property
    def routers(self) -> Routers | None:
        """Return the routers whose choices are recorded; None: nothing is recorded."""
        return None if self.recorder is None else self.recorder.routers

    def is_sound(self) -> bool:
        try:
            self.plain_logits([0] * PROBE_TOKENS)
        except Exception:  # noqa: BLE001  any error is the answer
            return False
        return True

    def probe_opaque_states(self) -> OpaqueStateAdapter:
        """Read the states of a model that stores them in its own object instead of a cache."""

        def states_after(row: list[int]) -> object:
            output = self._run(self._integers([row] * PROBE_ROWS), {"use_cache": True})
            return getattr(output, self._cache_argument, None)

        with eval_mode(self.model):
            short = states_after([0])
            long = states_after([0] * PROBE_TOKENS)
        return OpaqueStateAdapter(short, long)

    def check_weights(self) -> None:
        if self.attention_backend is not None:
            self.attention_backend.traced_forward.check_weights(self.model)
        if self.compiled_prefill is not None:
            self.compiled_prefill.check_weights(self.model)

    def compare_trace(self) -> None:
        """Compare the trace of decode forwards with the model before the next step."""
        if self.attention_backend is not None:
            self.attention_backend.traced_forward.compare_before_next_step()

    def compile_prefill(self, layout: CacheLayout) -> None:
        """Compile the forward of packed prompts, if requested and not done yet.

        Raises:
            ConfigurationError: it cannot be compiled as the settings say.
        """
        if self.compiled_prefill is not None:
            prefill = TraceablePrefill(
                self._packed_forward,
                PrefillCache(layout, self.device),
                hf_compat.text_token_ids(self.model),
                self.compute_dtype,
                self.computing_in,
            )
            self.compiled_prefill.compile(prefill)

    def _packed_forward(
        self,
        cache: Cache,
        ids_1N: torch.Tensor,
        positions_1N: torch.Tensor,
        last_B: torch.Tensor,
    ) -> torch.Tensor:
        return self.forward(ids_1N, no_mask(self.device), positions_1N, cache, None, last_B)

    def warm_up(self, num_steps: float = 0) -> None:
        """Trace decode steps, and compile them if that pays off within `num_steps`."""
        backend = self.attention_backend
        if backend is not None:
            forward = Traceable(
                self.decode,
                backend.cache,
                hf_compat.text_token_ids(self.model),
                self.compute_dtype,
                self.computing_in,
            )
            backend.traced_forward.warm_up(forward, num_steps)

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Run forwards in `dtype`, float32 or float64, if they would compute in fewer bits."""
        autocast_dtype = self._autocast_dtype
        higher_dtype = self._higher_dtype
        self._autocast_dtype = None
        self._higher_dtype = dtype
        try:
            with higher_precision(dtype):
                yield
        finally:
            self._autocast_dtype = autocast_dtype
            self._higher_dtype = higher_dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype that forwards compute in now."""
        if self._higher_dtype is not None:
            return self._higher_dtype
        return self._autocast_dtype or torch_compat.compute_dtype(self.model)

    @property
    def rounding_dtype(self) -> torch.dtype:
        """Return the dtype that forwards round to; for TF32, a dtype with as many digits."""
        is_tf32 = self.computes_coarsely and self.compute_dtype == torch.float32
        return torch.float16 if is_tf32 else self.compute_dtype

    @property
    def computes_coarsely(self) -> bool:
        is_half = self.compute_dtype.itemsize < torch.float32.itemsize
        is_exact = self._higher_dtype is not None
        return is_half or (torch_compat.rounds_float32_products(self.device) and not is_exact)

    @contextmanager
    def under_adapter(self, name: str | None) -> Iterator[None]:
        """Run forwards under a single adapter; None: under the active adapters.

        The model itself runs them: traces and compiled forwards have other weights.

        Raises:
            ConfigurationError: there is no such adapter, or it cannot run.
        """
        if name is None:
            yield
            return
        with self.adapters.activated(name), self._running_named_adapters():
            yield

    @contextmanager
    def _running_named_adapters(self) -> Iterator[None]:
        """Run forwards by the model itself inside the block."""
        before = self._runs_named_adapters
        self._runs_named_adapters = True
        try:
            yield
        finally:
            self._runs_named_adapters = before

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch through the model; return float32 logits after each row, `[B, V]`.

        Rows of several adapters run in one forward if that was proved, else in one per adapter.
        """
        names = frozenset(batch.rows_of_adapters)
        if len(names) == 1:
            (adapter,) = names
            with self.under_adapter(adapter):
                return self._logits(batch)
        if self._may_mix(batch):
            logits_BV = self.mixing.logits(batch, self._logits_by_adapter, self._mixed_logits)
            if logits_BV is not None:
                return logits_BV
        return self._logits_by_adapter(batch)

    def _may_mix(self, batch: ForwardBatch) -> bool:
        """Return whether one forward may have rows of several adapters.

        The first such forward is compared with one per adapter, so no recurrent state may move.
        """
        if not batch.is_decode or self.is_split or self.is_bitwise or self.recorder is not None:
            return False
        return self.batch_layout.takes_any_lengths and not batch.cache.layout.is_recurrent

    def _mixed_logits(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Run rows of several adapters in one forward; None if the adapters cannot be mixed."""
        mixed = self.adapters.mixed(batch.adapters)
        if mixed is None:
            return None
        with mixed, self._running_named_adapters():
            return self._logits(batch)

    def _logits_by_adapter(self, batch: ForwardBatch) -> torch.Tensor:
        """Run the rows of each adapter in a separate forward."""
        rows_of_adapters = batch.rows_of_adapters
        parts: list[torch.Tensor] = []
        for adapter, rows in rows_of_adapters.items():
            with self.under_adapter(adapter):
                parts.append(self._logits(batch.select(rows)))
        return self._in_order(parts, list(rows_of_adapters.values()))

    def _in_order(
        self, parts: Sequence[torch.Tensor], rows_of_parts: Sequence[list[int]]
    ) -> torch.Tensor:
        """Join the logits of parts of a batch, given the rows of each, in the batch's order."""
        order = self._integers([row for rows in rows_of_parts for row in rows])
        return torch.cat(list(parts)).index_select(0, order.argsort())

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch of one adapter; return as `logits`."""
        if batch.is_decode and self.attention_backend is not None:
            return self._paged_decode(batch, self.attention_backend)
        is_text = batch.images is None
        if is_text and self.batch_layout is BatchLayout.PACKED and not batch.is_decode:
            return self._forward(batch, packed_inputs(batch))
        if not is_text or self.batch_layout.takes_any_lengths:
            return self._forward(batch, padded_inputs(batch))
        alike = self._alike(batch)
        parts = [batch.select(rows) for rows in alike]
        return self._in_order([self._forward(part, padded_inputs(part)) for part in parts], alike)

    def _alike(self, batch: ForwardBatch) -> list[list[int]]:
        """Group rows by length, for a model that takes only rows of equal length."""
        if self.batch_layout is BatchLayout.SINGLE_ROWS:
            return [[row] for row in range(len(batch))]
        has_keys = batch.cache.layout.has_keys
        alike: dict[tuple[int, int], list[int]] = {}
        for row, (new, length) in enumerate(zip(batch.num_new, batch.lengths, strict=True)):
            # Without keys there is no history to align: only the new tokens must be of one length.
            history = length if has_keys else new == length
            alike.setdefault((new, history), []).append(row)
        return list(alike.values())

    def _sides(self, batch: ForwardBatch) -> Sequence[int]:
        return batch.rope_sides or list(map(self.rope.side, batch.lengths))

    def _paged_decode(self, batch: ForwardBatch, backend: AttentionBackend) -> torch.Tensor:
        inputs = backend.prepare(batch)
        sides = self._sides(batch)
        can_be_traced = not self._runs_named_adapters
        if can_be_traced and backend.traced_forward.count_step():
            self.warm_up()
        with self.rope.by_row(sides):
            # A trace takes one set of factors for all rows: that of the newest positions.
            is_traced = can_be_traced and min(sides) == max(sides)
            run = self.decode_traced if is_traced else self.decode
            logits_BV = run(inputs).float()
        if self.recorder is not None:
            newest_B = self._integers(batch.lengths) - 1
            slots_B = batch.table.slots(self._integers(batch.table_rows), newest_B)
            batch.cache.write_routes(self.recorder.take(), slots_B, None)
        return logits_BV

    def decode_traced(self, inputs: DecodeInputs, *, is_captured: bool = False) -> torch.Tensor:
        """Run one new token of each row, from the trace if there is one; return as `decode`.

        `is_captured`: True: exceptions of a trace are passed on, because the capture is broken and
            nothing else can run in it; False: the model itself runs instead.
        """
        assert self.attention_backend is not None
        traced_forward = self.attention_backend.traced_forward
        logits_BV = traced_forward.run(inputs, raises=is_captured)
        return self.decode(inputs) if logits_BV is None else logits_BV

    def decode(self, inputs: DecodeInputs) -> torch.Tensor:
        """Run each row's new token through the model; return logits in its dtype, `[B, V]`."""
        cache = inputs.cache
        tokens_B1 = inputs.tokens_B1
        with cache.attending(inputs):
            return self.forward(tokens_B1, cache.mask(tokens_B1), inputs.positions_B1, cache)

    def _forward(self, batch: ForwardBatch, inputs: ForwardInputs) -> torch.Tensor:
        """Run a batch's inputs on its cache; `UnsupportedAttentionError`: not in segments."""
        cache = batch.cache
        mapping = inputs.mapping
        segments = inputs.segments
        positions = inputs.positions
        arguments: Mapping[str, torch.Tensor] = {}
        if batch.images is not None:
            # The batch has one row.
            (stop,) = batch.lengths
            (num_new,) = batch.num_new
            positions = self.image_inputs.positions(batch.images, stop - num_new, stop)
            arguments = self.image_inputs.arguments(batch.images, stop - num_new, stop)
        if not self.batch_layout.takes_any_lengths:
            positions = None
        cache.begin(mapping)
        if self.recorder is not None:
            is_padded = segments is None
            self.recorder.expect(batch.routes, batch.num_new, self.device, is_padded=is_padded)
        logits_BV = self._run_compiled(batch, inputs)
        if logits_BV is None:
            with (
                self.rope.by_row(self._sides(batch), batch.num_new if segments else None),
                self._attending(segments) if segments else nullcontext(),
            ):
                logits_BV = self.forward(
                    inputs.input_ids, inputs.mask, positions, cache, arguments, inputs.last_B
                )
        cache.end(mapping)
        if self.recorder is not None:
            cache.write_routes(self.recorder.take(), mapping.write_slots, mapping.write_tokens)
        return logits_BV.float()

    def _run_compiled(self, batch: ForwardBatch, inputs: ForwardInputs) -> torch.Tensor | None:
        """Return the compiled forward's result for a prefill; None if the model must run it.

        The model runs prefills that are not packed, or that use another precision, adapter or
        rotary factors than the trace.
        """
        compiled = self.compiled_prefill
        segments = inputs.segments
        if compiled is None or segments is None or inputs.last_B is None:
            return None
        if self._higher_dtype is not None or any(self._sides(batch)):
            return None
        if self._runs_named_adapters:
            return None
        self.compile_prefill(batch.cache.layout)
        attention = PackedAttention(segments, self.device, max_length=sys.maxsize)
        attend = attend_to_pages(batch.cache, attention, self.autocast)
        return compiled.run(inputs.input_ids, inputs.positions, inputs.last_B, attend)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which forwards compute as the trainer's do under autocast."""
        if self._autocast_dtype is None:
            return nullcontext()
        # A cached cast would stay in a captured step when the weights change.
        return torch.autocast(self.device.type, self._autocast_dtype, cache_enabled=False)

    @contextmanager
    def _attending(self, segments: Sequence[Segment]) -> Iterator[None]:
        # Later rows may be longer than these, and than those of the model check.
        attend = PackedAttention(segments, self.device, max_length=sys.maxsize)
        try:
            with hf_compat.replacing_attention(attend):
                yield
        except ConfigurationError as error:
            raise UnsupportedAttentionError(str(error)) from error
        if not attend.num_calls:
            raise UnsupportedAttentionError("its attention cannot be replaced")

    def plain_logits(
        self,
        token_ids: list[int],
        model: torch.nn.Module | None = None,
        beside: Sequence[list[int]] = (),
        images: PromptImages | None = None,
        num_last: int = 0,
    ) -> torch.Tensor:
        """Return float32 logits after every token, `[T, V]`, by a forward without a cache.

        Args:
            token_ids: the row.
            model: the model that computes it; None: the runner's own module.
            beside: other rows of the forward, with as many tokens.
            images: those of the prompt that begins the tokens; None: they are text.
            num_last: number of last tokens whose logits are returned; 0: all.
        """
        input_ids = self._integers([token_ids, *beside])
        arguments = self._taken(
            {
                "attention_mask": torch.ones_like(input_ids),
                "use_cache": False,
                "logits_to_keep": num_last,
            }
        )
        if images is not None:
            arguments |= self.image_inputs.arguments(images, 0, len(token_ids))
        called = self.model if model is None else model
        with multimodal.keeping_position_offsets(called):
            return self._run(input_ids, arguments, model).logits[0][-num_last:].float()

    def padded_logits(self, rows: Sequence[list[int]], starts: Sequence[int]) -> torch.Tensor:
        """Return float32 logits `[B, S, V]` of rows padded to begin at `starts`, as trainers do."""
        S = max(start + len(row) for row, start in zip(rows, starts, strict=True))
        ids_BS = torch.zeros(len(rows), S, dtype=torch.int64)
        mask_BS = torch.zeros_like(ids_BS)
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            ids_BS[index, start : start + len(row)] = torch.tensor(row)
            mask_BS[index, start : start + len(row)] = 1
        arguments = {"attention_mask": mask_BS.to(self.device), "use_cache": False}
        return self._run(ids_BS.to(self.device), self._taken(arguments)).logits.float()

    def _taken(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the model's forward takes."""
        return {
            name: value for name, value in arguments.items() if name in self.facts.argument_names
        }

    def forward(
        self,
        input_ids_BQ: torch.Tensor,
        mask_BS: torch.Tensor | None,
        positions_BQ: torch.Tensor | None,
        cache: Cache,
        others: Mapping[str, torch.Tensor] | None = None,
        last_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call the model; return logits after each row's last token, in its dtype, `[B, V]`.

        Args:
            input_ids_BQ: the new tokens; `[1, N]` where one row packs all rows.
            mask_BS: True or 1 for the tokens of each row, as the model takes it; None: no mask.
            positions_BQ: position ids; None: the model counts them.
            cache: holds the history, and takes the new tokens' states.
            others: more arguments.
            last_B: each row's last index, where one row packs all tokens; None: rows are padded.
        """
        arguments = {
            "attention_mask": mask_BS,
            "position_ids": positions_BQ,
            "use_cache": True,
            "logits_to_keep": 1 if last_B is None else last_B,
        }
        known = self._taken(arguments)
        if self.facts.takes_any_argument and positions_BQ is not None:
            known["position_ids"] = positions_BQ
        known |= others or {}
        states: Any = self.execution.opaque_states
        layer = cache.layers[0] if states else None
        known[self._cache_argument] = states.inserted(layer) if states else cache
        recording = self.recorder.recording(self.model) if self.recorder else nullcontext()
        with self._replacing_linear(), recording:
            output = self._run(input_ids_BQ, known)
        if states is not None:
            returned = getattr(output, self._cache_argument)
            states.extract(layer, returned, num_rows=input_ids_BQ.shape[0])
        if last_B is None:
            return output.logits[:, -1]
        if inductor.is_tracing():
            # A comparison of sizes would bind a traced forward to them.
            is_all = "logits_to_keep" not in self.facts.argument_names
        else:
            is_all = output.logits.shape[1] == input_ids_BQ.shape[1]
        logits_NV = output.logits[0]
        return logits_NV.index_select(0, last_B) if is_all else logits_NV

    def _replacing_linear(self) -> AbstractContextManager[Any]:
        if not self._has_linear_kernels:
            return nullcontext()
        # A backend rewrites the products of a trace. In a higher dtype the forward is a reference,
        # which torch computes.
        if inductor.is_tracing() or self._higher_dtype is not None:
            return nullcontext()
        return replacing_linear(self.compute_dtype)

    def _run(
        self,
        input_ids_BQ: torch.Tensor,
        arguments: dict[str, object],
        model: torch.nn.Module | None = None,
    ) -> Any:
        # Compared with None, since a wrapper may have a length of 0.
        called: torch.nn.Module = self.model if model is None else model
        if self._autocast_dtype is not None and model is None:
            called = accelerate_compat.below_accelerate(self.model)
        # no_grad, not inference_mode: some models keep buffers that a later training forward uses.
        with torch.no_grad(), self.autocast():
            arguments = arguments | without_router_logits(self.model)
            return called(input_ids=input_ids_BQ, **arguments)

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return devices.to_device(values, self.device)


def prompt_logprobs(
    runner: ModelRunner, token_ids: list[int], temperature: float, num: int
) -> list[dict[int, tuple[float, int]]]:
    """Return the log-probability and rank, from 1, of tokens at each position but the first.

    They are the `num` most likely tokens and the prompt's own token, by id.
    """
    logits_NV = runner.plain_logits(token_ids)
    logprobs_TV = (logits_NV[:-1] / temperature).log_softmax(-1)
    own_T1 = devices.to_device(token_ids[1:], runner.device)[:, None]
    chosen_T1 = logprobs_TV.gather(1, own_T1)
    ranks_T1 = (logprobs_TV > chosen_T1).sum(-1, keepdim=True) + 1
    top_TK, ids_TK = logprobs_TV.topk(num, -1)
    top_ranks_TK = torch.arange(1, num + 1, device=runner.device).expand_as(ids_TK)
    # The likeliest tokens at each position, and the prompt's own token.
    ids = torch.cat([ids_TK, own_T1], 1).tolist()
    values = torch.cat([top_TK, chosen_T1], 1).tolist()
    ranks = torch.cat([top_ranks_TK, ranks_T1], 1).tolist()
    places: list[dict[int, tuple[float, int]]] = []
    for of_place in zip(ids, values, ranks, strict=True):
        place: dict[int, tuple[float, int]] = {}
        for token, value, rank in zip(*of_place, strict=True):
            place[token] = (value, rank)
        places.append(place)
    return places


def recomputed_logprobs(
    runner: ModelRunner, model: torch.nn.Module, request: Request
) -> list[float]:
    """Return log-probabilities by a forward of the (wrapped) training `model` without a cache."""
    num_prompt = len(request.prompt_ids)
    temperature = 1.0 if request.params.is_greedy else request.params.temperature
    replaying = nullcontext()
    adapting = nullcontext()
    if request.params.adapter is not None:
        adapting = with_active_adapter(hf_compat.unwrap(model), request.params.adapter)
    if runner.recorder is not None:
        part = (request.routed_experts, 0, request.num_tokens)
        routes_NLK = joined_routes([part], runner.device)
        replaying = runner.recorder.routers.replaying(hf_compat.unwrap(model), routes_NLK)
    with replaying, adapting:
        logits_NV = runner.plain_logits(
            request.token_ids, hf_compat.trained_forward(model), images=request.images
        )
    chosen_T = devices.to_device(request.token_ids[num_prompt:], runner.device)
    logits_TV = logits_NV[num_prompt - 1 : -1]
    if request.kept_token_ids:
        kept = request.kept_token_ids[: len(chosen_T)]
        return masked_logprobs(logits_TV, chosen_T, kept, temperature)[0].tolist()
    return chosen_logprobs(logits_TV / temperature, chosen_T).tolist()
