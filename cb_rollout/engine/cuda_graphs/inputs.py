"""Hold the inputs of a captured decode step: buffers on the device that never move.

A step writes each row's next token and length over the last ones, so no input is copied to the
device until a sequence joins. Called by the thread that steps the engine.

B: rows of a step, N: most rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch

from cb_rollout.engine.attention.shared_prefix import shared_tiles
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.decode_rows import DecodeRows
from cb_rollout.engine.request import Request


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
    """The bits of a float64."""
    NUM_SHARED = 7
    """Leading tokens that the row's tile reads once for all its rows."""
    TILE_FIRST = 8
    TILE_COUNT = 9
    POSITION_OFFSET = 10
    """Position of the token, less its index in the sequence."""


class GraphInputs:
    """Buffers, and the sequences that their rows hold."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.tensor = torch.zeros(len(Line), max_rows, dtype=torch.int64, device=device)
        """int64, `[lines, N]`."""
        self.num_rows = 0
        """Rows that were loaded, emptied ones included."""
        self.has_shared = False
        """True if rows share a prefix that a tile reads."""
        self._loaded: dict[Request, tuple[int, int]] = {}
        self._num_steps = 0

    def load(
        self,
        rows: DecodeRows,
        block_size: int,
        rows_per_tile: int,
        requests: Sequence[Request] = (),
    ) -> None:
        """Write the rows, with their sampling parameters if the step samples.

        Args:
            rows: tokens to compute.
            block_size: tokens of a block.
            rows_per_tile: most rows that read a shared prefix together.
            requests: the rows' sequences, one each; empty: nothing is sampled.
        """
        params = [request.params for request in requests]
        tiles = shared_tiles(rows.block_ids, block_size, rows_per_tile)
        shared = [0] * len(rows)
        for tile in tiles:
            last = tile.first_row + tile.num_rows
            shared[tile.first_row : last] = [tile.num_tokens] * tile.num_rows
        lines = {
            Line.TOKEN: rows.token_ids,
            Line.LENGTH: rows.lengths,
            Line.TABLE_ROW: rows.table_rows,
            Line.POSITION_OFFSET: rows.position_offsets,
            Line.SEED: [request.seed for request in requests],
            Line.INDEX: [request.num_generated for request in requests],
            Line.IS_GREEDY: [p.is_greedy for p in params],
            Line.NUM_SHARED: shared,
            Line.TILE_FIRST: [tile.first_row for tile in tiles],
            Line.TILE_COUNT: [tile.num_rows for tile in tiles],
        }
        host = torch.zeros(self.tensor.shape, dtype=torch.int64)
        for line, values in lines.items():
            host[line, : len(values)] = torch.tensor(values, dtype=torch.int64)
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        padding = [1.0] * (host.shape[1] - len(params))
        host[Line.TEMPERATURE].view(torch.float64).copy_(torch.tensor(temperatures + padding))
        self.tensor.copy_(devices.moved(host, self.tensor.device))
        self.num_rows, self.has_shared = len(rows), bool(tiles)
        self._loaded = {request: (row, request.num_tokens) for row, request in enumerate(requests)}
        self._num_steps = 0

    def note_step(self) -> None:
        """Count a step, which wrote the next tokens and lengths."""
        self._num_steps += 1

    def forget(self) -> None:
        """Invalidate the buffer's contents."""
        self._loaded = {}

    def holds(self, requests: Sequence[Request], lengths: Sequence[int]) -> bool:
        """Return whether the buffers hold all of these sequences, each with so many tokens."""
        passed = self._num_steps
        return all(
            request in self._loaded and self._loaded[request][1] + passed == length
            for request, length in zip(requests, lengths, strict=True)
        )

    def rows_of(self, requests: Sequence[Request]) -> list[int]:
        """Return the row of each sequence."""
        return [self._loaded[request][0] for request in requests]

    def empty_all_but(self, requests: Sequence[Request]) -> None:
        """Empty the rows of all other sequences: they compute nothing from now on."""
        if len(requests) == len(self._loaded):
            return
        kept = {request: self._loaded[request] for request in requests}
        gone = [row for request, (row, _) in self._loaded.items() if request not in kept]
        self._loaded = kept
        rows_R = devices.to_device(gone, self.tensor.device)
        self.tensor[Line.LENGTH].index_fill_(0, rows_R, 0)

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Hold no row inside the block: a step then touches no page."""
        held = self.tensor.clone()
        self.tensor.zero_()
        try:
            yield
        finally:
            self.tensor.copy_(held)
