"""Keep an engine's distributions and timeline, and render Prometheus text (0.0.4)."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from contextlib import contextmanager
from dataclasses import fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from cb_rollout.metrics import registry
from cb_rollout.metrics.registry import BUCKETS, DISTRIBUTIONS, Distribution
from cb_rollout.metrics.run_records import SequenceTimes, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cb_rollout.engine.request import Request
    from cb_rollout.metrics.registry import EngineCounters, EngineStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PREFIX = "cb_rollout_"

# Spans, and sequences, that a timeline keeps until they are taken; of more the newest.
MAX_SPANS = 4096

# Forwards of one kind are one span where less than `MAX_GAP_SECONDS` lies between them.
FORWARDS = ("prefill", "decode")
MAX_GAP_SECONDS = 0.005


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
    """Keep the seconds of an engine's steps, sequences and calls in memory, and their order."""

    def __init__(self) -> None:
        self.histograms = {distribution: Histogram() for distribution in DISTRIBUTIONS}
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._sequences: deque[SequenceTimes] = deque(maxlen=MAX_SPANS)
        # The engine's thread adds to them, and the trainer's takes them.
        self._timeline_lock = threading.Lock()

    def record(self, distribution: Distribution, seconds: float) -> None:
        self.histograms[distribution].record(seconds)

    def record_since(self, distribution: Distribution, began: float) -> None:
        """Record what began then, and ends now."""
        name = distribution.name.removesuffix("_seconds").removesuffix("_step")
        self.record(distribution, self.add_span(name, began))

    def add_span(self, name: str, began: float, number: int = 1) -> float:
        """Add what began then, and ends now, to the timeline; return its seconds."""
        ended = time.perf_counter()
        seconds = ended - began
        with self._timeline_lock:
            last = self._spans[-1] if name in FORWARDS and self._spans else None
            if last and last.name == name and began - last.ended < MAX_GAP_SECONDS:
                total, number = last.seconds + seconds, last.number + number
                self._spans[-1] = Span(name, last.began, ended, total, number)
            else:
                self._spans.append(Span(name, began, ended, seconds, number))
        return seconds

    def take_timeline(self) -> tuple[list[Span], list[SequenceTimes]]:
        """Return what was added since the last call, by `time.time`, and forget it."""
        shift = time.time() - time.perf_counter()

        def moved(times: Iterable[float | None]) -> list[Any]:
            return [None if t is None else round(t + shift, 6) for t in times]

        with self._timeline_lock:
            spans, ended = [*self._spans], [*self._sequences]
            self._spans.clear()
            self._sequences.clear()
        return (
            [Span._make([span.name, *moved(span[1:3]), *span[3:]]) for span in spans],
            [SequenceTimes._make([name, *moved(times)]) for name, *times in ended],
        )

    @contextmanager
    def timed(self, distribution: Distribution) -> Iterator[None]:
        """Record the time spent inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.record_since(distribution, began)

    def record_ended(self, request: Request) -> None:
        """Record a sequence's seconds from submission to its end, in queue, prefill and decode."""
        now, first = time.perf_counter(), request.first_token_time
        created, admitted = request.created_time, request.admitted_time
        with self._timeline_lock:
            self._sequences.append(SequenceTimes(request.request_id, created, admitted, first, now))
        self.record(registry.REQUEST, now - created)
        if admitted is not None:
            self.record(registry.QUEUE, admitted - created)
            if first is not None:
                self.record(registry.PREFILL, first - admitted)
                self.record(registry.DECODE, now - first)


def exposition(counters: EngineCounters, status: EngineStatus, durations: Durations) -> str:
    """Return every metric in Prometheus' text format; no label comes from a caller."""
    lines: list[str] = []
    for record, kind, suffix in ((counters, "counter", "_total"), (status, "gauge", "")):
        for entry in fields(record):
            if entry.metadata:
                name = f"{PREFIX}{entry.name}{suffix}"
                lines += _heading(name, entry.metadata["help"], kind)
                lines.append(f"{name} {getattr(record, entry.name)}")
    for distribution, histogram in durations.histograms.items():
        name = f"{PREFIX}{distribution.name}"
        lines += _heading(name, distribution.help, "histogram")
        counts, total = histogram.read()
        for bound, count in zip((*BUCKETS, "+Inf"), counts, strict=True):
            lines.append(f'{name}_bucket{{le="{bound}"}} {count}')
        lines += [f"{name}_sum {total}", f"{name}_count {counts[-1]}"]
    return "\n".join([*lines, ""])


def _heading(name: str, help_text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
