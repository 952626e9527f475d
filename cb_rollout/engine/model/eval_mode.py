"""Keep a model in evaluation mode while engines use it, and restore its mode afterwards.

Changes only `training` flags, and what `Module.compile()` did. Any thread may call it.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from cb_rollout.compat.patching import replacing
from cb_rollout.compat.rope import forget_longer_rows
from cb_rollout.compat.torch import as_in_evaluation

_LOCK = threading.Lock()


@dataclass(slots=True)
class _Use:
    """The users of a model, and the context that the last user closes to restore its modules."""

    num_users: int = 0
    replaced: ExitStack = field(default_factory=ExitStack)


_USED: WeakKeyDictionary[torch.nn.Module, _Use] = WeakKeyDictionary()


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Set evaluation mode; after the last concurrent use, restore every `training` flag."""
    with _LOCK:
        use = _USED.setdefault(model, _Use())
        use.num_users += 1
    try:
        with _LOCK:
            if attributes := as_in_evaluation(model):
                use.replaced.enter_context(replacing(attributes))
            if use.num_users == 1:
                forget_longer_rows(model)
        yield
    finally:
        with _LOCK:
            use.num_users -= 1
            if not use.num_users:
                # If an engine is dropped during a step, the model may be collected before this.
                _USED.pop(model, None)
                use.replaced.close()
