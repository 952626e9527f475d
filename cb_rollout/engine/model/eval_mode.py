"""Holds a model in evaluation mode while engines use it, and puts it back as it was.

Changes nothing on the model but its `training` flags. Any thread.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

_LEASE_LOCK = threading.Lock()
_LEASES: WeakKeyDictionary[torch.nn.Module, tuple[int, list[torch.nn.Module]]] = WeakKeyDictionary()
# How many engines hold each model, and the modules to put back in training mode.


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Hold the model in evaluation mode; after its last holder, set every `training` flag back."""
    with _LEASE_LOCK:
        num_holders, training = _LEASES.get(model, (0, []))
        found = [module for module in model.modules() if module.training]
        for module in found:
            module.training = False
        _LEASES[model] = (num_holders + 1, training + found)
    try:
        yield
    finally:
        with _LEASE_LOCK:
            # Where an engine is dropped amid its work, the model may be gone before its lease.
            num_holders, training = _LEASES.pop(model, (1, []))
            if num_holders > 1:
                _LEASES[model] = (num_holders - 1, training)
            else:
                for module in training:
                    module.training = True
