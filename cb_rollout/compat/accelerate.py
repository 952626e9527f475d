"""Reach past the public API of accelerate 1.15: its wrapper of a forward, and its plugins."""

import weakref
from copy import copy
from typing import Any, TypeVar

import torch
from accelerate.utils.operations import ConvertOutputsToFp32

Module = TypeVar("Module", bound=torch.nn.Module)


def below_accelerate(module: Module) -> Module:
    """Return the module without the autocast and float32 outputs of accelerate 1.15's `prepare`.

    A wrapped module is not changed, since a trainer may run it: its shallow copy is returned.
    """
    if (forward := _wrapped_forward(module)) is None:
        return module
    module = copy(module)
    module.forward = forward
    return module


def _wrapped_forward(module: Any) -> Any:
    """Return the forward that accelerate 1.15 has wrapped; None: it has wrapped none.

    None for a module with hooks, which would be called with its shallow copy.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    return getattr(module, "_original_forward", None) if has_autocast(module) else None


def has_autocast(module: Any) -> bool:
    """Return whether accelerate 1.15 has put a module's forward under autocast."""
    wrapper = getattr(vars(module).get("forward"), "__wrapped__", None)
    return isinstance(wrapper, ConvertOutputsToFp32)


def forward_of(module: Any) -> object:
    """Return the function that `below_accelerate` runs, replaced or its class's; not held."""
    forward = _wrapped_forward(module) or vars(module).get("forward", type(module).forward)
    function = getattr(forward, "__func__", forward)
    try:
        return weakref.ref(function)
    except TypeError:
        return function


def shards_models(accelerator: Any) -> bool:
    """Return whether accelerate 1.15 shards the models that it prepares, by FSDP or ZeRO-3."""
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return True
    return zero_stage(accelerator) == 3


def zero_stage(accelerator: Any) -> int | None:
    """Return the ZeRO stage of accelerate 1.15's DeepSpeed plugin; None: there is none."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.zero_stage
