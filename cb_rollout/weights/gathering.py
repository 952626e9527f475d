"""Whole tensors from wherever a trainer keeps them, and the switch between those places."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from cb_rollout.compat import fsdp as _compat_fsdp
from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.compat import zero3 as zero3_compat
from cb_rollout.weights.fsdp1 import Fsdp1Gathering
from cb_rollout.weights.fsdp2 import Fsdp2Gathering
from cb_rollout.weights.zero3 import Zero3Gathering


class Gathering(Protocol):
    """Reads one trainer's tensors."""

    is_collective: bool
    """Whether every process must ask for the same tensors in the same order."""

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is trained, where a module shows something that is made from it."""
        ...

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Shape of the whole tensor."""
        ...

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part that this process holds, whose storage and version tell a change."""
        ...

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """What must be whole at once to read these, by identity, each with its bytes."""
        ...

    def whole(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[list[torch.Tensor]]:
        """Whole tensors, to be read inside the context only."""
        ...


class PlainGathering:
    """A process that holds everything: alone, or one of several under DDP."""

    is_collective = False

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its own."""
        return tensor

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Its own."""
        return tensor.shape

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of it."""
        return tensor

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """The tensors."""
        return {id(tensor): tensor.nbytes for tensor in tensors}

    @contextmanager
    def whole(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The tensors themselves."""
        yield list(tensors)


def create_gathering(model: torch.nn.Module) -> Gathering:
    """How the model's tensors are read as they lie now; a trainer may shard them at any time.

    `model` comes with its wrappers: one of them may be what FSDP hangs parameters on.
    """
    if _compat_fsdp.fsdp1_units(model):
        return Fsdp1Gathering(model)
    if any(zero3_compat.is_zero3(parameter) for parameter in model.parameters()):
        return Zero3Gathering()
    return Fsdp2Gathering(model) if fsdp_compat.is_sharded(model) else PlainGathering()
