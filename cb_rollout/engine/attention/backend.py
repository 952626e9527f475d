"""Where a decode step's rows lie, and what a layer's attention does: records for the fast paths.

B: rows, H: query heads, T: shared tiles.

Which attention an engine's decode steps use, and why not more. Asked once, where it is made.

What a runner expects of whatever runs its decode steps without a gather.

B: rows, V: vocabulary.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from transformers.cache_utils import Cache

from cb_rollout.compat import inductor
from cb_rollout.engine.attention.shared_prefix import SHORT_STRETCH
from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import PagedCache
from cb_rollout.engine.native.library import TYPES


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where a step's rows lie, all on the device."""

    addresses: torch.Tensor
    """int64; of the block table, its width, then of each layer's pages of keys and of values."""
    block_size: int
    table_rows_B: torch.Tensor
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


class UnsupportedAttentionError(Exception):
    """A layer asks for attention that the fast paths do not do."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention does beyond the plain softmax."""

    scale: float
    window: int | None = None
    """Newest tokens that are seen; None: all."""
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None
    """A score for each head that takes its share of the softmax and gives no value."""


LEAST_CAPABILITY = (8, 0)
# Ampere: the first whose tensor cores take bfloat16, and that copies memory asynchronously.

LARGEST_HEAD = 256
# A tile of longer keys does not fit the shared memory of every card.

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What tensor cores multiply.

CPU_DTYPES = tuple(TYPES)
# Of C++ kernels and of batched products. In shorter types a model's own attention rounds between
# its two products, and the trainer's forward with it: to be more exact is to be further from both.


class DecodePath(StrEnum):
    """How a decode step reads the keys of the past."""

    GATHERED = "gathered"
    """Each row's history is gathered for the model's own attention; right for every model."""
    TRITON = "triton"
    """Triton kernels read the pages where they lie."""
    CPP = "cpp"
    """A C++ kernel reads the pages where they lie; for CPUs."""


@dataclass(frozen=True, slots=True)
class BackendSelection:
    """What was chosen, and why."""

    path: DecodePath
    reason: str

    def __str__(self) -> str:
        """One line."""
        return f"decode attention: {self.path.value} ({self.reason})"


def select_backend(
    device: torch.device, layout: CacheLayout | None = None, *, is_padded: bool = True
) -> BackendSelection:
    """The best decode path that a device and a model can have.

    Args:
        device: where the model is.
        layout: what its layers keep; None: an ordinary model's.
        is_padded: whether rows of different lengths may stand in one forward.
    """
    path, obstacle = DecodePath.TRITON, device_obstacle(device)
    if obstacle and device.type == "cpu":
        path, obstacle = DecodePath.CPP, _cpp_obstacle()
    if obstacle is None:
        obstacle = layout and _layout_obstacle(layout, path)
        if obstacle is None and not is_padded:
            obstacle = "the model takes only rows of one length together"
    if obstacle:
        return BackendSelection(DecodePath.GATHERED, obstacle)
    return BackendSelection(path, _REASONS[path])


_REASONS = {
    DecodePath.TRITON: "kernels read the pages, with no gather",
    DecodePath.CPP: "a kernel reads the pages, with no gather",
}


def device_obstacle(device: torch.device) -> str | None:
    """Why a device cannot run the kernels; None: it can."""
    if device.type != "cuda":
        return f"the kernels need a CUDA device, and the model is on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed, got = (".".join(map(str, numbers)) for numbers in (LEAST_CAPABILITY, capability))
        return f"the kernels need compute capability {needed}, and the device has {got}"
    return None


def _cpp_obstacle() -> str | None:
    if obstacle := inductor.compiler_obstacle():
        return f"the kernel needs a C++ compiler, g++ or the one that CXX names ({obstacle})"
    return None


def _layout_obstacle(layout: CacheLayout, path: DecodePath) -> str | None:
    keyed = [layer for layer in layout.layers if layer.keys]
    if not keyed:
        return "no layer keeps keys"
    if any(layer.index or layer.is_recurrent for layer in keyed):
        return "some layers keep more than keys and values"
    is_triton = path is DecodePath.TRITON
    for states in (states for layer in keyed for states in layer.per_token):
        if is_triton and states.shape[1] > LARGEST_HEAD:
            return f"heads of {states.shape[1]} are larger than {LARGEST_HEAD}"
        if states.dtype not in (TRITON_DTYPES if is_triton else CPU_DTYPES):
            return f"keys are {states.dtype}"
    return None


Forward = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Cache], torch.Tensor]
# Token ids, mask, positions and cache to float32 logits: one call of the model.


class AttentionBackend(Protocol):
    """Runs decode steps without a gather."""

    def logits(
        self,
        forward: Forward,
        new_tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        table_rows: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
    ) -> torch.Tensor:
        """As `ModelRunner.logits`, for rows of one new token each."""
        ...

    def check_weights(self, model: torch.nn.Module) -> None:
        """Forget what relies on weights that no longer are where they were."""
        ...
