"""Store keys, values and states in pages, behind transformers' own `Cache` interface.

`update()` writes new keys and values into their slots and returns each row's whole history,
right-aligned as in a left-padded `generate` batch, so the model runs its own forward, masks and
attention. In a packed forward, all rows are concatenated into one, without padding.

B: rows, Q: new tokens of the longest row, S: tokens of the longest row, T: tokens of all rows, H:
heads, D: size of a head, N: slots of all blocks, F: H x D, M: blocks or table rows that are copied.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.kv_cache.block_pool import NULL_BLOCK
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.engine.kv_cache.recurrent import RecurrentLayer
from cb_rollout.engine.memory import device as devices

# The first slot of the null block: finite keys for the columns that every mask hides.
PADDING_SLOT = 0


class BlockTable:
    """The blocks of each running sequence, as one tensor that a forward indexes by table row."""

    def __init__(self, num_table_rows: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.blocks = torch.full((num_table_rows, 8), NULL_BLOCK, dtype=torch.int64, device=device)
        """int64 `[table rows, blocks of the longest sequence]`; widening reallocates it."""

    def write(self, entries: list[tuple[int, int, int]]) -> None:
        """Set entries, each (table row, index within the sequence, block)."""
        if not entries:
            return
        table_rows, indices, blocks = devices.to_device(entries, self.blocks.device).unbind(1)
        while max(index for _, index, _ in entries) >= self.blocks.shape[1]:
            self.blocks = torch.cat([self.blocks, torch.zeros_like(self.blocks)], 1)
        self.blocks[table_rows, indices] = blocks

    def slots(self, table_rows_B: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots, in the pages, of each row's token positions, `[B]` or `[B, S]`."""
        rows = table_rows_B
        if positions.dim() == 2:
            rows = table_rows_B[:, None]
        blocks = self.blocks[rows, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size


@dataclass(slots=True)
class SlotMapping:
    """The slots that a forward writes, and those that each row reads."""

    num_cached: int
    """Columns before the new tokens: S - Q; in a packed forward, cached tokens of all rows."""
    table_rows_B: torch.Tensor
    """int64; each row's table row, which holds its recurrent states."""
    write_tokens: torch.Tensor | None
    """int64; indices of the real tokens among the B x Q new ones; None: there is no padding."""
    write_slots: torch.Tensor
    """int64; the slot of each real new token."""
    read_slots_BS: torch.Tensor | None
    """int64; the slots of each row's history, `PADDING_SLOT` in the padding; in a packed forward
    `[1, T]`. None: no row has a history, so the new keys are all that is read."""
    positions_BS: torch.Tensor
    """int64; each column's position in its sequence, 0 in the padding."""
    is_packed: bool = False
    """True if all rows are concatenated into one row of the model's input."""
    _head_slots: dict[int, torch.Tensor] = field(default_factory=dict)

    def head_slots(self, num_heads: int) -> torch.Tensor:
        """Return `read_slots_BS` for pages viewed as single heads, `[B x H x S]`; cached."""
        assert self.read_slots_BS is not None
        if num_heads not in self._head_slots:
            heads_H1 = torch.arange(num_heads, device=self.read_slots_BS.device)[:, None]
            slots_BHS = self.read_slots_BS[:, None] * num_heads + heads_H1
            self._head_slots[num_heads] = slots_BHS.view(-1)
        return self._head_slots[num_heads]


class PagedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, in pages."""

    # Every layer reads the whole history; the model's own mask narrows the window.
    is_sliding = False

    def __init__(self, states: LayerSpec, num_slots: int, device: torch.device) -> None:
        super().__init__()
        self.is_initialized = True
        # Some models read these before their own update, to see whether the layer is empty.
        nothing = torch.empty(0, device=device)
        self.keys = nothing
        self.values = nothing
        self.pages = [_pages(shape, num_slots, device) for shape in states.per_token]
        self.mapping: SlotMapping | None = None
        self.num_index_positions = states.num_index_positions
        self.indexer_position_ids: torch.Tensor | None = None

    def begin(self, mapping: SlotMapping) -> None:
        self.mapping = mapping
        self.indexer_position_ids = None
        if self.num_index_positions and mapping.num_cached:
            cached = mapping.positions_BS[:, : mapping.num_cached]
            self.indexer_position_ids = cached.expand(self.num_index_positions, -1, -1)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pages exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[B, H, Q, D]` states; return histories `[B, H, S, D]`, packed `[1, H, T, D]`."""
        keys_NF, values_NF = self.pages[:2]
        keys = self._write_and_read(keys_NF, key_states)
        return keys, self._write_and_read(values_NF, value_states)

    def update_index(self, states: torch.Tensor) -> torch.Tensor:
        return self._write_and_read(self.pages[2], states)

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        return self.update_index(states[:, None])[:, 0]

    def _write_and_read(self, pages_NF: torch.Tensor, new_BHQD: torch.Tensor) -> torch.Tensor:
        mapping = self._current
        tokens_TF = new_BHQD.transpose(1, 2).reshape(-1, pages_NF.shape[1])
        if mapping.write_tokens is not None:
            tokens_TF = tokens_TF.index_select(0, mapping.write_tokens)
        # Under autocast, pages hold keys and values in the dtype that attention casts them to.
        pages_NF.index_copy_(0, mapping.write_slots, tokens_TF.to(pages_NF.dtype))
        if mapping.read_slots_BS is None:
            return new_BHQD
        B, S = mapping.read_slots_BS.shape
        _, H, _, D = new_BHQD.shape
        if mapping.is_packed:
            # Packed attention reads token by token.
            slots_S = mapping.read_slots_BS.view(-1)
            return pages_NF.index_select(0, slots_S).view(1, S, H, D).transpose(1, 2)
        # Gathered head by head, the history lies in memory as in transformers' own cache.
        return pages_NF.view(-1, D).index_select(0, mapping.head_slots(H)).view(B, H, S, D)

    @property
    def _current(self) -> SlotMapping:
        assert self.mapping is not None, "the cache was used outside a step"
        return self.mapping

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._current.num_cached + query_length, 0

    def get_seq_length(self) -> int:
        return self._current.num_cached

    def get_max_length(self) -> int:
        return -1


class PagedRecurrentLayer(RecurrentLayer, PagedLayer):
    """A layer with both pages and recurrent states."""

    def __init__(
        self, states: LayerSpec, num_slots: int, num_table_rows: int, device: torch.device
    ) -> None:
        PagedLayer.__init__(self, states, num_slots, device)
        RecurrentLayer.__init__(self, states, num_table_rows, device)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialise the states; the pages exist."""
        if kwargs:
            RecurrentLayer.lazy_initialization(self, **kwargs)


class PagedCache(Cache):
    """The pages and recurrent states of every layer, as a transformers `Cache`."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        block_size: int,
        num_table_rows: int,
        device: torch.device,
    ) -> None:
        """Allocate the pages and states.

        Args:
            layout: what each layer stores.
            num_blocks: number of blocks, without the null block.
            block_size: tokens of a block.
            num_table_rows: maximum sequences that run together; each has recurrent states.
            device: device of the tensors.
        """
        self.layout = layout
        self._num_table_rows = num_table_rows
        self._device = device
        self.block_size = block_size
        num_slots = (num_blocks + 1) * block_size
        super().__init__(layers=[self._layer(states, num_slots) for states in layout.layers])
        self._mapping: SlotMapping | None = None
        self._addresses: list[int] | None = None
        self.routes: list[torch.Tensor] = []
        """Pages of the experts that tokens took, one tensor; empty: they are not recorded."""
        if layout.routes is not None:
            self.routes = [_pages(layout.routes, num_slots, device)]
        self._paged = [layer for layer in self.layers if isinstance(layer, PagedLayer)]
        self.stateful: dict[int, RecurrentLayer] = {}
        """The layers with recurrent states, by their index."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentLayer):
                self.stateful[index] = layer

    def _layer(self, states: LayerSpec, num_slots: int) -> Any:
        if states.keys and states.is_recurrent:
            return PagedRecurrentLayer(states, num_slots, self._num_table_rows, self._device)
        if states.keys:
            return PagedLayer(states, num_slots, self._device)
        if states.is_recurrent:
            return RecurrentLayer(states, self._num_table_rows, self._device)
        nothing = hf_compat.DummyLayer()
        # If this is True, cross-attention reads the keys of an encoder; text alone has none.
        nothing.is_initialized = False
        return nothing

    def get_seq_length(self, layer_idx: int = 0) -> int:
        assert self._mapping is not None, "the cache was used outside a step"
        return self._mapping.num_cached

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    @property
    def addresses(self) -> list[int]:
        """Return the addresses of each layer's keys and values (0: none), then of all states."""
        if self._addresses is not None:
            return self._addresses
        addresses: list[int] = []
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                addresses += (pages_NF.data_ptr() for pages_NF in layer.pages[:2])
            else:
                addresses += [0, 0]
        addresses += (states.data_ptr() for states in self.states)
        self._addresses = addresses
        return addresses

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.pages, *self.states]

    @property
    def pages(self) -> list[torch.Tensor]:
        """Return all pages, `[N, F]`: keys, values and indices of each layer, then routes."""
        return list(chain(*self._page_lists))

    @property
    def states(self) -> list[torch.Tensor]:
        """Return the recurrent states of all layers, with a table row for each sequence."""
        states: list[torch.Tensor] = []
        for layer in self.stateful.values():
            states += layer.tensors
        return states

    @property
    def _page_lists(self) -> list[list[torch.Tensor]]:
        return [*(layer.pages for layer in self._paged), self.routes]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def begin(self, mapping: SlotMapping) -> None:
        """Prepare the layers for a forward that writes and reads these slots."""
        self._mapping = mapping
        for layer in self._paged:
            layer.begin(mapping)
        has_history = mapping.read_slots_BS is not None
        for layer in self.stateful.values():
            layer.load(mapping.table_rows_B if has_history else None)

    def end(self, mapping: SlotMapping) -> None:
        for layer in self.stateful.values():
            layer.save(mapping.table_rows_B)

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            blocks = [p.view(-1, self.block_size, p.shape[1]) for p in self.pages]
            self._copy(blocks, sources, targets)

    def copy_states(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            self._copy(self.states, sources, targets)

    def _copy(self, tensors: list[torch.Tensor], sources: list[int], targets: list[int]) -> None:
        from_M, to_M = devices.to_device([sources, targets], self._device)
        for tensor in tensors:
            tensor.index_copy_(0, to_M, tensor.index_select(0, from_M))

    def grow(self, num_blocks: int) -> None:
        """Reallocate the pages for `num_blocks` blocks; contents and block numbers are kept."""
        num_slots = (num_blocks + 1) * self.block_size
        self._addresses = None
        for pages in self._page_lists:
            for index, old_NF in enumerate(pages):
                # An earlier attempt may have run out of memory halfway.
                if old_NF.shape[0] >= num_slots:
                    continue
                new_NF = old_NF.new_empty(num_slots, old_NF.shape[1])
                new_NF[: old_NF.shape[0]] = old_NF
                pages[index] = new_NF

    def write_routes(
        self, routes_NLK: torch.Tensor, slots: torch.Tensor, write_tokens: torch.Tensor | None
    ) -> None:
        """Write the experts of the real new tokens to a `SlotMapping`'s slots.

        `routes_NLK` also has those of the padding, which `write_tokens` leaves out.
        """
        routes_NF = routes_NLK.flatten(1)
        if write_tokens is not None:
            routes_NF = routes_NF.index_select(0, write_tokens)
        self.routes[0].index_copy_(0, slots, routes_NF)

    def read_routes(self, slots: torch.Tensor) -> torch.Tensor:
        assert self.layout.routes is not None
        return self.routes[0].index_select(0, slots).view(-1, *self.layout.routes.shape)


def _pages(shape: TensorSpec, num_slots: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised pages; only the padding slot is read before it is written."""
    heads, size = shape.shape
    pages_NF = torch.empty(num_slots, heads * size, dtype=shape.dtype, device=device)
    pages_NF[PADDING_SLOT].zero_()
    return pages_NF
