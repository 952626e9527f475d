"""Run the model's own forward over rows of new tokens: packed, or left-padded.

B: rows, Q: new tokens of the longest row, S: tokens of the longest row, T: tokens, V: vocabulary.
Of routes: N: tokens, L: routers, K: experts of a token.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from cb_rollout.compat import accelerate as accelerate_compat
from cb_rollout.compat import inductor, multimodal
from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.module_state import forward_identity
from cb_rollout.compat.moe import without_router_logits
from cb_rollout.compat.rope import RowRope
from cb_rollout.engine.attention.backend import AttentionBackend
from cb_rollout.engine.attention.cpu.packed_linear import PackedLinear
from cb_rollout.engine.attention.decode_cache import DecodeInputs, UnsupportedAttentionError
from cb_rollout.engine.attention.packed import PackedAttention, Segment
from cb_rollout.engine.attention.selector import select_backend
from cb_rollout.engine.attention.traced_forward import Traceable
from cb_rollout.engine.images.prompt_images import ImageInputs, PromptImages
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.recurrent import PROBE_ROWS, OpaqueStateAdapter
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.forward_inputs import ForwardInputs, packed_inputs, padded_inputs
from cb_rollout.engine.model.probe import PROBE_TOKENS, probe
from cb_rollout.engine.model.routers import (
    RouteRecorder,
    Routers,
    find_routers,
    joined_routes,
)
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.draw import chosen_logprobs
from cb_rollout.engine.sampling.mask import masked_logprobs
from cb_rollout.errors import ConfigurationError


class BatchLayout(StrEnum):
    """The rows that a model takes together in one forward."""

    PACKED = "packed"
    """All rows, in a prefill one after the other without padding, in a decode step as PADDED."""
    PADDED = "padded"
    """All rows, left-padded, with a mask and each token's position."""
    EQUAL_LENGTHS = "equal_lengths"
    """Rows of one length, without positions: for models that count positions themselves, or take
    no padding."""
    SINGLE_ROWS = "single_rows"
    """One row: for models that mix the rows of a batch."""

    @property
    def takes_any_lengths(self) -> bool:
        return self in (BatchLayout.PACKED, BatchLayout.PADDED)


