"""Find the rows of a decode step that read the same prompt, and count the splits of their keys.

Arithmetic on block ids and lengths, without tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# Fewer shared tokens cost more to join than to read twice.
MIN_SHARED_TOKENS = 64

# Most and fewest keys of one stretch; longer ones leave processors idle.
LONG_STRETCH, SHORT_STRETCH = 1024, 256

# This many stretches per processor hide the latency of memory.
STRETCHES_PER_PROCESSOR = 4

# Above this, joining costs as much as splitting gains.
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """Neighbouring rows that read the same leading tokens."""

    first_row: int
    num_rows: int
    num_tokens: int


def shared_tiles(
    block_ids: Sequence[Sequence[int]], block_size: int, rows_per_tile: int
) -> list[Tile]:
    """Find neighbours whose leading whole blocks are the same ones.

    Args:
        block_ids: each row's blocks, the last of which it may still write to.
        block_size: tokens of a block.
        rows_per_tile: most rows of a tile; larger groups get several.
    """
    heads = [blocks[0] if len(blocks) > 1 else -1 - row for row, blocks in enumerate(block_ids)]
    starts = [row for row in range(len(heads)) if row == 0 or heads[row] != heads[row - 1]]
    tiles = []
    for start, end in pairwise([*starts, len(heads)]):
        num_tokens = _num_common([blocks[:-1] for blocks in block_ids[start:end]]) * block_size
        if end - start < 2 or num_tokens < MIN_SHARED_TOKENS:
            continue
        for first in range(start, end, rows_per_tile):
            tiles.append(Tile(first, min(rows_per_tile, end - first), num_tokens))
    return tiles


def _num_common(rows: Sequence[Sequence[int]]) -> int:
    num_common = 0
    for blocks in zip(*rows, strict=False):
        if len(set(blocks)) > 1:
            break
        num_common += 1
    return num_common


def num_splits(num_rows: int, num_key_heads: int, longest: int, num_processors: int) -> int:
    """Return the number of stretches to cut each row's keys into, a power of two.

    As many as keep every stretch short and, with few rows, all processors busy.
    """
    busy = -(-STRETCHES_PER_PROCESSOR * num_processors // max(1, num_rows * num_key_heads))
    wanted = max(-(-longest // LONG_STRETCH), min(-(-longest // SHORT_STRETCH), busy))
    return min(MAX_SPLITS, 1 << (max(1, wanted) - 1).bit_length())
