"""Where a decode step's rows lie, and what a layer's attention does: records for the fast paths.

B: rows, H: query heads, T: shared tiles.
"""

from dataclasses import dataclass

import torch

from cb_rollout.engine.attention.sharing import SHORT_STRETCH


@dataclass(frozen=True, slots=True)
class Places:
    """Where a step's rows lie, all on the device."""

    addresses: torch.Tensor
    """int64; of the block table, its width, then of each layer's pages of keys and of values."""
    block_size: int
    slots_B: torch.Tensor
    """int32; each row's line of the block table."""
    lengths_B: torch.Tensor
    """int32; each row's tokens, the new one included; 0: no row at all."""
    num_splits: int
    """Stretches that each row's own keys are cut into, at most."""
    least_stretch: int = SHORT_STRETCH
    """Keys below which a stretch is not cut."""
    shared_B: torch.Tensor | None = None
    """int32; leading tokens of each row that a shared tile reads; None: no tiles."""
    first_T: torch.Tensor | None = None
    """int32; first row of each tile; its rows are neighbours."""
    count_T: torch.Tensor | None = None
    """int32; rows of each tile; 0: no tile at all."""
    rows_per_tile: int = 1
    """Most rows of a tile; see `shared_rows`."""
    num_shared_splits: int = 1
    """Stretches that a shared prompt is cut into, at most."""


class NotOrdinaryError(Exception):
    """A layer asks for attention that the fast paths do not do."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a layer's attention does beyond the plain softmax."""

    scale: float
    window: int | None = None
    """Newest tokens that are seen; None: all."""
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None
    """A score for each head that takes its share of the softmax and gives no value."""
