"""Lay out a batch on the device: without padding, or left-padded.

B: rows, Q: new tokens of the longest row, S: tokens of the longest row, N: new tokens of all rows,
T: tokens of all rows, A: axes of positions.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch

from cb_rollout.engine.attention.packed import Segment, no_mask
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.paged import PADDING_SLOT, SlotMapping
from cb_rollout.engine.memory.device import to_device


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Tensors of one forward on `PagedCache`, on the device of the block table."""

    input_ids: torch.Tensor
    """`[B, Q]`; `[1, N]` where rows are packed."""
    positions: torch.Tensor
    """int64; each token's position id, of A axes where images have some."""
    mask: torch.Tensor
    mapping: SlotMapping
    segments: list[Segment] | None = None
    """Each packed row's new tokens, with its history as their prefix; None: rows are padded."""
    last_B: torch.Tensor | None = None
    """int64; index of each packed row's last token."""


def packed_inputs(batch: ForwardBatch) -> ForwardInputs:
    """Return the new tokens of all rows as one row, without padding."""
    lengths, num_new, num_keys = batch.lengths, batch.num_new, sum(batch.lengths)
    device = batch.table.blocks.device
    ends, key_ends = list(accumulate(num_new)), list(accumulate(lengths))
    segments = [
        Segment(end - new, new, (range(key_end - length, key_end - new),), key_end - new)
        for end, new, key_end, length in zip(ends, num_new, key_ends, lengths, strict=True)
    ]
    lengths_B, table_rows_B = to_device(lengths, device), to_device(batch.table_rows, device)
    starts_B = lengths_B.cumsum(0) - lengths_B

    def of_each_key(values_B: torch.Tensor) -> torch.Tensor:
        return values_B.repeat_interleave(lengths_B, output_size=num_keys)

    places_T = torch.arange(num_keys, device=device) - of_each_key(starts_B)
    slots_T = batch.table.slots(of_each_key(table_rows_B), places_T)
    positions_T = places_T
    if batch.position_offsets:
        positions_T = places_T + of_each_key(to_device(batch.position_offsets, device))
    positions_N, slots_N, is_fresh = positions_T, slots_T, ends[-1] == num_keys
    if not is_fresh:
        new_N = to_device([key for segment in segments for key in segment.own_keys], device)
        positions_N, slots_N = positions_T[new_N], slots_T[new_N]
    read_slots_1T = None if is_fresh else slots_T[None]
    return ForwardInputs(
        to_device([token for row in batch.new_tokens for token in row], device)[None],
        positions_N[None],
        no_mask(device),
        SlotMapping(
            *(num_keys - ends[-1], table_rows_B, None, slots_N, read_slots_1T, places_T[None]),
            is_packed=True,
        ),
        segments,
        to_device([end - 1 for end in ends], device),
    )


def padded_inputs(batch: ForwardBatch) -> ForwardInputs:
    """Return the new tokens of each row, left-padded to those of the longest."""
    lengths, num_new = batch.lengths, batch.num_new
    device = batch.table.blocks.device
    Q, is_fresh = max(num_new), batch.is_fresh
    S = Q if is_fresh else max(lengths)
    padded = [[0] * (Q - len(row)) + list(row) for row in batch.new_tokens]
    lengths_B, table_rows_B = to_device(lengths, device), to_device(batch.table_rows, device)
    positions_BS = lengths_B[:, None] - S + torch.arange(S, device=device)
    is_token_BS = positions_BS >= 0
    positions_BS = positions_BS.clamp(min=0)
    positions_BQ = positions_BS[:, S - Q :]
    slots_BQ = batch.table.slots(table_rows_B, positions_BQ).view(-1)
    if batch.position_offsets:
        offsets_B1 = to_device(batch.position_offsets, device)[:, None]
        positions_BQ = (positions_BQ + offsets_B1).clamp(min=0)
    write_tokens = None
    if min(num_new) < Q:
        num_new_B1 = to_device(num_new, device)[:, None]
        is_new_BQ = torch.arange(Q, 0, -1, device=device) <= num_new_B1
        write_tokens = is_new_BQ.view(-1).nonzero()[:, 0]
        slots_BQ = slots_BQ[write_tokens]
    read_slots_BS = None
    if not is_fresh:
        read_slots_BS = batch.table.slots(table_rows_B, positions_BS)
        read_slots_BS = read_slots_BS.masked_fill(~is_token_BS, PADDING_SLOT)
    mask_BS = is_token_BS.to(torch.int64)
    return ForwardInputs(
        to_device(padded, device),
        positions_BQ,
        mask_BS if batch.cache.layout.has_keys else mask_BS[:, S - Q :],
        SlotMapping(S - Q, table_rows_B, write_tokens, slots_BQ, read_slots_BS, positions_BS),
    )
