"""An observer that keeps every distribution in memory, for whoever asks. Depends on nothing."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

from cb_rollout.metrics import instruments
from cb_rollout.metrics.observers import Observer
from cb_rollout.metrics.registry import BUCKETS, DISTRIBUTIONS, Distribution

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cb_rollout.engine.request import Request


class Histogram:
    """Values counted by bucket; thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def record(self, value: float) -> None:
        """Count one value."""
        with self._lock:
            self._counts[bisect_left(BUCKETS, value)] += 1
            self._sum += value

    def read(self) -> tuple[list[int], float]:
        """How many values are at or below each bound, the last being all; and the values' sum."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum


class Recorder(Observer):
    """Keeps the distributions; a subclass may send them elsewhere too."""

    def __init__(self) -> None:
        """Start empty."""
        self.histograms = {distribution.name: Histogram() for distribution in DISTRIBUTIONS}

    def record(self, distribution: Distribution, seconds: float) -> None:
        """One thing happened."""
        self.histograms[distribution.name].record(seconds)

    def stepped(self, seconds: float, is_prefill: bool) -> None:
        """One step was run."""
        self.record(instruments.PREFILL_STEP if is_prefill else instruments.DECODE_STEP, seconds)

    def ended(self, request: Request) -> None:
        """A sequence reached its final status."""
        now = time.perf_counter()
        self.record(instruments.REQUEST, now - request.created_time)
        if request.admitted_time is not None:
            self.record(instruments.QUEUE, request.admitted_time - request.created_time)
        if request.admitted_time is not None and request.first_token_time is not None:
            self.record(instruments.PREFILL, request.first_token_time - request.admitted_time)
            self.record(instruments.DECODE, now - request.first_token_time)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Something that takes time is done inside."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.record(instruments.DISTRIBUTION_OF_SPAN[name], time.perf_counter() - started)
