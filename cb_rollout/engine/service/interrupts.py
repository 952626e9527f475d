"""Defer Python's signal handlers, which the main thread runs, while an engine's state changes."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

# Interrupts, schedulers' notices, and the signals that scripts commonly handle.
_DEFERRED_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip

# A deferred signal does not end a wait.
POLL_SECONDS = 0.1


class Interrupts:
    """Signals deferred by the outermost block; main thread only."""

    def __init__(self, numbers: Sequence[signal.Signals] = ()) -> None:
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}
        for number in numbers:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
        self._caught: dict[int, FrameType | None] = {}
        self._is_deferring = False

    def begin(self) -> None:
        for number in self._handlers:
            signal.signal(number, self._defer)
        self._is_deferring = True

    def end(self) -> None:
        try:
            self._is_deferring = False
            self._restore()
        finally:
            # A handler that was restored may have raised before the others were restored.
            self._restore()
            self.deliver()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def deliver(self) -> None:
        """Run the handlers of the signals that were caught: no state is half changed here."""
        if not self._caught:
            return
        caught = self._caught
        self._caught = {}
        # Each handler runs, even if another raises.
        with ExitStack() as handlers:
            for number, frame in reversed(caught.items()):
                handlers.callback(self._handlers[signal.Signals(number)], number, frame)

    def limit(self, seconds: float | None) -> float | None:
        """Return the longest wait before the next `deliver`, at most `seconds`; None: no limit."""
        if not self._handlers:
            return seconds
        return POLL_SECONDS if seconds is None else min(seconds, POLL_SECONDS)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        # A repeated signal ends a block that hangs.
        if not self._is_deferring or number in self._caught:
            self._caught.pop(number, None)
            self._handlers[signal.Signals(number)](number, frame)
        else:
            self._caught[number] = frame


_NONE = Interrupts()
# The `Interrupts` of the main thread's outermost block.
_outermost: Interrupts | None = None


@contextmanager
def interrupts_deferred() -> Iterator[Interrupts]:
    """Run Python's signal handlers after the block, or at its `deliver()`, instead of inside it.

    A block inside another one defers to it. A repeated signal is handled at once: a block may hang.
    """
    global _outermost
    if threading.current_thread() is not threading.main_thread():
        yield _NONE
    elif _outermost is not None:
        yield _outermost
    else:
        interrupts = Interrupts(_DEFERRED_SIGNALS)
        try:
            _outermost = interrupts
            interrupts.begin()
            yield interrupts
        finally:
            _outermost = None
            interrupts.end()
