"""Read tensors wherever a trainer keeps them; one `WeightSource` for each framework.

To add one, write its class in a new file and list it in `SOURCES`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from cb_rollout.weights.fsdp1 import Fsdp1Source
from cb_rollout.weights.fsdp2 import Fsdp2Source
from cb_rollout.weights.split import Splits, parts
from cb_rollout.weights.zero3 import Zero3Source


class WeightSource(Protocol):
    """Read the tensors of a training module that one framework lays out."""

    is_collective: bool
    """True: every process must request the same tensors in the same order."""

    def __init__(self, model: torch.nn.Module) -> None: ...

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        """Return True if this source reads `model`, given with its wrappers."""
        ...

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the trained tensor behind one that the module shows."""
        ...

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return the shape of the whole tensor."""
        ...

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part that this process holds; its storage and version reveal a write."""
        ...

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Map the identity of each unit that must be gathered to read `tensors` to its bytes."""
        ...

    def narrowed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what to gather of a tensor that will be stored in `dtype`."""
        ...

    def read(
        self, tensors: Sequence[torch.Tensor], splits: Splits | None = None
    ) -> AbstractContextManager[list[torch.Tensor]]:
        """Gather tensors, valid inside the context only.

        Args:
            tensors: `stored` tensors.
            splits: for each the division of which to read this process's part, or None to read all
                of it; None: all of every tensor.
        """
        ...


class PlainSource:
    """Read a model that this process holds whole, alone or under DDP."""

    is_collective = False

    def __init__(self, model: torch.nn.Module) -> None: ...

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        """Match every model."""
        return True

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return its shape."""
        return tensor.shape

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Map each tensor to its bytes."""
        return {id(tensor): tensor.nbytes for tensor in tensors}

    def narrowed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor: nothing is gathered."""
        return tensor

    @contextmanager
    def read(
        self, tensors: Sequence[torch.Tensor], splits: Splits | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the tensors themselves, or parts of them."""
        yield parts(tensors, splits)


# The first source that matches a model reads it.
SOURCES: list[type[WeightSource]] = [Fsdp1Source, Zero3Source, Fsdp2Source, PlainSource]


def create_source(model: torch.nn.Module) -> WeightSource:
    """Create the source of a model, given with its wrappers, as it is laid out now.

    A trainer may shard the model at any time.
    """
    return next(source for source in SOURCES if source.matches(model))(model)
