"""Gather whole tensors of a model under DeepSpeed ZeRO-3. The only file that imports deepspeed.

DeepSpeed is optional; it is imported when a parameter carries its marks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import zero3 as zero3_compat
from cb_rollout.weights.split import Splits, parts


def register_head(model: PreTrainedModel) -> None:
    """Tell ZeRO-3 that the model itself reads the weight of its language-model head.

    TRL 1.16's loss multiplies by it without calling the head. DeepSpeed 0.19 detects that, but not
    after a forward that did call the head; the backward then meets an empty weight.
    """
    head: Any = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if isinstance(weight, torch.nn.Parameter) and zero3_compat.is_zero3(weight):
        import deepspeed  # pyright: ignore[reportMissingImports]  # optional

        deepspeed.zero.register_external_parameter(model, weight)


class Zero3Source:
    """Read a model of which each process holds a flat slice of every parameter."""

    is_collective = True

    def __init__(self, model: torch.nn.Module) -> None: ...

    @staticmethod
    def matches(model: torch.nn.Module) -> bool:
        """Match a model with a ZeRO-3 parameter."""
        return any(zero3_compat.is_zero3(parameter) for parameter in model.parameters())

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return the shape that DeepSpeed recorded on the parameter."""
        return zero3_compat.zero3_shape(tensor) if zero3_compat.is_zero3(tensor) else tensor.shape

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's slice."""
        return zero3_compat.zero3_slice(tensor) if zero3_compat.is_zero3(tensor) else tensor

    def pieces(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Map each tensor to its whole bytes."""
        return {id(t): self.shape(t).numel() * t.element_size() for t in tensors}

    def narrowed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor: DeepSpeed gathers a parameter in its own dtype."""
        return tensor

    @contextmanager
    def read(
        self, tensors: Sequence[torch.Tensor], splits: Splits | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the parameters, gathered inside the context and emptied after it."""
        import deepspeed  # pyright: ignore[reportMissingImports]  # optional

        sharded: list[Any] = [tensor for tensor in tensors if zero3_compat.is_zero3(tensor)]
        with deepspeed.zero.GatheredParameters(sharded, modifier_rank=None):
            yield parts([tensor.data for tensor in tensors], splits)
