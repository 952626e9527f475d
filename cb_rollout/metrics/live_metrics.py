"""Keep an engine's distributions and timeline, and render Prometheus text (0.0.4)."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from contextlib import contextmanager
from dataclasses import fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from cb_rollout.metrics import registry
from cb_rollout.metrics.observer import observer
from cb_rollout.metrics.registry import BUCKETS, DISTRIBUTIONS, Distribution

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cb_rollout.engine.request import Request
    from cb_rollout.metrics.observer import ObservedSpan
    from cb_rollout.metrics.registry import EngineCounters, EngineStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PREFIX = "cb_rollout_"

# Maximum number of spans, and of sequences, that a timeline keeps until they are taken: the newest.
MAX_SPANS = 4096

# Successive forwards of one kind form one span if less than `MAX_GAP_SECONDS` lies between them.
FORWARDS = ("prefill", "decode")
MAX_GAP_SECONDS = 0.005


class Span(NamedTuple):
    """A time span of a run, in seconds of `time.perf_counter`; of `time.time` in records."""

    name: str
    began: float
    ended: float
    seconds: float
    """Time of its forwards, without the gaps between them; for other spans, from begin to end."""
    number: int
    """Number of its forwards; for an optimizer step, the step's number."""


class SequenceTimes(NamedTuple):
    """The times of a sequence, on the clock of the spans."""

    request_id: str
    created: float
    admitted: float | None
    """None: it ended while it was waiting."""
    first_token: float | None
    ended: float


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
        """Return cumulative counts by bucket, ending with the total, and the values' sum."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum


class Durations:
    """Record the durations of an engine's steps, sequences and calls, and their timeline."""

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        """The checkpoint of the engine's model, for the observer."""
        self.histograms = {distribution: Histogram() for distribution in DISTRIBUTIONS}
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._sequences: deque[SequenceTimes] = deque(maxlen=MAX_SPANS)
        # The engine's thread adds spans and sequences, and the trainer's thread takes them.
        self._timeline_lock = threading.Lock()

    def record(self, distribution: Distribution, seconds: float) -> None:
        self.histograms[distribution].record(seconds)
        observer().recorded(distribution, seconds)

    def record_since(self, distribution: Distribution, began: float) -> None:
        """Record the time since `began`."""
        self.record(distribution, self.add_span(_span_name(distribution), began))

    def add_span(self, name: str, began: float, number: int = 1) -> float:
        """Add a span from `began` until now to the timeline; return its seconds."""
        ended = time.perf_counter()
        seconds = ended - began
        with self._timeline_lock:
            span = Span(name=name, began=began, ended=ended, seconds=seconds, number=number)
            if self._continues_last(span):
                last = self._spans.pop()
                span = Span(
                    name=name,
                    began=last.began,
                    ended=ended,
                    seconds=last.seconds + seconds,
                    number=last.number + number,
                )
            self._spans.append(span)
        return seconds

    def _continues_last(self, span: Span) -> bool:
        """Return whether a span is a forward that directly follows a forward of the same kind."""
        if span.name not in FORWARDS or not self._spans:
            return False
        last = self._spans[-1]
        return last.name == span.name and span.began - last.ended < MAX_GAP_SECONDS

    def take_timeline(self) -> tuple[list[Span], list[SequenceTimes]]:
        """Return the timeline since the last call, in `time.time` seconds, and clear it."""
        with self._timeline_lock:
            spans = list(self._spans)
            sequences = list(self._sequences)
            self._spans.clear()
            self._sequences.clear()
        shift = time.time() - time.perf_counter()

        def moved(seconds: float) -> float:
            return round(seconds + shift, 6)

        moved_spans = [
            span._replace(began=moved(span.began), ended=moved(span.ended)) for span in spans
        ]
        moved_sequences: list[SequenceTimes] = []
        for times in sequences:
            moved_sequences.append(
                SequenceTimes(
                    request_id=times.request_id,
                    created=moved(times.created),
                    admitted=None if times.admitted is None else moved(times.admitted),
                    first_token=None if times.first_token is None else moved(times.first_token),
                    ended=moved(times.ended),
                )
            )
        return moved_spans, moved_sequences

    @contextmanager
    def timed(self, distribution: Distribution, **attributes: Any) -> Iterator[ObservedSpan]:
        """Record the time spent inside; the observer sees it as a span with these attributes."""
        began = time.perf_counter()
        with observer().span(_span_name(distribution), **attributes) as span:
            try:
                yield span
            finally:
                self.record_since(distribution, began)

    def record_ended(self, request: Request) -> None:
        """Record a sequence's seconds: in all, in the queue, in prefill and in decode."""
        times = SequenceTimes(
            request_id=request.request_id,
            created=request.created_time,
            admitted=request.admitted_time,
            first_token=request.first_token_time,
            ended=time.perf_counter(),
        )
        with self._timeline_lock:
            self._sequences.append(times)
        self.record(registry.REQUEST, times.ended - times.created)
        if times.admitted is not None:
            self.record(registry.QUEUE, times.admitted - times.created)
            if times.first_token is not None:
                self.record(registry.PREFILL, times.first_token - times.admitted)
                self.record(registry.DECODE, times.ended - times.first_token)
        observer().ended(request, self.model_name, times.ended)


def _span_name(distribution: Distribution) -> str:
    return distribution.name.removesuffix("_seconds").removesuffix("_step")


def exposition(counters: EngineCounters, status: EngineStatus, durations: Durations) -> str:
    """Return every metric in Prometheus' text format; no label holds a caller's text."""
    lines = [
        *_field_lines(counters, metric_type="counter", suffix="_total"),
        *_field_lines(status, metric_type="gauge", suffix=""),
    ]
    for distribution, histogram in durations.histograms.items():
        name = f"{PREFIX}{distribution.name}"
        lines.extend(_heading(name, distribution.help, "histogram"))
        counts, total = histogram.read()
        for bound, count in zip((*BUCKETS, "+Inf"), counts, strict=True):
            lines.append(f'{name}_bucket{{le="{bound}"}} {count}')
        lines.append(f"{name}_sum {total}")
        lines.append(f"{name}_count {counts[-1]}")
    return "\n".join(lines) + "\n"


def _field_lines(
    record: EngineCounters | EngineStatus, metric_type: str, suffix: str
) -> Iterator[str]:
    """Yield the lines of each field that has a help text."""
    for field in fields(record):
        if field.metadata:
            name = f"{PREFIX}{field.name}{suffix}"
            yield from _heading(name, field.metadata["help"], metric_type)
            yield f"{name} {getattr(record, field.name)}"


def _heading(name: str, help_text: str, metric_type: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {metric_type}"]
