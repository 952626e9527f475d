"""Describe a decode step to Triton's kernels, which cut its keys and read shared prompts once.

Finds the rows that read the same prompt, and counts the stretches of their keys.

B: rows, T: shared tiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

# Fewer shared tokens cost more to join than to read twice.
MIN_SHARED_TOKENS = 64

# Fewest keys of one stretch, and the number that its keys are a multiple of.
SHORT_STRETCH = 256
STRETCH_INTERVAL = 128

# This many stretches per processor hide the latency of memory.
STRETCHES_PER_PROCESSOR = 4

# Above this, joining costs as much as cutting gains.
MAX_STRETCHES = 128


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Inputs of a decode step's kernels, besides queries, keys and values; all on the device."""

    addresses: torch.Tensor
    """int64: the block table's address and width, each layer's pages of keys and of values, and all
    recurrent states."""
    block_size: int
    table_rows_B: torch.Tensor
    """int32: each row's index into the block table."""
    lengths_B: torch.Tensor
    """int32: each row's tokens, the new one included; 0: an empty row."""
    num_stretches: int = 0
    """Stretches that all keys are cut into, besides one for each row; 0: no key is cut, and no
    prompt is shared."""
    least_stretch: int = SHORT_STRETCH
    """Fewest keys of a stretch that is not a row's last."""
    stretch_interval: int = STRETCH_INTERVAL
    """Keys of a stretch are a multiple of this."""
    shared_B: torch.Tensor | None = None
    """int32: leading tokens of each row that a shared tile reads; None: no tiles."""
    first_T: torch.Tensor | None = None
    """int32: first row of each tile; the rows of a tile are neighbours."""
    count_T: torch.Tensor | None = None
    """int32: rows of each tile; 0: an empty tile."""
    rows_per_tile: int = 1
    """Most rows of a tile; see `shared_rows`."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Neighbouring rows that read the same leading tokens."""

    first_row: int
    num_rows: int
    num_tokens: int


def shared_tiles(
    block_ids: Sequence[Sequence[int]], block_size: int, rows_per_tile: int
) -> list[Tile]:
    """Find neighbouring rows with the same leading whole blocks.

    Args:
        block_ids: each row's blocks, the last of which it may still write to.
        block_size: tokens of a block.
        rows_per_tile: most rows of a tile; larger groups get several.
    """
    starts: list[int] = []
    for row, blocks in enumerate(block_ids):
        before = block_ids[row - 1] if row else ()
        # The last block may still be written to, so a single one is shared with nobody.
        is_shared = len(before) > 1 and len(blocks) > 1 and before[0] == blocks[0]
        if not is_shared:
            starts.append(row)
    tiles: list[Tile] = []
    for start, end in pairwise([*starts, len(block_ids)]):
        if end - start < 2:
            continue
        num_tokens = num_common([blocks[:-1] for blocks in block_ids[start:end]]) * block_size
        if num_tokens < MIN_SHARED_TOKENS:
            continue
        for first in range(start, end, rows_per_tile):
            tiles.append(Tile(first, min(rows_per_tile, end - first), num_tokens))
    return tiles


def num_common(rows: Sequence[Sequence[Any]]) -> int:
    """Return the length of the longest common prefix."""
    first, *others = rows
    common = first[: min(map(len, rows))]
    for blocks in others:
        # Most groups share all, and lists are compared at once.
        if blocks[: len(common)] != common:
            common = common[: _first_difference(common, blocks)]
    return len(common)


def _first_difference(row: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the index at which two rows differ; neither may be a prefix of the other."""
    # One of them may be longer.
    for index, (item, other_item) in enumerate(zip(row, other, strict=False)):
        if item != other_item:
            return index
    raise AssertionError("one row begins with the other")


def max_stretches(num_key_heads: int, num_processors: int) -> int:
    """Return the stretches of all keys together, besides one per row, that keep processors busy."""
    wanted = -(-STRETCHES_PER_PROCESSOR * num_processors // num_key_heads)
    return min(MAX_STRETCHES, wanted)


def is_cut(lengths: Sequence[int], num_stretches: int) -> bool:
    """Return whether a row of these lengths is cut into stretches; see `triton/launch.py`."""
    stretch = max(SHORT_STRETCH, -(-sum(lengths) // num_stretches))
    return max(lengths) > -(-stretch // STRETCH_INTERVAL) * STRETCH_INTERVAL
