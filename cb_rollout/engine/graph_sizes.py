"""For how many rows and keys decode graphs are captured: arithmetic only."""

from dataclasses import dataclass

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# At most half as many rows again as are needed: up to a few hundred, weights are what a step reads.

KEYS = 1024
# Graphs differ in how keys are split, which is settled by the longest row rounded up to this.

MAX_GRAPHS = 32
# One for each number of rows, and some for rows so long that they are split more.


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of the graphs, and how many are kept; 0 leaves the choice here."""

    row_interval: int = 0
    """Rows are rounded up to a multiple of this."""
    key_interval: int = 0
    """The longest row's length is rounded up to a multiple of this."""
    max_cached: int = 0

    @property
    def max_graphs(self) -> int:
        """Most graphs kept; the least recently used goes first."""
        return self.max_cached or MAX_GRAPHS

    def padded(self, num_rows: int) -> int:
        """Rows of the graph that runs `num_rows`."""
        if not self.row_interval and num_rows <= ROWS[-1]:
            return next(size for size in ROWS if size >= num_rows)
        return _rounded_up(num_rows, self.row_interval or ROWS[-1])

    def padded_keys(self, num_keys: int) -> int:
        """Keys of the longest row, for the graph that runs it."""
        return _rounded_up(num_keys, self.key_interval or KEYS)


def _rounded_up(count: int, interval: int) -> int:
    return -(-count // interval) * interval
