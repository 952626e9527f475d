"""Wait for a thread so that Ctrl-C leaves it what it is: `Thread.join` of Python 3.11 does not.

There, an interrupted `join` marks a running thread as ended, so `is_alive()` is False from then on.
"""

import threading


class InterruptibleThread(threading.Thread):
    """A thread whose `join` may be interrupted."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._has_ended = threading.Event()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._has_ended.set()

    def is_alive(self) -> bool:
        # False in a fork, too, which has this object and not the thread.
        return super().is_alive() and not self._has_ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            self._has_ended.wait(timeout)
