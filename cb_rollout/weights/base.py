"""What every way of getting the trainer's weights offers the generator."""

from typing import Protocol

import torch
from transformers import PreTrainedModel

from cb_rollout.errors import WeightSyncError

MAX_NAMES = 20
# Of the tensors that differ, as many as a message can hold.


class WeightSynchronizer(Protocol):
    """Keeps the module that generates up to date; called while the engine is paused."""

    module: PreTrainedModel
    """Generates. Its parameters' storage never moves."""
    trained: torch.nn.Module
    """Is trained, maybe wrapped; its forward is what log-probabilities are held against."""
    autocast_dtype: torch.dtype | None
    """What forwards of either are autocast to; None: nothing."""
    is_collective: bool
    """Whether a sync, and a forward of `trained`, need every process at once."""

    def follow(self, trained: torch.nn.Module) -> None:
        """The same model is trained in another wrapper from now on."""
        ...

    def sync(self) -> int:
        """Take the trained weights over; returns the bytes that were written.

        Raises:
            WeightSyncError: the tensors of the two modules do not match; nothing was copied.
        """
        ...

    def differing(self) -> list[str]:
        """Names of the tensors that are not what a sync would make them now."""
        ...


def require_equal(weights: WeightSynchronizer) -> None:
    """Raise `WeightSyncError` with the tensors in which the two modules differ."""
    names = weights.differing()
    if names:
        rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        raise WeightSyncError(
            f"{len(names)} tensors of the rollout copy differ from the training module after a "
            f"sync: {', '.join(names[:MAX_NAMES])}{rest}. A frozen tensor written through .data is "
            "not seen to have changed; write it under torch.no_grad() instead, or give it "
            "requires_grad."
        )
