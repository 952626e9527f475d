"""Hold the inputs of a captured decode step: buffers on the device that never move.

A step writes each row's next token and length over the last ones, so no input is copied to the
device until a sequence joins. Called by the thread that steps the engine.

B: rows of a step, N: most rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch

from cb_rollout.engine.attention.shared_prefix import Tile, shared_tiles
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request, distinct_params


class Line(IntEnum):
    """Lines of the buffer; each holds one number for a row, or for a tile."""

    TOKEN = 0
    LENGTH = 1
    """Tokens, the newest included; 0: the row is empty."""
    TABLE_ROW = 2
    SEED = 3
    INDEX = 4
    """Tokens that the sequence has sampled."""
    IS_GREEDY = 5
    TEMPERATURE = 6
    NUM_SHARED = 7
    """Leading tokens that the row's tile reads once for all its rows."""
    TILE_FIRST = 8
    TILE_COUNT = 9
    POSITION_OFFSET = 10
    """Position of the token, less its index in the sequence."""
    IS_KEPT = 11
    """1: the row's logits are kept, and no token is sampled."""
    TOP_K = 12
    """0: none."""
    TOP_P = 13
    MIN_P = 14


# Lines that hold the bits of float64 numbers.
NUMBERS = frozenset((Line.TEMPERATURE, Line.TOP_P, Line.MIN_P))


class GraphInputs:
    """Buffers, and the sequences that their rows hold."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.tensor = torch.zeros(len(Line), max_rows, dtype=torch.int64, device=device)
        """int64, `[lines, N]`."""
        self.num_rows = 0
        """Rows that were loaded, emptied ones included."""
        self.has_shared = False
        """True if rows share a prefix that a tile reads."""
        self.is_plain = True
        """True if every row only samples a token from the whole vocabulary."""
        self._requests: list[Request] = []
        self._rows_B = np.empty(0, np.int64)
        self._lengths: list[int] = []
        self.num_steps = 0
        """Steps since the rows were loaded, each of which wrote the next tokens and lengths."""

    def load(
        self,
        batch: ForwardBatch,
        rows_per_tile: int,
        requests: Sequence[Request] = (),
        sampling: Mapping[Line, Sequence[float] | np.ndarray] | None = None,
    ) -> None:
        """Write rows with one new token each, and each row's sequence and sampling parameters.

        Args:
            batch: the rows.
            rows_per_tile: most rows that read a shared prefix together; 0: none do.
            requests: the sequence of each row.
            sampling: the lines of `GraphSampler.lines`; None: the step keeps logits.
        """
        tiles = _tiles(batch, rows_per_tile)
        num_shared = [0] * len(batch)
        for tile in tiles:
            end = tile.first_row + tile.num_rows
            num_shared[tile.first_row : end] = [tile.num_tokens] * tile.num_rows
        lines: dict[Line, Sequence[float] | np.ndarray] = {
            Line.TOKEN: [token_id for (token_id,) in batch.new_tokens],
            Line.LENGTH: batch.lengths,
            Line.TABLE_ROW: batch.table_rows,
            Line.POSITION_OFFSET: batch.position_offsets,
            Line.NUM_SHARED: num_shared,
            Line.TILE_FIRST: [tile.first_row for tile in tiles],
            Line.TILE_COUNT: [tile.num_rows for tile in tiles],
        }
        if sampling is None:
            lines[Line.IS_KEPT] = [1] * len(batch)
        else:
            lines |= sampling
        host = np.zeros(tuple(self.tensor.shape), np.int64)
        for line, values in lines.items():
            row = host[line]
            if line in NUMBERS:
                row = row.view(np.float64)
            row[: len(values)] = values
        self.tensor.copy_(devices.moved(torch.from_numpy(host), self.tensor.device))
        self.num_rows = len(batch)
        self.has_shared = bool(tiles)
        self.is_plain = not any(p.is_truncated for p in distinct_params(requests))
        self._requests = list(requests)
        self._rows_B = np.arange(len(requests))
        self._lengths = [request.num_tokens for request in requests]
        self.num_steps = 0

    def forget(self) -> None:
        """Invalidate the buffer's contents."""
        self._requests = []

    def holds(self, requests: Sequence[Request], lengths: Sequence[int]) -> bool:
        """Return whether the buffers hold all of these sequences, each with so many tokens."""
        before = self._lengths
        if requests != self._requests:
            index = {request: at for at, request in enumerate(self._requests)}
            if not all(request in index for request in requests):
                return False
            before = [before[index[request]] for request in requests]
        return lengths == [length + self.num_steps for length in before]

    def keep(self, requests: Sequence[Request]) -> np.ndarray:
        """Empty the rows of all other sequences; return the row of each of these, int64.

        The buffers must hold all of these.
        """
        if requests != self._requests:
            index = {request: at for at, request in enumerate(self._requests)}
            kept = [index[request] for request in requests]
            emptied = np.delete(self._rows_B, kept).tolist()
            self._requests = list(requests)
            self._rows_B = self._rows_B[kept]
            self._lengths = [self._lengths[at] for at in kept]
            if emptied:
                rows_R = devices.to_device(emptied, self.tensor.device)
                self.tensor[Line.LENGTH].index_fill_(0, rows_R, 0)
        return self._rows_B

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Hold no row inside the block: a step then touches no page."""
        contents = self.tensor.clone()
        self.tensor.zero_()
        try:
            yield
        finally:
            self.tensor.copy_(contents)


def _tiles(batch: ForwardBatch, rows_per_tile: int) -> list[Tile]:
    """Find the neighbouring rows that read a shared prefix together; see `GraphInputs.load`."""
    if not rows_per_tile or not batch.block_ids:
        return []
    block_size = batch.table.block_size
    used_blocks = []
    for blocks, length in zip(batch.block_ids, batch.lengths, strict=True):
        num_used = -(-length // block_size)
        used_blocks.append(blocks[:num_used])
    return shared_tiles(used_blocks, block_size, rows_per_tile)
