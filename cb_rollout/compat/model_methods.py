"""Route the continuous batching methods of chosen transformers models (5.17 to 5.24) elsewhere.

While any model is routed, the methods of `ContinuousMixin` are patched: they look up the model's
route, and fall back to upstream. No attribute is set on the model, so it is copied, pickled and
saved as before. Any thread may call.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.continuous_batching import ContinuousMixin

from cb_rollout.errors import ConfigurationError

METHODS = (
    "init_continuous_batching",
    "destroy_cached_continuous_batching_manager",
    "continuous_batching_context_manager",
    "generate_batch",
)

_lock = threading.RLock()
_routes: weakref.WeakKeyDictionary[PreTrainedModel, Any] = weakref.WeakKeyDictionary()
_upstream: dict[str, Callable[..., Any]] = {}
"""The methods of `ContinuousMixin` while they are replaced."""


def route_of(model: PreTrainedModel) -> Any:
    """Return the object that a model's methods are routed to; None if they are not routed."""
    with _lock:
        return _routes.get(model)


def set_route(model: PreTrainedModel, methods: Any) -> None:
    """Route a model's `METHODS` to `methods`; None ends the route.

    The methods of `methods` get the model as their first argument.

    Raises:
        ConfigurationError: the model's methods are not those of `ContinuousMixin`.
    """
    with _lock:
        if methods is None:
            _routes.pop(model, None)
            if not _routes:
                _restore()
            return
        _require_upstream_methods(model)
        _routes[model] = methods
        if not _upstream:
            _replace()


def _replace() -> None:
    for name in METHODS:
        _upstream[name] = vars(ContinuousMixin)[name]
        setattr(ContinuousMixin, name, _routed(_upstream[name]))


def _restore() -> None:
    for name, method in _upstream.items():
        setattr(ContinuousMixin, name, method)
    _upstream.clear()


def _routed(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        methods = route_of(self)
        if methods is None:
            return upstream(self, *args, **kwargs)
        return getattr(methods, upstream.__name__)(self, *args, **kwargs)

    return method


def _require_upstream_methods(model: PreTrainedModel) -> None:
    kind = type(model).__name__
    if not isinstance(model, ContinuousMixin):
        raise ConfigurationError(
            f"{kind} has none of transformers' methods of continuous batching to install into; "
            "pass a causal language model of transformers, or use cb_rollout.generate_batch."
        )
    for name in METHODS:
        if inspect.getattr_static(model, name) is not vars(ContinuousMixin)[name]:
            raise ConfigurationError(
                f"{kind} has a {name} of its own, which would run instead; remove it, or use "
                "cb_rollout.generate_batch."
            )
