"""Reach past the public API of torch (2.11 to 2.13): wrappers, hooks and OpenMP workers.

Keeps no state. A change upstream breaks this file, and no other.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as _module
from transformers import PreTrainedModel


def plain_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The model's class; `fully_shard` of torch 2.13 derives one of its own from it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def wrapped_layer(module: Any) -> torch.nn.Module | None:
    """The layer inside torch 2.13's wrappers: compilation, checkpointing, FSDP1; None: no such."""
    inner = vars(module).get("_modules", {})
    names = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    return next((inner[name] for name in names if name in inner), None)


def compute_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of the first floating-point parameter."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


HARMLESS = "PreTrainedModel.enable_input_require_grads"
# transformers 5.23 hooks embeddings there for gradient checkpointing under adapters; without
# gradients it does nothing.


def has_hooks(model: torch.nn.Module) -> bool:
    """Whether anyone steps into the forward of a module, which no captured forward would notice."""
    if _module._has_any_global_hook():
        return True
    for module in model.modules():
        is_replaced = module is not model and "forward" in module.__dict__
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if is_replaced or not all(_is_harmless(hook) for hook in hooks):
            return True
    return False


def _is_harmless(hook: Any) -> bool:
    return getattr(hook, "__qualname__", "").startswith(HARMLESS)


SOFT = 1
# OpenMP 5.0's omp_pause_soft: keeps settings, and ends threads.


def release_workers() -> bool:
    """End the calling thread's workers, which are made anew when it computes next.

    Returns:
        Whether it was done: not where torch computes without libgomp.
    """
    libgomp = _libgomp()
    return libgomp is not None and libgomp.omp_pause_resource_all(SOFT) == 0


@cache
def _libgomp() -> ctypes.CDLL | None:
    """The one that torch loaded (2.11 to 2.13), from libgomp 10 on."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    found = [path for path in paths if "/libgomp" in path]
    # Of two, which one torch computes with is not known.
    if len(found) != 1:
        return None
    library = ctypes.CDLL(found[0])
    return library if hasattr(library, "omp_pause_resource_all") else None


def captured_weights(model: torch.nn.Module) -> list[object]:
    """Return what a captured forward relies on: tensors' addresses, and peft's adapters."""
    tensors = [*model.parameters(), *model.buffers()]
    found: list[object] = [tensor.data_ptr() for tensor in tensors]
    module: Any
    for module in model.modules():
        if hasattr(module, "merged_adapters"):
            found += [
                tuple(module.active_adapters),
                module.disable_adapters,
                tuple(module.merged_adapters),
                dict(getattr(module, "scaling", {})),
            ]
    return found
