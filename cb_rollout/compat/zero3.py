"""Reach past the public API of DeepSpeed ZeRO-3 (0.18)."""

from typing import Any

import torch


def is_zero3(tensor: torch.Tensor) -> bool:
    """Return whether ZeRO-3 shards a parameter (DeepSpeed 0.18 marks it by `ds_id`)."""
    return hasattr(tensor, "ds_id")


def zero3_shape(tensor: Any) -> torch.Size:
    """Return the whole shape of a ZeRO-3 parameter, whose own is empty (DeepSpeed 0.18)."""
    return torch.Size(tensor.ds_shape)


def zero3_slice(tensor: Any) -> torch.Tensor:
    """Return this process's flat slice of a ZeRO-3 parameter (DeepSpeed 0.18)."""
    return tensor.ds_tensor
