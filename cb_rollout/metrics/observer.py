"""Report the events of engines and trainers to an observer: the port of traces and live metrics.

Owns the process's only observer, which does nothing until another one is set, and the list of the
process's engines. Uses no telemetry library: `integrations/otel/` implements an observer. The
engine calls the observer for each submission, step and end of a sequence, never for a token.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cb_rollout.engine.request import Request
    from cb_rollout.metrics.registry import Distribution, EngineCounters, EngineStatus


class ObservedStep(NamedTuple):
    """One forward of an engine, with its sampling."""

    model_name: str
    """The engine's checkpoint, as its config names it; empty: the config names none."""
    is_prefill: bool
    added: EngineCounters
    """Increments of the engine's counters in the step."""
    started: Sequence[Request]
    """Sequences that got their first token."""
    num_blocks_used: int
    max_batch_tokens: int


class ObservedSpan:
    """A span of a run that has begun; this base class observes nothing."""

    def set(self, **attributes: Any) -> None:
        """Describe the span with numbers and texts that are known by now."""

    def add(self, name: str, began: float, ended: float) -> None:
        """Add a child span that has ended; times are of `time.perf_counter`."""

    @contextmanager
    def within(self) -> Iterator[None]:
        """Make spans observed inside the block its children; an exception ends it as failed."""
        yield

    def end(self, error: BaseException | None = None) -> None:
        """End the span, as failed if there is an `error`; ending it again does nothing."""


UNOBSERVED = ObservedSpan()


class Observer:
    """Hooks that engines and trainers call; they do nothing unless a subclass overrides them.

    The caller waits for each hook, and none may raise.
    """

    is_observing = False
    """False: the engine does not call `stepped`."""

    def submitted(self, requests: Sequence[Request]) -> None:
        """Note queued sequences, on the thread that submits them; may set their `observed`."""

    def stepped(self, step: ObservedStep) -> None:
        """Note a step, on the engine's thread."""

    def recorded(self, distribution: Distribution, seconds: float) -> None:
        """Note a value of a distribution, on the thread that measured it."""

    def ended(
        self, request: Request, model_name: str, ended: float, error: BaseException | None = None
    ) -> None:
        """Note the end of a sequence, on the engine's thread.

        `ended` is a time of `time.perf_counter`; `error` ended the engine, and so the sequence.
        """

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[ObservedSpan]:
        """Observe the block as a span, and what is submitted inside as its children."""
        yield UNOBSERVED

    def begin(self, name: str, **attributes: Any) -> ObservedSpan:
        """Begin a span that a later call ends; it does not become this thread's current span."""
        return UNOBSERVED

    @contextmanager
    def joined(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Make the block a part of the trace that the headers of an HTTP request name."""
        yield


class StatusSource(Protocol):
    """An engine, as gauges read it, from any thread."""

    def status(self) -> EngineStatus: ...

    @property
    def bytes_per_block(self) -> int: ...


NOBODY = Observer()

_observer: Observer = NOBODY
_engines: weakref.WeakSet[StatusSource] = weakref.WeakSet()
_engines_lock = threading.Lock()


def observer() -> Observer:
    """Return the process's observer."""
    return _observer


def observe_with(new: Observer) -> None:
    """Make this the process's observer from now on; `NOBODY` ends the observation."""
    global _observer
    _observer = new


def add_engine(engine: StatusSource) -> None:
    """Let gauges read an engine for as long as it exists."""
    with _engines_lock:
        _engines.add(engine)


def engines() -> list[StatusSource]:
    """Return the engines of this process."""
    with _engines_lock:
        return list(_engines)
