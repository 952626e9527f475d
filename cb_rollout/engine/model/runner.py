"""Run the model's own forward over rows of new tokens: packed, or left-padded.

B: rows, Q: new tokens of the longest row, S: tokens of the longest row, N: new tokens of all rows,
T: tokens of all rows, V: vocabulary.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from cb_rollout.compat import multimodal
from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.moe import without_router_logits
from cb_rollout.compat.rope import RowRope
from cb_rollout.engine.attention.backend import UnsupportedAttentionError
from cb_rollout.engine.attention.cpu import few_row_linear
from cb_rollout.engine.attention.decode_cache import DecodeInputs
from cb_rollout.engine.attention.gathered import BatchedAttention
from cb_rollout.engine.attention.packed import PackedAttention, no_mask
from cb_rollout.engine.attention.selector import select_backend
from cb_rollout.engine.images.encoder_cache import EncoderCache
from cb_rollout.engine.images.inputs import (
    ImageInputs,
    PrefillRow,
    joined_positions,
    joined_tensors,
)
from cb_rollout.engine.images.prompt_images import PromptImages
from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import PADDING_SLOT, PagedCache, SlotMapping
from cb_rollout.engine.kv_cache.recurrent import PROBE_ROWS, OpaqueStateAdapter, RecurrentLayer
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.packed_rows import PackedRows
from cb_rollout.engine.model.probe import PROBE_TOKENS, probe
from cb_rollout.engine.model.routers import RouteRecorder, Routers, find_routers
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.errors import ConfigurationError

if TYPE_CHECKING:
    from cb_rollout.engine.attention.backend import AttentionBackend


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
        """Return whether one forward takes rows of different lengths."""
        return self in (BatchLayout.PACKED, BatchLayout.PADDED)


class ModelRunner:
    """Run forwards of one unwrapped model, as it is and on its own device.

    `autocast_dtype`: run forwards under autocast to this dtype; None: without autocast.
    `is_bitwise`: a row must have the same bits in every batch. `is_split`: other processes compute
    parts of each layer, and run the same forwards.
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
        self.is_bitwise, self.is_split = is_bitwise, is_split
        self._autocast_dtype = autocast_dtype
        self._higher_dtype: torch.dtype | None = None
        self._names = hf_compat.forward_argument_names(model)
        self._passes_on = hf_compat.forward_passes_on(model)
        self.rope = RowRope(model)
        self.image_inputs = ImageInputs(model)
        self.encoder_cache = EncoderCache()
        self.cuts_images: dict[tuple[bool, bool], bool] = {}
        """For each kind of prompts that was checked, whether a forward may begin between images."""
        self.shares_prefill: set[tuple[bool, bool]] = set()
        """Kinds of prompts of which one forward may compute several."""
        self._opaque_states: OpaqueStateAdapter | None = None
        self.backend_selection = select_backend(self.device)
        self.attention_backend: AttentionBackend | None = None
        """Reads pages without a gather in decode steps; None: histories are gathered."""
        self.recorder: RouteRecorder | None = None
        """Records the experts that tokens take; None: they are not recorded."""
        caches = [name for name in hf_compat.CACHE_ARGUMENTS if name in self._names]
        if not caches:
            raise ConfigurationError(
                f"{type(model).__name__}.forward takes no past_key_values, so its past cannot be "
                "kept; roll this model out with model.generate."
            )
        self._cache_argument = caches[0]

    def probe(self) -> CacheLayout:
        """Return the cache layout, learned from one tiny forward."""

        def forward(input_ids: torch.Tensor, cache: Cache) -> object:
            return self.forward(input_ids.to(self.device), None, None, cache)

        self._opaque_states, self.rope = None, RowRope(self.model)
        with eval_mode(self.model):
            return probe(self.model.config, forward)

    def record_routes(self) -> Routers:
        """Record what the model's routers choose, from now on.

        Raises:
            ConfigurationError: the model has none that could be replayed.
        """

        def forward(input_ids: torch.Tensor) -> torch.Tensor:
            return self._run(input_ids, {"use_cache": False}).logits

        with eval_mode(self.model):
            self.recorder = RouteRecorder(find_routers(self.model, forward))
        return self.recorder.routers

    def is_sound(self) -> bool:
        """Return whether the model still runs a tiny forward without a cache."""
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
        self._opaque_states = OpaqueStateAdapter(short, long)
        return self._opaque_states.layout

    def check_weights(self) -> None:
        """Drop what the attention backend derived from weights that have moved since."""
        if self.attention_backend is not None:
            self.attention_backend.check_weights(self.model)

    def warm_up(self) -> None:
        """Make the trace of decode forwards now, where the attention backend has one."""
        backend = self.attention_backend
        if backend is not None and (traced := backend.traced_forward) is not None:
            traced.warm_up(
                self.decode,
                backend.cache,
                hf_compat.text_token_ids(self.model),
                self.compute_dtype,
                self.computing_in,
            )

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
        """Return the dtype that forwards compute in."""
        own = self._autocast_dtype or torch_compat.compute_dtype(self.model)
        return self._higher_dtype or own

    @property
    def rounding_dtype(self) -> torch.dtype:
        """Return the dtype that forwards round to: of TF32, one with as many digits."""
        is_tf32 = self.computes_coarsely and self.compute_dtype == torch.float32
        return torch.float16 if is_tf32 else self.compute_dtype

    @property
    def computes_coarsely(self) -> bool:
        """Return whether forwards round to fewer bits than float32 has."""
        is_half = self.compute_dtype.itemsize < torch.float32.itemsize
        is_exact = self._higher_dtype is not None
        return is_half or (torch_compat.rounds_float32_products(self.device) and not is_exact)

    def logits(
        self,
        new_tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        table_rows: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
        position_offsets: Sequence[int] | None = None,
        routes: Sequence[Any] | None = None,
        rope_sides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the rows' new tokens, which are text, through the model.

        Args:
            new_tokens: each row's tokens that are not in the cache yet, at least one.
            lengths: number of each row's tokens, the new ones included.
            table_rows: each row's table row.
            cache: keys, values and states, which are read and written.
            table: the blocks of each table row.
            position_offsets: each row's `Request.position_offset`; None: 0 for all.
            routes: experts that each row's new tokens took before, and take again: arrays of
                `[tokens, L, K]` of the first of them, or None; None: there are none.
            rope_sides: `RowRope.side` of each sequence's whole length; None: of `lengths`.

        Returns:
            float32 logits after each row's last token, `[B, V]`.
        """
        sides = rope_sides or list(map(self.rope.side, lengths))
        is_decode = max(map(len, new_tokens)) == 1 < min(lengths)
        if self.attention_backend is not None and is_decode:
            given = (new_tokens, lengths, table_rows, cache, table, position_offsets)
            inputs = self.attention_backend.prepare(*given)
            if (traced := self.attention_backend.traced_forward) is not None and traced.is_due():
                self.warm_up()
            with self.rope.by_row(sides):
                # A trace takes one set of factors for all rows: that of the newest positions.
                run = self.decode_traced if min(sides) == max(sides) else self.decode
                logits_BV = run(inputs).float()
            if self.recorder is not None:
                newest_B = self._integers(lengths) - 1
                self._keep_routes(cache, table.slots(self._integers(table_rows), newest_B))
            return logits_BV
        if self.batch_layout is BatchLayout.PACKED and not is_decode:
            rows = PackedRows.of(new_tokens, lengths, table_rows, table, position_offsets)
            num_new = list(map(len, new_tokens))
            if self.recorder is not None:
                self.recorder.expect(routes, num_new, self.device, is_padded=False)
            with self.rope.by_row(sides, num_new):
                return self._packed_forward(rows, cache)
        if self.batch_layout.takes_any_lengths:
            given = (new_tokens, lengths, table_rows, cache, table, position_offsets, routes)
            with self.rope.by_row(sides):
                return self._forward(*given)
        # Without keys there is no history to align: only the new tokens must be of one length.
        has_keys = cache.layout.has_keys
        batches: dict[tuple[int, ...], list[int]] = {}
        for row, (new, length) in enumerate(zip(new_tokens, lengths, strict=True)):
            key = (len(new), length) if has_keys else (len(new), len(new) == length)
            if self.batch_layout is BatchLayout.SINGLE_ROWS:
                key = (row,)
            batches.setdefault(key, []).append(row)
        parts = []
        for rows in batches.values():
            with self.rope.by_row([sides[row] for row in rows]):
                given = (
                    [new_tokens[row] for row in rows],
                    [lengths[row] for row in rows],
                    [table_rows[row] for row in rows],
                    cache,
                    table,
                    position_offsets and [position_offsets[row] for row in rows],
                    routes and [routes[row] for row in rows],
                )
                parts.append(self._forward(*given))
        order = self._integers([row for rows in batches.values() for row in rows])
        return torch.cat(parts).index_select(0, order.argsort())

    def decode_traced(self, inputs: DecodeInputs) -> torch.Tensor:
        """Run one new token of each row, from the trace if there is one; return as `decode`."""
        assert self.attention_backend is not None
        traced = self.attention_backend.traced_forward
        logits_BV = None if traced is None else traced.run(inputs)
        return self.decode(inputs) if logits_BV is None else logits_BV

    def decode(self, inputs: DecodeInputs) -> torch.Tensor:
        """Run one new token of each row by the model; return its logits, in its dtype, `[B, V]`."""
        cache, tokens_B1 = inputs.cache, inputs.tokens_B1
        with cache.attending(inputs):
            mask, positions_B1 = cache.mask(tokens_B1), inputs.positions_B1
            return self.forward(tokens_B1, mask, positions_B1, cache)

    def _packed_forward(
        self,
        rows: PackedRows,
        cache: PagedCache,
        others: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run all rows' new tokens as one row, each attending to its own keys.

        `others`: further arguments of the forward.

        Raises:
            UnsupportedAttentionError: the model's attention cannot be computed in segments.
        """
        cache.begin(rows.mapping, rows.is_fresh)
        # Longer rows may come than these, and than those of the model check.
        attend = PackedAttention(rows.segments, self.device, max_length=sys.maxsize)
        try:
            with hf_compat.replacing_attention(attend):
                logits_BV = self.forward(
                    rows.input_ids_1N,
                    no_mask(self.device),
                    rows.positions_1N,
                    cache,
                    others,
                    last_B=rows.last_B,
                )
        except ConfigurationError as error:
            raise UnsupportedAttentionError(str(error)) from error
        cache.end(rows.mapping)
        if not attend.num_calls:
            raise UnsupportedAttentionError("its attention cannot be replaced")
        self._keep_routes(cache, rows.mapping.write_slots)
        return logits_BV.float()

    def _keep_routes(
        self, cache: PagedCache, slots: torch.Tensor, write_tokens: torch.Tensor | None = None
    ) -> None:
        """Write what the last forward's routers chose beside the keys of its tokens."""
        if self.recorder is not None:
            cache.write_routes(self.recorder.take(), slots, write_tokens)

    def _forward(
        self,
        new_tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        table_rows: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
        position_offsets: Sequence[int] | None = None,
        routes: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        num_new = [len(row) for row in new_tokens]
        Q, B = max(num_new), len(new_tokens)
        is_fresh = all(length == new for length, new in zip(lengths, num_new, strict=True))
        S = Q if is_fresh else max(lengths)
        is_padded = min(num_new) < Q
        padded = (
            [[0] * (Q - len(row)) + list(row) for row in new_tokens] if is_padded else new_tokens
        )
        input_ids_BQ = self._integers(padded)
        lengths_B, table_rows_B = self._integers(lengths), self._integers(table_rows)
        positions_BS = lengths_B[:, None] - S + torch.arange(S, device=self.device)
        is_token_BS = positions_BS >= 0
        positions_BS = positions_BS.clamp(min=0)
        positions_BQ = positions_BS[:, S - Q :]
        slots_BQ = table.slots(table_rows_B, positions_BQ).view(-1)
        if position_offsets is not None:
            offsets_B1 = self._integers(position_offsets)[:, None]
            positions_BQ = (positions_BQ + offsets_B1).clamp(min=0)
        write_tokens = None
        if is_padded:
            is_new_BQ = (
                torch.arange(Q, 0, -1, device=self.device) <= self._integers(num_new)[:, None]
            )
            write_tokens = is_new_BQ.view(-1).nonzero()[:, 0]
            slots_BQ = slots_BQ[write_tokens]
        read_slots_BS = None
        if not is_fresh:
            read_slots_BS = table.slots(table_rows_B, positions_BS)
            read_slots_BS = read_slots_BS.masked_fill(~is_token_BS, PADDING_SLOT)
        mapping = SlotMapping(
            S - Q, table_rows_B, write_tokens, slots_BQ, read_slots_BS, positions_BS
        )
        cache.begin(mapping, is_fresh)
        mask_BS = is_token_BS.to(torch.int64)
        if not cache.layout.has_keys:
            mask_BS = mask_BS[:, S - Q :]
        if not self.batch_layout.takes_any_lengths:
            positions_BQ = None
        if self.recorder is not None:
            self.recorder.expect(routes, num_new, self.device, is_padded=True)
        is_batched = Q == 1 and self.device.type == "cpu"
        with hf_compat.replacing_attention(BatchedAttention()) if is_batched else nullcontext():
            logits_BV = self.forward(input_ids_BQ, mask_BS, positions_BQ, cache)
        cache.end(mapping)
        self._keep_routes(cache, slots_BQ, write_tokens)
        assert logits_BV.shape[0] == B
        return logits_BV.float()

    def prefill_images(
        self, rows: Sequence[PrefillRow], cache: PagedCache, table: BlockTable
    ) -> torch.Tensor:
        """Run new tokens of sequences, those of images among them.

        Args:
            rows: the sequences; one alone, or several whose images have one `prefill_key`. Sets the
                `position_offset` of their images.
            cache: keys, values and states, which are read and written.
            table: the blocks of each table row.

        Returns:
            float32 logits after the last token of each row, `[B, V]`.
        """
        prompts, given = [], []
        for row in rows:
            arguments: dict[str, torch.Tensor] = {}
            if row.new_images is not None:
                prompts.append(self.image_inputs.on_device(row.new_images, row.start))
                arguments = prompts[-1].arguments(row.start, row.stop)
            given.append(arguments)
        images = [image for prompt in prompts for image in prompt.images]
        positions = [self.image_inputs.new_positions(row) for row in rows]
        if len(rows) == 1:
            serving = self.encoder_cache.serving(self.model, images, given[0])
            return self._prefill_alone(rows[0], positions[0], given[0], serving, cache, table)
        lengths, table_rows = [row.stop for row in rows], [row.table_row for row in rows]
        new_tokens, num_new = [row.new_tokens for row in rows], [row.num_new for row in rows]
        packed = PackedRows.of(new_tokens, lengths, table_rows, table, None)
        packed = replace(packed, positions_1N=joined_positions(positions))
        per_token = frozenset().union(*(prompt.of_tokens for prompt in prompts))
        arguments = joined_tensors(given, num_new, per_token, dim=1)
        if self.recorder is not None:
            routes = [row.routes for row in rows]
            self.recorder.expect(routes, num_new, self.device, is_padded=False)
        sides = [self.rope.side(len(row.token_ids)) for row in rows]
        with (
            self.encoder_cache.serving(self.model, images, arguments),
            self.rope.by_row(sides, num_new),
        ):
            return self._packed_forward(packed, cache, arguments)

    def _prefill_alone(
        self,
        row: PrefillRow,
        positions: torch.Tensor,
        arguments: dict[str, torch.Tensor],
        serving: AbstractContextManager[None],
        cache: PagedCache,
        table: BlockTable,
    ) -> torch.Tensor:
        """Run one row of `prefill_images`, with a mask, in any batch layout."""
        start = row.start
        positions_1S = torch.arange(row.stop, device=self.device)[None]
        rows_1 = self._integers([row.table_row])
        slots_1S = table.slots(rows_1, positions_1S)
        mapping = SlotMapping(
            start,
            rows_1,
            None,
            slots_1S[:, start:].reshape(-1),
            slots_1S if start else None,
            positions_1S,
        )
        cache.begin(mapping, is_fresh=not start)
        given = positions if self.batch_layout.takes_any_lengths else None
        input_ids_1Q = self._integers([row.new_tokens])
        if self.recorder is not None:
            self.recorder.expect([row.routes], [row.num_new], self.device, is_padded=False)
        with serving, self.rope.by_row([self.rope.side(len(row.token_ids))]):
            logits_1V = self.forward(
                input_ids_1Q, torch.ones_like(positions_1S), given, cache, arguments
            )
        cache.end(mapping)
        self._keep_routes(cache, mapping.write_slots)
        return logits_1V.float()

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
            token_ids: the tokens.
            model: the model to run; None: the one that generates.
            beside: other rows of the same forward, each of as many tokens.
            images: images of the prompt that the tokens begin with; None: it has none.
            num_last: return only the logits after so many last tokens; 0: all.
        """
        input_ids = self._integers([token_ids, *beside])
        arguments = {
            "attention_mask": torch.ones_like(input_ids),
            "use_cache": False,
            "logits_to_keep": num_last,
        }
        known = {name: value for name, value in arguments.items() if name in self._names}
        if images is not None:
            known |= self.image_inputs.arguments(images, 0, len(token_ids))
        with multimodal.keeping_position_offsets(model or self.model):
            return self._run(input_ids, known, model).logits[0][-num_last:].float()

    def padded_logits(self, rows: Sequence[list[int]], starts: Sequence[int]) -> torch.Tensor:
        """Return float32 logits, `[B, S, V]`, of rows that start at these columns.

        By a forward without a cache, with a mask and without positions, as a trainer's.
        """
        S = max(start + len(row) for row, start in zip(rows, starts, strict=True))
        padded, mask = [], []
        for row, start in zip(rows, starts, strict=True):
            after = S - start - len(row)
            padded.append([0] * start + row + [0] * after)
            mask.append([0] * start + [1] * len(row) + [0] * after)
        arguments = {"attention_mask": self._integers(mask), "use_cache": False}
        known = {name: value for name, value in arguments.items() if name in self._names}
        return self._run(self._integers(padded), known).logits.float()

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

        `others`: further arguments of the forward. `last_B`: index of each row's last token, where
        the input is one row of packed tokens.
        """
        recorder = self.recorder
        recording = nullcontext() if recorder is None else recorder.recording(self.model)
        with few_row_linear.replacing_linear(self.compute_dtype, self.device), recording:
            return self._last_logits(
                input_ids_BQ, mask_BS, positions_BQ, cache, others or {}, last_B
            )

    def _last_logits(
        self,
        input_ids_BQ: torch.Tensor,
        mask_BS: torch.Tensor | None,
        positions_BQ: torch.Tensor | None,
        cache: Cache,
        others: Mapping[str, torch.Tensor],
        last_B: torch.Tensor | None,
    ) -> torch.Tensor:
        arguments = {
            "attention_mask": mask_BS,
            "position_ids": positions_BQ,
            "use_cache": True,
            "logits_to_keep": 1 if last_B is None else last_B,
        }
        known = {name: value for name, value in arguments.items() if name in self._names}
        if self._passes_on and positions_BQ is not None:
            known["position_ids"] = positions_BQ
        known |= others
        if self._opaque_states is None:
            known[self._cache_argument] = cache
            logits = self._run(input_ids_BQ, known).logits
            if last_B is None:
                return logits[:, -1]
            is_all = logits.shape[1] == input_ids_BQ.shape[1]
            return logits[0].index_select(0, last_B) if is_all else logits[0]
        layer = cache.layers[0]
        assert isinstance(layer, RecurrentLayer)
        known[self._cache_argument] = self._opaque_states.inserted(layer)
        output = self._run(input_ids_BQ, known)
        returned = getattr(output, self._cache_argument)
        self._opaque_states.extract(layer, returned, num_rows=input_ids_BQ.shape[0])
        return output.logits[:, -1]

    def _run(
        self,
        input_ids_BQ: torch.Tensor,
        arguments: dict[str, object],
        model: torch.nn.Module | None = None,
    ) -> Any:
        dtype = self._autocast_dtype
        autocast = nullcontext()
        if dtype is not None:
            # A cached cast would stay in a captured step when the weights change.
            autocast = torch.autocast(self.device.type, dtype, cache_enabled=False)
        # no_grad, not inference_mode: some models keep buffers that a later training forward uses.
        with torch.no_grad(), autocast:
            arguments = arguments | without_router_logits(self.model)
            return (model or self.model)(input_ids=input_ids_BQ, **arguments)

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return devices.to_device(values, self.device)
