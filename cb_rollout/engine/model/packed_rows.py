"""Lay out a prefill without padding: the new tokens of all rows, one row after the other.

B: rows, N: new tokens of all rows, T: tokens of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cb_rollout.engine.attention.packed import Segment
from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.paged import SlotMapping
from cb_rollout.engine.memory.device import to_device


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Inputs of one packed forward, on the device of the block table."""

    input_ids_1N: torch.Tensor
    positions_1N: torch.Tensor
    """int64; each token's position id. `[A, 1, N]` where images have positions of A axes."""
    last_B: torch.Tensor
    """int64; index of each row's last token."""
    segments: list[Segment]
    """Each row's new tokens, with its history as their prefix."""
    mapping: SlotMapping

    @property
    def is_fresh(self) -> bool:
        """Return whether no row has a history."""
        return self.mapping.read_slots_BS is None

    @staticmethod
    def of(
        new_tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        table_rows: Sequence[int],
        table: BlockTable,
        position_offsets: Sequence[int] | None,
    ) -> "PackedRows":
        """Return the layout of these rows; see `ModelRunner.logits`."""
        device = table.blocks.device
        num_new, num_keys = list(map(len, new_tokens)), sum(lengths)
        ends, key_ends = list(accumulate(num_new)), list(accumulate(lengths))
        segments = [
            Segment(end - new, new, key_end - length, length - new, key_end - new)
            for end, new, key_end, length in zip(ends, num_new, key_ends, lengths, strict=True)
        ]
        lengths_B, table_rows_B = to_device(lengths, device), to_device(table_rows, device)
        starts_B = lengths_B.cumsum(0) - lengths_B

        def of_each_key(values_B: torch.Tensor) -> torch.Tensor:
            return values_B.repeat_interleave(lengths_B, output_size=num_keys)

        places_T = torch.arange(num_keys, device=device) - of_each_key(starts_B)
        slots_T = table.slots(of_each_key(table_rows_B), places_T)
        positions_T = places_T
        if position_offsets is not None:
            positions_T = places_T + of_each_key(to_device(position_offsets, device))
        positions_N, slots_N, is_fresh = positions_T, slots_T, ends[-1] == num_keys
        if not is_fresh:
            new_N = to_device([key for segment in segments for key in segment.own_keys], device)
            positions_N, slots_N = positions_T[new_N], slots_T[new_N]
        return PackedRows(
            to_device([token for row in new_tokens for token in row], device)[None],
            positions_N[None],
            to_device([end - 1 for end in ends], device),
            segments,
            SlotMapping(
                num_keys - ends[-1],
                table_rows_B,
                None,
                slots_N,
                None if is_fresh else slots_T[None],
                places_T[None],
                is_packed=True,
            ),
        )