class ModelRunner:
    """Run forwards of one unwrapped model, as it is and on its own device.

    `is_bitwise`: a row must have the same bits in every batch. `is_split`: other processes compute
    parts of each layer in the same forwards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        autocast_dtype: torch.dtype | None,
        *,
        is_bitwise: bool = False,
        is_split: bool = False,
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.batch_layout = BatchLayout.PADDED
        self.packing_obstacle = ""
        """The reason why `batch_layout` is not PACKED."""
        self.is_bitwise, self.is_split = is_bitwise, is_split
        self._autocast_dtype = autocast_dtype
        self._higher_dtype: torch.dtype | None = None
        self._names = hf_compat.forward_argument_names(model)
        self._passes_on = hf_compat.forward_passes_on(model)
        self.rope = RowRope(model)
        self.image_inputs = ImageInputs(model)
        is_packable = self.device.type == "cpu" and not is_bitwise
        self.packed_linear = PackedLinear(model, is_enabled=is_packable)
        """Linear layers of the forwards on a CPU."""
        self.cuts_images: dict[tuple[bool, bool], bool] = {}
        """Permission to begin a forward between images, by checked `PromptImages.kind`."""
        self.opaque_states: OpaqueStateAdapter | None = None
        self.backend_selection = select_backend(self.device)
        self.attention_backend: AttentionBackend | None = None
        """Reads pages without a gather in decode steps; None: histories are gathered."""
        self.recorder: RouteRecorder | None = None
        """Records the experts that tokens take; None: they are not recorded."""
        cache_argument = hf_compat.cache_argument(model)
        if cache_argument is None:
            raise ConfigurationError(
                f"{type(model).__name__}.forward takes no transformers cache, so its past cannot "
                "be kept; roll this model out with model.generate."
            )
        self._cache_argument = cache_argument

    @property
    def forward_identity(self) -> tuple[Any, ...]:
        is_autocast = self._autocast_dtype is not None
        return forward_identity(self.model, is_autocast=is_autocast)

    def probe(self) -> CacheLayout:
        def forward(input_ids: torch.Tensor, cache: Cache) -> object:
            return self.forward(input_ids.to(self.device), None, None, cache)

        self.opaque_states, self.rope = None, RowRope(self.model)
        with eval_mode(self.model):
            return probe(self.model.config, forward)

    def record_routes(self) -> Routers:
        """Record what the model's routers choose from now on; `ConfigurationError`: it has none."""

        def forward(input_ids: torch.Tensor) -> torch.Tensor:
            return self._run(input_ids, {"use_cache": False}).logits

        with eval_mode(self.model):
            self.recorder = RouteRecorder(find_routers(self.model, forward))
        return self.recorder.routers

    def is_sound(self) -> bool:
        try:
            self.plain_logits([0] * PROBE_TOKENS)
        except Exception:  # noqa: BLE001  any error is the answer
            return False
        return True

    def probe_opaque_states(self) -> CacheLayout:
        """Return the layout of a model that keeps states in an object of its own, not a cache."""
        with eval_mode(self.model):
            outputs = [
                self._run(self._integers([row] * PROBE_ROWS), {"use_cache": True})
                for row in ([0], [0] * PROBE_TOKENS)
            ]
        short, long = (getattr(output, self._cache_argument, None) for output in outputs)
        self.opaque_states = OpaqueStateAdapter(short, long)
        return self.opaque_states.layout

    def check_weights(self) -> None:
        if self.attention_backend is not None:
            self.attention_backend.traced_forward.check_weights(self.model)

    def warm_up(self, num_steps: float = 0) -> None:
        if (backend := self.attention_backend) is not None:
            token_ids = hf_compat.text_token_ids(self.model)
            dtype, precisely = self.compute_dtype, self.computing_in
            forward = Traceable(self.decode, backend.cache, token_ids, dtype, precisely)
            with self.packed_linear.active():
                backend.traced_forward.warm_up(forward, num_steps)

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Run forwards in `dtype`, float32 or float64, where they compute in fewer bits."""
        own = self._autocast_dtype, self._higher_dtype
        self._autocast_dtype, self._higher_dtype = None, dtype
        try:
            with higher_precision(dtype):
                yield
        finally:
            self._autocast_dtype, self._higher_dtype = own

    @property
    def compute_dtype(self) -> torch.dtype:
        own = self._autocast_dtype or torch_compat.compute_dtype(self.model)
        return self._higher_dtype or own

    @property
    def rounding_dtype(self) -> torch.dtype:
        """Return the dtype that forwards round to: of TF32, one with as many digits."""
        is_tf32 = self.computes_coarsely and self.compute_dtype == torch.float32
        return torch.float16 if is_tf32 else self.compute_dtype

    @property
    def computes_coarsely(self) -> bool:
        is_half = self.compute_dtype.itemsize < torch.float32.itemsize
        is_exact = self._higher_dtype is not None
        return is_half or (torch_compat.rounds_float32_products(self.device) and not is_exact)

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch through the model; return float32 logits after each row, `[B, V]`."""
        if batch.is_decode and self.attention_backend is not None:
            return self._paged_decode(batch, self.attention_backend)
        is_text = batch.images is None
        if is_text and self.batch_layout is BatchLayout.PACKED and not batch.is_decode:
            return self._forward(batch, packed_inputs(batch))
        if not is_text or self.batch_layout.takes_any_lengths:
            return self._forward(batch, padded_inputs(batch))
        alike = self._alike(batch)
        parts = [batch.select(rows) for rows in alike]
        logits_BV = torch.cat([self._forward(part, padded_inputs(part)) for part in parts])
        order = self._integers([row for rows in alike for row in rows])
        return logits_BV.index_select(0, order.argsort())

    def _alike(self, batch: ForwardBatch) -> list[list[int]]:
        """Return the rows that a model takes together which takes rows of one length alone."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for row, (new, length) in enumerate(zip(batch.num_new, batch.lengths, strict=True)):
            # Without keys there is no history to align: only the new tokens must be of one length.
            key = (new, length if batch.cache.layout.has_keys else new == length)
            is_alone = self.batch_layout is BatchLayout.SINGLE_ROWS
            alike.setdefault((row,) if is_alone else key, []).append(row)
        return list(alike.values())

    def _sides(self, batch: ForwardBatch) -> Sequence[int]:
        return batch.rope_sides or list(map(self.rope.side, batch.lengths))

    def _paged_decode(self, batch: ForwardBatch, backend: AttentionBackend) -> torch.Tensor:
        inputs, sides = backend.prepare(batch), self._sides(batch)
        if backend.traced_forward.count_step():
            self.warm_up()
        with self.rope.by_row(sides):
            # A trace takes one set of factors for all rows: that of the newest positions.
            run = self.decode_traced if min(sides) == max(sides) else self.decode
            logits_BV = run(inputs).float()
        if self.recorder is not None:
            newest_B = self._integers(batch.lengths) - 1
            slots_B = batch.table.slots(self._integers(batch.table_rows), newest_B)
            batch.cache.write_routes(self.recorder.take(), slots_B, None)
        return logits_BV

    def decode_traced(self, inputs: DecodeInputs) -> torch.Tensor:
        """Run one new token of each row, from the trace if there is one; return as `decode`."""
        assert self.attention_backend is not None
        with self.packed_linear.active():
            logits_BV = self.attention_backend.traced_forward.run(inputs)
        return self.decode(inputs) if logits_BV is None else logits_BV

    def decode(self, inputs: DecodeInputs) -> torch.Tensor:
        """Run one new token of each row by the model; return its logits, in its dtype, `[B, V]`."""
        cache, tokens_B1 = inputs.cache, inputs.tokens_B1
        with cache.attending(inputs):
            mask, positions_B1 = cache.mask(tokens_B1), inputs.positions_B1
            return self.forward(tokens_B1, mask, positions_B1, cache)

    def _forward(self, batch: ForwardBatch, inputs: ForwardInputs) -> torch.Tensor:
        """Run a batch's inputs on its cache; `UnsupportedAttentionError`: not in segments."""
        cache, mapping, segments = batch.cache, inputs.mapping, inputs.segments
        positions, arguments = inputs.positions, {}
        if batch.images is not None:
            (stop,), (num_new,) = batch.lengths, batch.num_new
            positions = self.image_inputs.positions(batch.images, stop - num_new, stop)
            arguments = self.image_inputs.arguments(batch.images, stop - num_new, stop)
        if not self.batch_layout.takes_any_lengths:
            positions = None
        cache.begin(mapping)
        if self.recorder is not None:
            is_padded = segments is None
            self.recorder.expect(batch.routes, batch.num_new, self.device, is_padded=is_padded)
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

    @contextmanager
    def _attending(self, segments: Sequence[Segment]) -> Iterator[None]:
        # Longer rows may come than these, and than those of the model check.
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

        `beside` holds other rows, of as many tokens; `images` are those of the prompt that begins
        the tokens; `num_last`: only the logits after so many last tokens.
        """
        input_ids = self._integers([token_ids, *beside])
        arguments = {"attention_mask": torch.ones_like(input_ids), "use_cache": False}
        arguments = self._taken(arguments | {"logits_to_keep": num_last})
        if images is not None:
            arguments |= self.image_inputs.arguments(images, 0, len(token_ids))
        called = self.model if model is None else model
        with multimodal.keeping_position_offsets(called):
            return self._run(input_ids, arguments, model).logits[0][-num_last:].float()

    def padded_logits(self, rows: Sequence[list[int]], starts: Sequence[int]) -> torch.Tensor:
        """Return float32 `[B, S, V]` of rows that begin at `starts`, as a trainer's forward."""
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
        return {name: value for name, value in arguments.items() if name in self._names}

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

        `others`: more arguments. `last_B`: each row's last index, where one row packs all tokens.
        """
        arguments = {
            "attention_mask": mask_BS,
            "position_ids": positions_BQ,
            "use_cache": True,
            "logits_to_keep": 1 if last_B is None else last_B,
        }
        known = self._taken(arguments)
        if self._passes_on and positions_BQ is not None:
            known["position_ids"] = positions_BQ
        known |= others or {}
        states: Any = self.opaque_states
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
        is_all = output.logits.shape[1] == input_ids_BQ.shape[1]
        return output.logits[0].index_select(0, last_B) if is_all else output.logits[0]

    def _replacing_linear(self) -> AbstractContextManager[Any]:
        # A backend rewrites the products of a trace. In a higher dtype the same parameters hold
        # other numbers for a moment.
        if inductor.is_tracing() or self._higher_dtype is not None:
            return nullcontext()
        return self.packed_linear.replacing_linear(self.compute_dtype)

    def _run(
        self,
        input_ids_BQ: torch.Tensor,
        arguments: dict[str, object],
        model: torch.nn.Module | None = None,
    ) -> Any:
        autocast: AbstractContextManager[Any] = nullcontext()
        # A wrapper may have a length, and be empty.
        called: torch.nn.Module = self.model if model is None else model
        if self._autocast_dtype is not None:
            if model is None:
                called = accelerate_compat.below_accelerate(self.model)
            # A cached cast would stay in a captured step when the weights change.
            autocast = torch.autocast(self.device.type, self._autocast_dtype, cache_enabled=False)
        # no_grad, not inference_mode: some models keep buffers that a later training forward uses.
        with torch.no_grad(), autocast:
            arguments = arguments | without_router_logits(self.model)
            return called(input_ids=input_ids_BQ, **arguments)

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return devices.to_device(values, self.device)


def prompt_logprobs(
    runner: ModelRunner, token_ids: list[int], temperature: float, num: int
) -> list[dict[int, tuple[float, int]]]:
    """Return the log-probability and rank, from 1, of tokens in place of each but the first.

    They are the `num` most likely ones and the token itself, by id.
    """
    logits_NV = runner.plain_logits(token_ids)
    logprobs_TV = (logits_NV[:-1] / temperature).log_softmax(-1)
    own_T1 = devices.to_device(token_ids[1:], runner.device)[:, None]
    chosen_T1 = logprobs_TV.gather(1, own_T1)
    ranks_T1 = (logprobs_TV > chosen_T1).sum(-1, keepdim=True) + 1
    top_TK, ids_TK = logprobs_TV.topk(num, -1)
    top_ranks_TK = torch.arange(1, num + 1, device=runner.device).expand_as(ids_TK)
    tensors = ((ids_TK, own_T1), (top_TK, chosen_T1), (top_ranks_TK, ranks_T1))
    rows = zip(*(torch.cat(pair, 1).tolist() for pair in tensors), strict=True)
    return [{token: (value, rank) for token, value, rank in zip(*row, strict=True)} for row in rows]


def recomputed_logprobs(
    runner: ModelRunner, model: torch.nn.Module, request: Request
) -> list[float]:
    """Return log-probabilities by a forward of the (wrapped) training `model` without a cache."""
    num_prompt = len(request.prompt_ids)
    temperature = 1.0 if request.params.is_greedy else request.params.temperature
    replaying = nullcontext()
    if runner.recorder is not None:
        part = (request.routed_experts, 0, request.num_tokens)
        routes_NLK = joined_routes([part], runner.device)
        replaying = runner.recorder.routers.replaying(hf_compat.unwrap(model), routes_NLK)
    with replaying:
        logits_NV = runner.plain_logits(
            request.token_ids, hf_compat.trained_forward(model), images=request.images
        )
    chosen_T = devices.to_device(request.token_ids[num_prompt:], runner.device)
    logits_TV = logits_NV[num_prompt - 1 : -1]
    if request.kept_token_ids:
        kept = request.kept_token_ids[: len(chosen_T)]
        return masked_logprobs(logits_TV, chosen_T, kept, temperature)[0].tolist()
    return chosen_logprobs(logits_TV / temperature, chosen_T).tolist()
