"""Describe how a model runs on pages: what `check_model` finds, and what a `ModelRunner` is told.

Records only. The runner keeps a `PagedExecution` and computes by it; the caller that checked the
model passes it on.
"""

from dataclasses import dataclass
from enum import StrEnum

from cb_rollout.compat.rope import RowRope
from cb_rollout.engine.attention.backend import AttentionBackend
from cb_rollout.engine.attention.selector import BackendSelection
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.recurrent import OpaqueStateAdapter


class BatchLayout(StrEnum):
    """The rows that a model takes together in one forward."""

    PACKED = "packed"
    """All rows: in a prefill one after the other, without padding; in a decode step as PADDED."""
    PADDED = "padded"
    """All rows, left-padded, with a mask and each token's position."""
    EQUAL_LENGTHS = "equal_lengths"
    """Rows of one length, without positions: for models that count positions themselves, or take
    no padding."""
    SINGLE_ROWS = "single_rows"
    """One row: for models that mix the rows of a batch."""

    @property
    def takes_any_lengths(self) -> bool:
        return self in (BatchLayout.PACKED, BatchLayout.PADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedExecution:
    """The way in which a runner computes rows on pages."""

    backend_selection: BackendSelection
    """The attention backend that the device and the model support, and why."""
    attention_backend: AttentionBackend | None = None
    """Reads pages without a gather in decode steps; None: histories are gathered."""
    batch_layout: BatchLayout = BatchLayout.PADDED
    packing_obstacle: str = ""
    """The reason why `batch_layout` is not PACKED."""
    rope: RowRope
    """The rotary modules whose frequencies depend on a row's length."""
    opaque_states: OpaqueStateAdapter | None = None
    """Moves the states of a model that keeps them in its own object; None: it takes
    transformers' cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """The result of `check_model` for a model that it accepts."""

    layout: CacheLayout
    """The tensors that each layer stores."""
    execution: PagedExecution


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCheck:
    """The result of `check_images` for one kind of prompts with images."""

    casts_pixels: bool
    """True: the forward takes pixels only in the model's dtype."""
    may_cut: bool
    """True: a forward may begin between two images of a prompt."""
