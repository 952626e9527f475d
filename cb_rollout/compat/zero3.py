"""Reach past the public API of DeepSpeed ZeRO-3 (0.18), and of accelerate 1.15 for it."""

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


def shards_models(accelerator: Any) -> bool:
    """Return whether accelerate 1.15 shards the models that it prepares, by FSDP or ZeRO-3."""
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return True
    return zero_stage(accelerator) == 3


def zero_stage(accelerator: Any) -> int | None:
    """Return the ZeRO stage of accelerate 1.15's DeepSpeed plugin; None: there is none."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.zero_stage
