"""Who may touch the engine: the loop's thread in a step, or the one caller that holds it still.

Owns pauses and sleep, not the engine. Shares the loop's condition, so that whoever waits hears of
every change.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cb_rollout.errors import RolloutError


class Gate:
    """Keeps steps and pauses apart."""

    def __init__(self, changed: threading.Condition, could_step: Callable[[], bool]) -> None:
        """Start open.

        Args:
            changed: the loop's condition.
            could_step: whether the loop's thread is there to step.
        """
        self._changed, self._could_step = changed, could_step
        self.is_stepping = False
        """Set by the loop's thread around each step."""
        self.owes_turn = False
        """Whether a pause ended and no step has run since; reset by the loop's thread."""
        self._is_held = False
        self._pausing_thread: int | None = None
        self._pause_depth = 0

    @property
    def is_shut(self) -> bool:
        """Whether no step may begin."""
        return self._is_held or self._pausing_thread is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the engine still between two forwards, and be the only one who does.

        The wait is at most one forward, after that of whoever came first. A thread may pause again
        inside its own pause.
        """
        me = threading.get_ident()
        with self._changed:
            while self._must_queue(me):
                self._changed.wait()
            self._pausing_thread = me
            self._pause_depth += 1
        try:
            with self._changed:
                while self.is_stepping:
                    self._changed.wait()
            yield
        finally:
            with self._changed:
                self._pause_depth -= 1
                if not self._pause_depth:
                    self._pausing_thread = None
                    self.owes_turn = True
                self._changed.notify_all()

    def _must_queue(self, me: int) -> bool:
        if self._pausing_thread is not None:
            return self._pausing_thread != me
        # Whoever pauses again and again leaves the engine a step in between.
        return self.owes_turn and not self._is_held and self._could_step()

    def hold(self) -> None:
        """Stay shut after the pause that this is called in, until `let_go()`."""
        assert self._pausing_thread == threading.get_ident()
        self._is_held = True

    def let_go(self) -> None:
        """Open again after `hold()`."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def require_open_for_me(self) -> None:
        """Raise where the calling thread would wait for what stands still until it acts."""
        if threading.get_ident() == self._pausing_thread:
            raise RolloutError(
                "this thread paused the engine, so what it waits for would never come; leave "
                "pause() first."
            )
        if self._is_held:
            raise RolloutError(
                "the generator is asleep, so what this waits for would never come; wake() it first."
            )
