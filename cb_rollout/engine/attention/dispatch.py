"""How a model's own forward comes to call our attention, and nobody else's forward does.

Every model of transformers asks one class for its attention function, at every layer of every
forward. While a thread is inside `attending()`, that class answers it with ours, which is told what
it would have found. Other threads find what they always found, and with nobody inside the class is
as transformers left it. The model and its `_attn_implementation` are never touched. Any thread.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from cb_rollout import _compat_attention

Attention = Callable[..., Any]
# Called with the function that would have been found, then with its arguments.


class _Here(threading.local):
    attend: Attention | None = None


_HERE = _Here()
_LOCK = threading.Lock()
_INSIDE: list[Attention] = []
# One entry a thread inside.
_FOUND: list[Attention] = []
# What the class had when the first thread came in; kept for a thread that is between two lookups.


def _lookup(interface: Any, implementation: str, default: Attention) -> Attention:
    found = _FOUND[-1](interface, implementation, default)
    return found if _HERE.attend is None else partial(_HERE.attend, found)


@contextmanager
def attending(attend: Attention) -> Iterator[None]:
    """Have models that this thread calls use `attend(found, module, query, key, value, ...)`."""
    assert _HERE.attend is None, "a forward within a forward"
    with _LOCK:
        if not _INSIDE:
            _FOUND[:] = [_compat_attention.swap_attention_lookup(_lookup)]
        _INSIDE.append(attend)
    _HERE.attend = attend
    try:
        yield
    finally:
        _HERE.attend = None
        with _LOCK:
            _INSIDE.remove(attend)
            if not _INSIDE:
                _compat_attention.swap_attention_lookup(_FOUND[-1])
