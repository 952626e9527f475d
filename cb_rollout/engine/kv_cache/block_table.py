"""Where in the pages each sequence lies, as one tensor that a forward can index.

B: rows, S: tokens of the longest row.
"""

import torch

from cb_rollout.engine.kv_cache.block_pool import NULL_BLOCK
from cb_rollout.engine.memory import device as devices


class BlockTable:
    """Which blocks each table row's sequence lies in, as one tensor that a forward can index."""

    def __init__(self, num_table_rows: int, block_size: int, device: torch.device) -> None:
        """Start with every table row empty."""
        self.block_size = block_size
        self._blocks = torch.full((num_table_rows, 8), NULL_BLOCK, dtype=torch.int64, device=device)

    @property
    def blocks(self) -> torch.Tensor:
        """int64, `[table rows, blocks of the longest]`; widening moves it."""
        return self._blocks

    def write(self, entries: list[tuple[int, int, int]]) -> None:
        """Set blocks, each given as table row, index within the sequence, and block."""
        if not entries:
            return
        table_rows, indices, blocks = devices.to_device(entries, self._blocks.device).unbind(1)
        while max(index for _, index, _ in entries) >= self._blocks.shape[1]:
            self._blocks = torch.cat([self._blocks, torch.zeros_like(self._blocks)], 1)
        self._blocks[table_rows, indices] = blocks

    def slots(self, table_rows_B: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where in the pages each row's token positions (`[B]` or `[B, S]`) lie."""
        rows = table_rows_B[:, None] if positions.dim() == 2 else table_rows_B
        blocks = self._blocks[rows, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size
