"""States rounded to float8, as the bytes that pages of `kv_dtype="float8_e4m3fn"` hold.

The paged KV cache: a transformers `Cache` whose layers keep their states in blocks and table rows.

`update()` writes the new keys and values into their blocks and hands back each row's whole history,
gathered and right-aligned: a row's newest token is always last, exactly as in a left-padded
`generate` batch. So the model runs its own forward, masks and attention, untouched.

B: rows, Q: new tokens of the longest row, S: tokens of the longest row, H: heads, D: size of a
head, N: token slots in all blocks, F: H x D, M: blocks or table rows that are copied.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerStates, StateShape
from cb_rollout.engine.kv_cache.recurrent import StateLayer
from cb_rollout.engine.memory import device as devices

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


def page_dtype(dtype: torch.dtype) -> torch.dtype:
    """What pages are made of: bytes for float8, which few operators take."""
    return torch.uint8 if dtype == FLOAT8 else dtype


def packed(states: torch.Tensor) -> torch.Tensor:
    """The bytes of states rounded to float8."""
    # A conversion makes NaN of what is too large.
    return states.clamp(-LARGEST, LARGEST).to(FLOAT8).view(torch.uint8)


def unpacked(packed_states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a model reads of packed states."""
    return packed_states.view(FLOAT8).to(dtype)


def in_float8(layout: CacheLayout) -> CacheLayout:
    """The layout with keys and values in float8; states, and what ranks tokens, stay as is."""
    return CacheLayout(tuple(_layer_in_float8(layer) for layer in layout.layers))


def _layer_in_float8(layer: LayerStates) -> LayerStates:
    keys, values = (_shape_in_float8(shape) for shape in (layer.keys, layer.values))
    return replace(layer, keys=keys, values=values)


def _shape_in_float8(shape: StateShape | None) -> StateShape | None:
    return None if shape is None else StateShape(shape.shape, FLOAT8)


PADDING_SLOT = 0
# The first place of the null block: finite keys for the columns that every mask hides.


@dataclass(slots=True)
class Step:
    """Where one forward's tokens go, and what each row reads back."""

    num_cached: int
    """Columns before the new tokens: S - Q."""
    table_rows_B: torch.Tensor
    """int64; where each row's recurrent states are."""
    write_tokens: torch.Tensor | None
    """int64; which of the B x Q new tokens are real; None: all of them."""
    write_slots: torch.Tensor
    """int64; where in the pages each real new token goes."""
    read_slots_BS: torch.Tensor | None
    """int64; where each row's history lies, padding read from the null block. None: no row has
    any history, so the new keys are all there is."""
    positions_BS: torch.Tensor
    """int64; each column's place in its sequence, 0 in the padding."""
    _head_slots: dict[int, torch.Tensor] = field(default_factory=dict)

    def head_slots(self, num_heads: int) -> torch.Tensor:
        """Where each row's and head's history lies in pages of single heads, `[B x H x S]`.

        Made once for all the layers with so many heads.
        """
        assert self.read_slots_BS is not None
        if num_heads not in self._head_slots:
            heads_H1 = torch.arange(num_heads, device=self.read_slots_BS.device)[:, None]
            slots_BHS = self.read_slots_BS[:, None] * num_heads + heads_H1
            self._head_slots[num_heads] = slots_BHS.view(-1)
        return self._head_slots[num_heads]


class PagedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, in pages."""

    is_sliding = False
    # Every layer reads the whole history; the model's own mask narrows the window.

    def __init__(self, states: LayerStates, num_slots: int, device: torch.device) -> None:
        """Allocate pages for `num_slots` tokens."""
        super().__init__()
        self.is_initialized = True
        # Some models look at these before their own update, to see whether anything is there.
        self.keys = self.values = torch.empty(0, device=device)
        self.pages = [_pages(shape, num_slots, device) for shape in states.per_token]
        self.step: Step | None = None
        self.num_index_positions = states.num_index_positions
        self.indexer_position_ids: torch.Tensor | None = None

    def begin(self, step: Step) -> None:
        """Aim at the coming forward's tokens."""
        self.step = step
        self.indexer_position_ids = None
        if self.num_index_positions and step.num_cached:
            cached = step.positions_BS[:, : step.num_cached]
            self.indexer_position_ids = cached.expand(self.num_index_positions, -1, -1)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[B, H, Q, D]` new states; return `[B, H, S, D]` of each row, right-aligned."""
        keys_NF, values_NF = self.pages[:2]
        return self._exchanged(keys_NF, key_states), self._exchanged(values_NF, value_states)

    def update_index(self, states: torch.Tensor) -> torch.Tensor:
        """As `update`, for what a sparse attention ranks its tokens by."""
        return self._exchanged(self.pages[2], states)

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """As `update_index`, for `[B, Q, D]` without heads."""
        return self.update_index(states[:, None])[:, 0]

    def _exchanged(self, pages_NF: torch.Tensor, new_BHQD: torch.Tensor) -> torch.Tensor:
        """The rows' whole history, after the new states were written."""
        self._write(pages_NF, new_BHQD)
        if self._step.read_slots_BS is None:
            return new_BHQD
        return self._read(pages_NF, new_BHQD)

    @property
    def _step(self) -> Step:
        assert self.step is not None, "the cache was used outside a step"
        return self.step

    def _write(self, pages_NF: torch.Tensor, states_BHQD: torch.Tensor) -> None:
        tokens_TF = states_BHQD.transpose(1, 2).reshape(-1, pages_NF.shape[1])
        if self._step.write_tokens is not None:
            tokens_TF = tokens_TF.index_select(0, self._step.write_tokens)
        if pages_NF.dtype == torch.uint8:
            tokens_TF = packed(tokens_TF)
        pages_NF.index_copy_(0, self._step.write_slots, tokens_TF)

    def _read(self, pages_NF: torch.Tensor, states_BHQD: torch.Tensor) -> torch.Tensor:
        """`[B, H, S, D]`, in the memory layout that transformers' own cache has."""
        slots_BS = self._step.read_slots_BS
        assert slots_BS is not None
        B, S = slots_BS.shape
        H, D = states_BHQD.shape[1], states_BHQD.shape[3]
        history = pages_NF.view(-1, D).index_select(0, self._step.head_slots(H))
        if history.dtype == torch.uint8:
            history = unpacked(history, states_BHQD.dtype)
        return history.view(B, H, S, D)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self._step.num_cached + query_length, 0

    def get_seq_length(self) -> int:
        """Columns before the new tokens."""
        return self._step.num_cached

    def get_max_length(self) -> int:
        """No limit of its own (-1)."""
        return -1


class PagedStateLayer(StateLayer, PagedLayer):
    """A layer with both attention and recurrence."""

    def __init__(
        self, states: LayerStates, num_slots: int, num_table_rows: int, device: torch.device
    ) -> None:
        """Allocate both."""
        PagedLayer.__init__(self, states, num_slots, device)
        StateLayer.__init__(self, states, num_table_rows, device)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Only the states start lazily; the pages exist."""
        if kwargs:
            StateLayer.lazy_initialization(self, **kwargs)


class PagedCache(Cache):
    """Every layer's pages and table rows, behind the interface that a model's forward knows."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        block_size: int,
        num_table_rows: int,
        device: torch.device,
    ) -> None:
        """Allocate the storage for `num_blocks` blocks beside the null block."""
        self.layout, self._num_table_rows, self._device = layout, num_table_rows, device
        self.block_size = block_size
        num_slots = (num_blocks + 1) * block_size
        super().__init__(layers=[self._layer(states, num_slots) for states in layout.layers])
        self._step: Step | None = None
        self._paged = [layer for layer in self.layers if isinstance(layer, PagedLayer)]
        self.stateful = {
            index: layer for index, layer in enumerate(self.layers) if isinstance(layer, StateLayer)
        }
        """The layers with recurrent states, by their number."""

    def _layer(self, states: LayerStates, num_slots: int) -> Any:
        if states.keys and states.is_recurrent:
            return PagedStateLayer(states, num_slots, self._num_table_rows, self._device)
        if states.keys:
            return PagedLayer(states, num_slots, self._device)
        if states.is_recurrent:
            return StateLayer(states, self._num_table_rows, self._device)
        nothing = hf_compat.DummyLayer()
        # A layer that reads what an encoder left looks there first; text alone leaves nothing.
        nothing.is_initialized = False
        return nothing

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the new tokens, whichever layer is asked, recurrent ones included."""
        assert self._step is not None, "the cache was used outside a step"
        return self._step.num_cached

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover, whichever layer is asked."""
        return self.get_seq_length() + query_length, 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All pages and table rows."""
        pages = [pages for layer in self._paged for pages in layer.pages]
        table_rows = [
            states
            for layer in self.stateful.values()
            for all_states in layer.states.values()
            for states in all_states
            if states is not None
        ]
        return [*pages, *table_rows]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages and table rows."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def begin(self, step: Step, is_fresh: bool) -> None:
        """Aim every layer at the coming forward.

        Args:
            step: where its tokens go.
            is_fresh: its rows have no history.
        """
        self._step = step
        for layer in self._paged:
            layer.begin(step)
        for layer in self.stateful.values():
            layer.load(None if is_fresh else step.table_rows_B)

    def end(self, step: Step) -> None:
        """Keep what the forward left in the recurrent layers."""
        for layer in self.stateful.values():
            layer.save(step.table_rows_B)

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks, in every layer."""
        if not sources:
            return
        from_M, to_M = devices.to_device([sources, targets], self._device)
        for layer in self._paged:
            for pages_NF in layer.pages:
                blocks = pages_NF.view(-1, self.block_size, pages_NF.shape[1])
                blocks.index_copy_(0, to_M, blocks.index_select(0, from_M))

    def copy_states(self, sources: list[int], targets: list[int]) -> None:
        """Copy recurrent states from table row to table row, in every layer."""
        if not sources:
            return
        from_M, to_M = devices.to_device([sources, targets], self._device)
        for layer in self.stateful.values():
            for all_states in layer.states.values():
                for states in all_states:
                    if states is not None:
                        states.index_copy_(0, to_M, states.index_select(0, from_M))

    def grow(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks, keeping every block's contents and number."""
        num_slots = (num_blocks + 1) * self.block_size
        for layer in self._paged:
            for index, old_NF in enumerate(layer.pages):
                if old_NF.shape[0] >= num_slots:  # an attempt at more gave up halfway
                    continue
                new_NF = old_NF.new_empty(num_slots, old_NF.shape[1])
                new_NF[: old_NF.shape[0]] = old_NF
                layer.pages[index] = new_NF


def _pages(shape: StateShape, num_slots: int, device: torch.device) -> torch.Tensor:
    """Uninitialised pages, apart from what padding reads: all else is written before it is read."""
    heads, size = shape.shape
    dtype = page_dtype(shape.dtype)
    pages_NF = torch.empty(num_slots, heads * size, dtype=dtype, device=device)
    pages_NF[PADDING_SLOT].zero_()
    return pages_NF
