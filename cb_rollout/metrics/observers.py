"""Who may look on while an engine works: hooks that see, and change nothing.

Owns the fan-out to those who look, and that none of them can harm the work. Knows no telemetry.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cb_rollout.engine.request import Request


logger = logging.getLogger(__name__)


class Observer:
    """Sees nothing; a subclass overrides what it wants to see. Quick, or it holds up the engine."""

    def submitted(self, requests: Sequence[Request]) -> None:
        """Sequences were queued; called on the thread that asked for them."""

    def stepped(self, seconds: float, is_prefill: bool) -> None:
        """One step was run; called on the engine's thread."""

    def ended(self, request: Request) -> None:
        """A sequence reached its final status; called on the engine's thread."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Something that takes time is done inside, by the calling thread."""
        yield

    @contextmanager
    def joined(self, headers: Mapping[str, str]) -> Iterator[None]:
        """What the calling thread asks for inside is a client's, told of by its HTTP headers."""
        yield


class Observers(Observer):
    """All who look on; one that raises is warned of, and looks on no longer."""

    def __init__(self) -> None:
        """Nobody looks on yet."""
        self._observers: tuple[Observer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._observers)

    def add(self, observer: Observer) -> None:
        """Let one more look on, from now on."""
        self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> None:
        """Let one look on no longer."""
        self._observers = tuple(other for other in self._observers if other is not observer)

    def submitted(self, requests: Sequence[Request]) -> None:
        """Sequences were queued."""
        self._tell(lambda observer: observer.submitted(requests))

    def stepped(self, seconds: float, is_prefill: bool) -> None:
        """One step was run."""
        self._tell(lambda observer: observer.stepped(seconds, is_prefill))

    def ended(self, request: Request) -> None:
        """A sequence reached its final status."""
        self._tell(lambda observer: observer.ended(request))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Something that takes time is done inside."""
        with ExitStack() as spans:
            self._tell(lambda observer: spans.enter_context(observer.span(name)))
            yield

    @contextmanager
    def joined(self, headers: Mapping[str, str]) -> Iterator[None]:
        """What is asked for inside is a client's."""
        with ExitStack() as clients:
            self._tell(lambda observer: clients.enter_context(observer.joined(headers)))
            yield

    def _tell(self, what: Callable[[Observer], object]) -> None:
        for observer in self._observers:
            try:
                what(observer)
            except Exception:
                logger.warning("%r raised, and is told nothing more", observer, exc_info=True)
                self.remove(observer)
