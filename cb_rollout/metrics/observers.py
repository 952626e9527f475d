"""Observe an engine through hooks, whose errors never reach it.

Owns the fan-out to observers, and `Recorder`, which keeps distributions in memory. Uses no
telemetry library. Each hook names the thread that calls it.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

from cb_rollout.metrics import registry
from cb_rollout.metrics.registry import BUCKETS, DISTRIBUTIONS, Distribution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cb_rollout.engine.request import Request

_LOGGER = logging.getLogger(__name__)


class Observer:
    """Hooks that do nothing; a subclass overrides some. The engine waits for each hook."""

    def submitted(self, requests: Sequence[Request]) -> None:
        """Note queued sequences; called on the thread that submits them."""

    def stepped(self, seconds: float, is_prefill: bool) -> None:
        """Note one step and its seconds; called on the engine's thread."""

    def ended(self, request: Request) -> None:
        """Note a sequence with its final status; called on the engine's thread."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block under `name`; entered on the calling thread."""
        yield

    @contextmanager
    def joined(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Attribute submissions inside to a client, named by its HTTP headers."""
        yield


class Observers(Observer):
    """Forward every event to observers; one that raises is logged and removed."""

    def __init__(self) -> None:
        self._observers: tuple[Observer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._observers)

    def add(self, observer: Observer) -> None:
        self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> None:
        self._observers = tuple(other for other in self._observers if other is not observer)

    def submitted(self, requests: Sequence[Request]) -> None:
        self._notify(lambda observer: observer.submitted(requests))

    def stepped(self, seconds: float, is_prefill: bool) -> None:
        self._notify(lambda observer: observer.stepped(seconds, is_prefill))

    def ended(self, request: Request) -> None:
        self._notify(lambda observer: observer.ended(request))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with ExitStack() as spans:
            self._notify(lambda observer: spans.enter_context(observer.span(name)))
            yield

    @contextmanager
    def joined(self, headers: Mapping[str, str]) -> Iterator[None]:
        with ExitStack() as clients:
            self._notify(lambda observer: clients.enter_context(observer.joined(headers)))
            yield

    def _notify(self, call: Callable[[Observer], object]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception:
                _LOGGER.warning("%r raised, and was removed", observer, exc_info=True)
                self.remove(observer)


class Histogram:
    """Count values by bucket; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def record(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(BUCKETS, value)] += 1
            self._sum += value

    def read(self) -> tuple[list[int], float]:
        """Return the number of values at or below each bound, the last all, and the values' sum."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum


class Recorder(Observer):
    """Keep every distribution in memory; a subclass may export the values too."""

    def __init__(self) -> None:
        self.histograms = {distribution.name: Histogram() for distribution in DISTRIBUTIONS}

    def record(self, distribution: Distribution, seconds: float) -> None:
        self.histograms[distribution.name].record(seconds)

    def stepped(self, seconds: float, is_prefill: bool) -> None:
        self.record(registry.PREFILL_STEP if is_prefill else registry.DECODE_STEP, seconds)

    def ended(self, request: Request) -> None:
        """Record the seconds from submission to the end, and of queue, prefill and decode."""
        now = time.perf_counter()
        self.record(registry.REQUEST, now - request.created_time)
        if request.admitted_time is not None:
            self.record(registry.QUEUE, request.admitted_time - request.created_time)
        if request.admitted_time is not None and request.first_token_time is not None:
            self.record(registry.PREFILL, request.first_token_time - request.admitted_time)
            self.record(registry.DECODE, now - request.first_token_time)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.record(registry.DISTRIBUTION_OF_SPAN[name], time.perf_counter() - started)
