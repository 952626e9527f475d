"""Reaches past public APIs for who steps into forwards, with the version and why.

torch 2.11 to 2.13 offer no list of a module's hooks.
"""

from typing import Any

import torch
from torch.nn.modules import module as _module

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
