"""Make Ctrl-C during `Thread.join` harmless, which it is not in Python 3.11.

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
        # Also False in a forked process, which has this object but not the thread.
        return super().is_alive() and not self._has_ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            self._has_ended.wait(timeout)
