"""Keeps a signal's handler from raising amid work that must not be left half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
# Ctrl-C, a cluster's notice, and those that people give handlers of their own.


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Run Python's signal handlers after the block instead of inside it.

    Of the main thread only, which is where Python runs them. A signal that comes a second time is
    not deferred: a block that hangs can still be interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in DEFERRED}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    caught: dict[int, FrameType | None] = {}

    def defer(number: int, frame: FrameType | None) -> None:
        if number in caught:
            handlers[signal.Signals(number)](number, frame)
        caught[number] = frame

    for number in handlers:
        signal.signal(number, defer)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in caught.items():
        handlers[signal.Signals(number)](number, frame)
