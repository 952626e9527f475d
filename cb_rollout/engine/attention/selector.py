"""Choose the attention backend of a model's decode steps, once, when an engine is made."""

from dataclasses import dataclass

import torch

from cb_rollout.engine.attention.backend import AttentionBackend
from cb_rollout.engine.attention.cpu.backend import CpuBackend
from cb_rollout.engine.attention.triton.backend import TritonBackend
from cb_rollout.engine.kv_cache.layout import CacheLayout

# The first backend that a device and a model support is used.
BACKENDS: list[type[AttentionBackend]] = [TritonBackend, CpuBackend]


@dataclass(frozen=True, slots=True)
class BackendSelection:
    """The chosen backend, and why."""

    backend: type[AttentionBackend] | None
    """None: each row's history is gathered for the model's own attention, as any model allows."""
    reason: str

    @property
    def name(self) -> str:
        return "gathered" if self.backend is None else self.backend.name

    def __str__(self) -> str:
        return f"decode attention: {self.name} ({self.reason})"


def select_backend(
    device: torch.device, layout: CacheLayout | None = None, *, is_padded: bool = True
) -> BackendSelection:
    """Return the best backend that a device and a model support.

    Args:
        device: the model's.
        layout: the tensors that its layers store; None: an ordinary model's.
        is_padded: whether one forward takes rows of different lengths.
    """
    reason = ""
    for backend in BACKENDS:
        if backend.device_type != device.type:
            continue
        obstacle = backend.obstacle(device, layout)
        if obstacle is None:
            obstacle = _model_obstacle(backend, layout, is_padded)
        if obstacle is None:
            return BackendSelection(backend, "kernels read the pages, with no gather")
        reason = reason or obstacle
    return BackendSelection(None, reason or f"no kernels read the pages on {device.type}")


def _model_obstacle(
    backend: type[AttentionBackend], layout: CacheLayout | None, is_padded: bool
) -> str | None:
    if layout is not None:
        keyed = [layer for layer in layout.layers if layer.keys]
        if not keyed and (backend.needs_keys or not layout.is_recurrent):
            return "no layer keeps keys"
        if any(layer.index or layer.is_recurrent for layer in keyed):
            return "some layers keep more than keys and values"
    if not is_padded:
        return "the model takes only rows of one length together"
    return None
