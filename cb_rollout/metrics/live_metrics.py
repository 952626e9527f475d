"""Keep an engine's distributions, and render its metrics as Prometheus text (format 0.0.4).

Computes no other metric: `metrics.registry` defines them. Any thread may call this module.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

from cb_rollout.metrics import registry
from cb_rollout.metrics.registry import (
    BUCKETS,
    DISTRIBUTIONS,
    LIVE_METRICS,
    Distribution,
    MetricKind,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cb_rollout.engine.request import Request
    from cb_rollout.metrics.registry import EngineCounters, EngineStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PREFIX = "cb_rollout_"


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


class Durations:
    """Keep the seconds of an engine's steps, sequences and calls in memory."""

    def __init__(self) -> None:
        self.histograms = {distribution: Histogram() for distribution in DISTRIBUTIONS}

    def record(self, distribution: Distribution, seconds: float) -> None:
        self.histograms[distribution].record(seconds)

    @contextmanager
    def timed(self, distribution: Distribution) -> Iterator[None]:
        """Record the time spent inside."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.record(distribution, time.perf_counter() - started)

    def record_ended(self, request: Request) -> None:
        """Record a sequence's seconds from submission to its end, in queue, prefill and decode."""
        now = time.perf_counter()
        self.record(registry.REQUEST, now - request.created_time)
        if request.admitted_time is not None:
            self.record(registry.QUEUE, request.admitted_time - request.created_time)
        if request.admitted_time is not None and request.first_token_time is not None:
            self.record(registry.PREFILL, request.first_token_time - request.admitted_time)
            self.record(registry.DECODE, now - request.first_token_time)


def exposition(counters: EngineCounters, status: EngineStatus, durations: Durations) -> str:
    """Return every metric in Prometheus' text format; no label comes from a caller."""
    return "".join(f"{line}\n" for line in _lines(counters, status, durations))


def _lines(counters: EngineCounters, status: EngineStatus, durations: Durations) -> Iterator[str]:
    for metric in LIVE_METRICS:
        suffix = "_total" if metric.kind is MetricKind.COUNTER else ""
        name = f"{PREFIX}{metric.name}{suffix}"
        yield from _heading(name, metric.help, metric.kind)
        yield f"{name} {metric.read(counters, status)}"
    for distribution, histogram in durations.histograms.items():
        name = f"{PREFIX}{distribution.name}"
        yield from _heading(name, distribution.help, "histogram")
        counts, total = histogram.read()
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {total}"
        yield f"{name}_count {counts[-1]}"


def _heading(name: str, help_text: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
