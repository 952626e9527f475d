"""Define what attention backends share: a layer's spec, a step's metadata, and the interface.

A backend runs decode steps (one new token a row) on the pages of the cache, with no gather.

B: rows, H: query heads, T: shared tiles, V: vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from cb_rollout.engine.attention.shared_prefix import SHORT_STRETCH, STRETCH_INTERVAL
from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import PagedCache

if TYPE_CHECKING:
    from cb_rollout.engine.attention.decode_cache import DecodeCache, DecodeInputs
    from cb_rollout.engine.attention.traced_forward import TracedForward


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


class AttentionBackend(Protocol):
    """Prepare the decode steps of one model; `selector.BACKENDS` lists the implementations."""

    name: ClassVar[str]
    device_type: ClassVar[str]
    """The `torch.device.type` that the backend runs on."""

    @property
    def cache(self) -> "DecodeCache":
        """Cache that a decode forward is called with."""
        ...

    @property
    def traced_forward(self) -> "TracedForward | None":
        """Forward that runs from a trace; None: the model itself runs."""
        ...

    @staticmethod
    def obstacle(device: torch.device, layout: CacheLayout | None) -> str | None:
        """Return why the backend cannot run; None: it can.

        Args:
            device: the model's, of `device_type`.
            layout: what the model's layers keep; None: not known yet.
        """
        ...

    def __init__(self, layout: CacheLayout, device: torch.device) -> None: ...

    def prepare(
        self,
        new_tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        table_rows: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
        position_offsets: Sequence[int] | None = None,
    ) -> "DecodeInputs":
        """Return the inputs of a forward of rows of one new token; see `ModelRunner.logits`."""
        ...

    def check_weights(self, model: torch.nn.Module) -> None:
        """Drop what was captured from weights that have moved since."""
        ...


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
