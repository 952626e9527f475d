"""Keep a model in evaluation mode while engines use it, and restore its mode afterwards.

Changes only the `training` flags of the model's modules. Any thread may call it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

_LOCK = threading.Lock()

# For each model, the number of its users, and the modules to set back to training mode.
_USED: WeakKeyDictionary[torch.nn.Module, tuple[int, list[torch.nn.Module]]] = WeakKeyDictionary()


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Set evaluation mode; after the last concurrent use, restore every `training` flag."""
    with _LOCK:
        num_users, training = _USED.get(model, (0, []))
        found = [module for module in model.modules() if module.training]
        for module in found:
            module.training = False
        _USED[model] = (num_users + 1, training + found)
    try:
        yield
    finally:
        with _LOCK:
            # Where an engine is dropped during a step, the model may be collected before this.
            num_users, training = _USED.pop(model, (1, []))
            if num_users > 1:
                _USED[model] = (num_users - 1, training)
            else:
                for module in training:
                    module.training = True
