"""Decode steps of one model on the pages themselves: where the rows lie, and one forward of them.

B: rows, V: vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from transformers.cache_utils import Cache

from cb_rollout.engine.attention.decode_cache import DecodeCache
from cb_rollout.engine.attention.places import Places
from cb_rollout.engine.attention.sharing import num_splits
from cb_rollout.engine.block_table import BlockTable
from cb_rollout.engine.cache import PagedCache
from cb_rollout.engine.probe import CacheLayout

Forward = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Cache], torch.Tensor]
# Token ids, mask, positions and cache to float32 logits: one call of the model.


class PagedDecoding:
    """Runs decode steps with no gather."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        """Prepare for pages of this layout."""
        self.cache = DecodeCache(layout, device)
        self._device, self._is_recurrent = device, layout.is_recurrent
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
        slots: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
    ) -> torch.Tensor:
        """As `ModelRunner.logits`, for rows of one new token each."""
        lengths_B = self._integers(lengths)
        places = Places(
            self.cache.find(cache, table),
            table.block_size,
            self._integers(slots),
            lengths_B,
            self.splits(len(lengths), max(lengths)),
        )
        tokens_B1 = torch.tensor(new_tokens, device=self._device)
        return self.run(forward, tokens_B1, lengths_B.long()[:, None] - 1, places)

    def run(
        self,
        forward: Forward,
        tokens_B1: torch.Tensor,
        positions_B1: torch.Tensor,
        places: Places,
    ) -> torch.Tensor:
        """float32 logits, `[B, V]`, by one forward that reads and writes at `places`."""
        # A mask of four dimensions is taken as it is, and nobody reads it; recurrent layers would.
        mask = None if self._is_recurrent else tokens_B1.new_ones(tokens_B1.shape[0], 1, 1, 1)
        with self.cache.reading(places):
            return forward(tokens_B1, mask, positions_B1, self.cache)

    @property
    def rows_per_tile(self) -> int:
        """Most rows that read a shared prompt together, in every layer."""
        return min(layer.rows_per_tile for layer in self.cache.paged)

    def splits(self, num_rows: int, longest: int) -> int:
        """Stretches to cut the keys of so many rows into."""
        return num_splits(num_rows, self._num_key_heads, longest, self.num_processors)

    def _integers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
