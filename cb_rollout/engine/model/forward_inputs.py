"""Lay out a batch on the device: without padding, or left-padded.

B: rows, Q: new tokens of the longest row, S: tokens of the longest row, N: new tokens of all rows,
T: tokens of all rows, A: axes of positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

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
    """int64; each token's position id, on A axes if images have several."""
    mask: torch.Tensor
    mapping: SlotMapping
    segments: list[Segment] | None = None
    """Each packed row's new tokens, with its history as their prefix; None: rows are padded."""
    last_B: torch.Tensor | None = None
    """int64; index of each packed row's last token."""


def packed_inputs(batch: ForwardBatch) -> ForwardInputs:
    """Return the new tokens of all rows as one row, without padding."""
    device = batch.table.blocks.device
    new_of_rows = batch.num_new
    segments = _segments(new_of_rows, batch.lengths)
    num_new = sum(new_of_rows)
    num_keys = sum(batch.lengths)
    is_fresh = num_new == num_keys
    lengths_B = to_device(batch.lengths, device)
    table_rows_B = to_device(batch.table_rows, device)
    starts_B = lengths_B.cumsum(0) - lengths_B

    def of_each_key(values_B: torch.Tensor) -> torch.Tensor:
        return values_B.repeat_interleave(lengths_B, output_size=num_keys)

    places_T = torch.arange(num_keys, device=device) - of_each_key(starts_B)
    slots_T = batch.table.slots(of_each_key(table_rows_B), places_T)
    positions_T = places_T
    if batch.position_offsets:
        positions_T = places_T + of_each_key(to_device(batch.position_offsets, device))
    if is_fresh:
        positions_N = positions_T
        slots_N = slots_T
        read_slots_1T = None
    else:
        keys_of_new = [key for segment in segments for key in segment.own_keys]
        new_N = to_device(keys_of_new, device)
        positions_N = positions_T[new_N]
        slots_N = slots_T[new_N]
        read_slots_1T = slots_T[None]
    mapping = SlotMapping(
        num_cached=num_keys - num_new,
        table_rows_B=table_rows_B,
        write_tokens=None,
        write_slots=slots_N,
        read_slots_BS=read_slots_1T,
        positions_BS=places_T[None],
        is_packed=True,
    )
    new_tokens = list(chain.from_iterable(batch.new_tokens))
    last_tokens = [end - 1 for end in accumulate(new_of_rows)]
    return ForwardInputs(
        input_ids=to_device(new_tokens, device)[None],
        positions=positions_N[None],
        mask=no_mask(device),
        mapping=mapping,
        segments=segments,
        last_B=to_device(last_tokens, device),
    )


def _segments(num_new: Sequence[int], lengths: Sequence[int]) -> list[Segment]:
    """Return each row's new tokens in a packed row, and the keys of its history.

    `num_new` counts each row's new tokens, and `lengths` all of its tokens. The keys of all tokens
    are in one row too.
    """
    segments: list[Segment] = []
    start = 0
    first_key = 0
    for new, length in zip(num_new, lengths, strict=True):
        first_own_key = first_key + length - new
        history = range(first_key, first_own_key)
        segment = Segment(start=start, length=new, prefix=(history,), key_start=first_own_key)
        segments.append(segment)
        start += new
        first_key += length
    return segments


def padded_inputs(batch: ForwardBatch) -> ForwardInputs:
    """Return the new tokens of each row, left-padded to the longest row's number."""
    device = batch.table.blocks.device
    num_new = batch.num_new
    is_fresh = batch.is_fresh
    Q = max(num_new)
    S = Q if is_fresh else max(batch.lengths)
    padded = [[0] * (Q - len(row)) + list(row) for row in batch.new_tokens]
    lengths_B = to_device(batch.lengths, device)
    table_rows_B = to_device(batch.table_rows, device)
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
    mask = is_token_BS.to(torch.int64)
    if not batch.cache.layout.has_keys:
        mask = mask[:, S - Q :]
    mapping = SlotMapping(
        num_cached=S - Q,
        table_rows_B=table_rows_B,
        write_tokens=write_tokens,
        write_slots=slots_BQ,
        read_slots_BS=read_slots_BS,
        positions_BS=positions_BS,
    )
    return ForwardInputs(
        input_ids=to_device(padded, device),
        positions=positions_BQ,
        mask=mask,
        mapping=mapping,
    )
