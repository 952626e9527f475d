"""Define what every attention backend has: a cache, a traced forward, and a step's inputs."""

from typing import ClassVar

import torch

from cb_rollout.engine.attention.decode_cache import DecodeCache, DecodeInputs
from cb_rollout.engine.attention.traced_forward import TracedForward, Tracing
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout


class AttentionBackend:
    """Prepare the decode steps of one model, one new token per row, on pages without a gather."""

    name: ClassVar[str]
    device_type: ClassVar[str]
    """The `torch.device.type` that the backend runs on."""
    tracing: ClassVar[Tracing | None] = None
    """Settings of the trace of decode forwards; None: the model itself runs."""
    needs_keys: ClassVar[bool] = True
    """False if models with only recurrent layers run too."""
    saves_at_end: ClassVar[bool] = True
    """True if a forward that raises leaves all recurrent states as they were."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        self.cache = DecodeCache(layout, device)
        """Cache that a decode forward is called with."""
        self.traced_forward = TracedForward(None if layout.is_recurrent else self.tracing)

    @property
    def proof(self) -> str:
        """Return the result of the kernels' trial in a child process; "": none was made."""
        return ""

    @staticmethod
    def obstacle(device: torch.device, layout: CacheLayout | None) -> str | None:
        """Return why the backend cannot run; None: it can.

        Args:
            device: the model's, of `device_type`.
            layout: the tensors that the model's layers store; None: not known yet.
        """
        raise NotImplementedError

    def prepare(self, batch: ForwardBatch) -> DecodeInputs:
        """Return the inputs of a forward of rows of one new token."""
        raise NotImplementedError
