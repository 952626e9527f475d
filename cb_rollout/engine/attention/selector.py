"""Choose the attention backend of a model's decode steps, once, where an engine is made.

B: rows, V: vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from cb_rollout.engine.attention.cpu.backend import CpuBackend
from cb_rollout.engine.attention.decode_cache import DecodeCache, DecodeInputs
from cb_rollout.engine.attention.traced_forward import TracedForward
from cb_rollout.engine.attention.triton.backend import TritonBackend
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout


class AttentionBackend(Protocol):
    """Prepare the decode steps of one model, one new token a row, on pages without a gather."""

    name: ClassVar[str]
    device_type: ClassVar[str]
    """The `torch.device.type` that the backend runs on."""

    @property
    def cache(self) -> DecodeCache:
        """Cache that a decode forward is called with."""
        ...

    @property
    def traced_forward(self) -> TracedForward | None:
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

    def prepare(self, batch: ForwardBatch) -> DecodeInputs:
        """Return the inputs of a forward of rows of one new token."""
        ...

    def check_weights(self, model: torch.nn.Module) -> None:
        """Drop what was captured from weights that have moved since."""
        ...


# The first one that a device and a model can have is used.
BACKENDS: list[type[AttentionBackend]] = [TritonBackend, CpuBackend]


@dataclass(frozen=True, slots=True)
class BackendSelection:
    """The chosen backend, and why."""

    backend: type[AttentionBackend] | None
    """None: each row's history is gathered for the model's own attention, as any model allows."""
    reason: str

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.name if self.backend else "gathered"

    def __str__(self) -> str:
        return f"decode attention: {self.name} ({self.reason})"


def select_backend(
    device: torch.device, layout: CacheLayout | None = None, *, is_padded: bool = True
) -> BackendSelection:
    """Return the best backend that a device and a model can have.

    Args:
        device: the model's.
        layout: what its layers keep; None: an ordinary model's.
        is_padded: whether one forward takes rows of different lengths.
    """
    reason = ""
    for backend in (one for one in BACKENDS if one.device_type == device.type):
        obstacle = backend.obstacle(device, layout) or _model_obstacle(layout, is_padded)
        if obstacle is None:
            return BackendSelection(backend, "kernels read the pages, with no gather")
        reason = reason or obstacle
    return BackendSelection(None, reason or f"no kernels read the pages on {device.type}")


def _model_obstacle(layout: CacheLayout | None, is_padded: bool) -> str | None:
    if layout is not None:
        keyed = [layer for layer in layout.layers if layer.keys]
        if not keyed:
            return "no layer keeps keys"
        if any(layer.index or layer.is_recurrent for layer in keyed):
            return "some layers keep more than keys and values"
    return None if is_padded else "the model takes only rows of one length together"
