"""Define what attention backends share: a layer's spec and a step's metadata.

B: rows, H: query heads, T: shared tiles, V: vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from cb_rollout.engine.attention.shared_prefix import SHORT_STRETCH, STRETCH_INTERVAL
from cb_rollout.engine.kv_cache.layout import CacheLayout


class UnsupportedAttentionError(Exception):
    """A layer asks for attention that no kernel computes."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer, beyond the plain softmax."""

    scale: float
    window: int | None = None
    """Newest tokens that are seen; None: all."""
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None
    """A score for each head that takes its share of the softmax and gives no value."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Inputs of a decode step's kernels, beside queries, keys and values; all on the device."""

    addresses: torch.Tensor
    """int64: the block table's address and width, then each layer's pages of keys and of values."""
    block_size: int
    table_rows_B: torch.Tensor
    """int32: each row's index into the block table."""
    lengths_B: torch.Tensor
    """int32: each row's tokens, the new one included; 0: an empty row."""
    num_stretches: int = 0
    """Stretches that all keys are cut into, beside one for each row; 0: no key is cut, and no
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


def unsupported_states(
    layout: CacheLayout | None, dtypes: Collection[torch.dtype], max_head_size: int | None = None
) -> str | None:
    """Name the first keys or values that a kernel does not take; None: it takes all of them."""
    layers = () if layout is None else layout.layers
    for states in (states for layer in layers for states in layer.per_token):
        if max_head_size is not None and states.shape[1] > max_head_size:
            return f"heads of {states.shape[1]} are larger than {max_head_size}"
        if states.dtype not in dtypes:
            return f"keys are {states.dtype}"
    return None
