"""Decode steps of one model on the pages themselves: where the rows lie, and one forward of them.

B: rows, V: vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cb_rollout.engine.attention.backend import AttentionMetadata, AttentionSpec, Forward
from cb_rollout.engine.attention.decode_cache import DecodeCache, DecodeLayer
from cb_rollout.engine.attention.shared_prefix import num_splits
from cb_rollout.engine.attention.triton.launch import TYPES, attend, shared_rows, write
from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import PagedCache, PagedLayer
from cb_rollout.engine.memory import device as devices


@dataclass(frozen=True, slots=True)
class TritonPagedAttention:
    """Attends by kernels that read the pages where they lie."""

    metadata: AttentionMetadata
    rows_per_tile: dict[int, int]
    """Rows of a shared tile of each layer, by its number; noted where a layer attends."""

    def attend(
        self,
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """See `PagedAttention`."""
        types = TYPES[layer.key_dtype], TYPES[layer.value_dtype]
        write(key[:, :, 0], value[:, :, 0], self.metadata, layer.index, types)
        heads_per_key = query.shape[1] // layer.num_key_heads
        self.rows_per_tile[layer.index] = shared_rows(
            heads_per_key, max(query.shape[3], layer.value_size)
        )
        outputs_BHE = attend(
            query[:, :, 0],
            layer.num_key_heads,
            layer.value_size,
            self.metadata,
            layer.index,
            types,
            spec,
        )
        return outputs_BHE[:, None]


class TritonBackend:
    """Runs decode steps with no gather."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        """Prepare for pages of this layout."""
        self.cache = DecodeCache(layout, device)
        num_addresses = 2 * len(layout.layers) + 2
        self.addresses = torch.zeros(num_addresses, dtype=torch.int64, device=device)
        """As `AttentionMetadata` takes them; all zero until `find`."""
        self._known: list[int] = []
        self._rows_per_tile = dict.fromkeys((layer.index for layer in self.cache.paged), 1)
        self._device = device
        self._num_key_heads = max(layer.keys.shape[0] for layer in layout.layers if layer.keys)
        self.num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 1
        )

    def logits(
        self,
        forward: Forward,
        new_tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        table_rows: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
    ) -> torch.Tensor:
        """As `ModelRunner.logits`, for rows of one new token each."""
        lengths_B = self._integers(lengths)
        metadata = AttentionMetadata(
            self.find(cache, table),
            table.block_size,
            self._integers(table_rows),
            lengths_B,
            self.splits(len(lengths), max(lengths)),
        )
        tokens_B1 = devices.to_device(new_tokens, self._device)
        return self.run(forward, tokens_B1, lengths_B.long()[:, None] - 1, metadata, cache)

    def check_weights(self, model: torch.nn.Module) -> None:
        """Nothing here relies on where weights are; graphs look for themselves."""

    def run(
        self,
        forward: Forward,
        tokens_B1: torch.Tensor,
        positions_B1: torch.Tensor,
        metadata: AttentionMetadata,
        cache: PagedCache | None = None,
    ) -> torch.Tensor:
        """float32 logits, `[B, V]`, by one forward that reads and writes at `metadata`.

        `cache` is where recurrent states are; None: there are none.
        """
        attention = TritonPagedAttention(metadata, self._rows_per_tile)
        return self.cache.run(
            forward, attention, tokens_B1, positions_B1, metadata.table_rows_B, cache
        )

    def find(self, cache: PagedCache, table: BlockTable) -> torch.Tensor:
        """Where the pages and the table lie now, as the kernels take it: in one place for good."""
        blocks = table.blocks
        addresses = [blocks.data_ptr(), blocks.shape[1]]
        for layer in cache.layers:
            pages = layer.pages[:2] if isinstance(layer, PagedLayer) else []
            addresses += [p.data_ptr() for p in pages] or [0, 0]
        if addresses != self._known:
            self.addresses.copy_(devices.to_device(addresses, self._device))
            self._known = addresses
        return self.addresses

    @property
    def rows_per_tile(self) -> int:
        """Most rows that read a shared prompt together, in every layer."""
        return min(self._rows_per_tile.values())

    def splits(self, num_rows: int, longest: int) -> int:
        """Stretches to cut the keys of so many rows into."""
        return num_splits(num_rows, self._num_key_heads, longest, self.num_processors)

    def _integers(self, values: Sequence[int]) -> torch.Tensor:
        return devices.to_device(values, self._device, torch.int32)
