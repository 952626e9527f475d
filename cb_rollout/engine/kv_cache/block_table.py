"""Map token positions of sequences to slots of the pages. B: rows, S: tokens of the longest."""

import torch

from cb_rollout.engine.kv_cache.block_pool import NULL_BLOCK
from cb_rollout.engine.memory import device as devices


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
        rows = table_rows_B[:, None] if positions.dim() == 2 else table_rows_B
        blocks = self.blocks[rows, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size
