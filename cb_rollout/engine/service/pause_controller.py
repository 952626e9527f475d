"""Decide which thread may use the engine: one that steps it, or one that paused it.

Owns turns to step, pauses and sleep, but not the engine. It shares the loop's condition, so every
change wakes the threads that wait; `begin_step`, `end_step` and `pass_turn` are called under it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cb_rollout.errors import RolloutError


class PauseController:
    """Keep steps and pauses of one engine apart; any thread may pause."""

    def __init__(self, changed: threading.Condition, could_step: Callable[[], bool]) -> None:
        """Start without a pause.

        Args:
            changed: the loop's condition.
            could_step: return whether the loop's thread runs.
        """
        self._changed, self._could_step = changed, could_step
        self._stepping_thread: int | None = None
        self._caller_thread: int | None = None
        self._owes_turn = False
        self._is_held = False
        self._pausing_thread: int | None = None
        self._pause_depth = 0

    @property
    def is_paused(self) -> bool:
        """Return whether a pause or sleep forbids the next step."""
        return self._is_held or self._pausing_thread is not None

    @property
    def is_stepping_here(self) -> bool:
        """Return whether the calling thread is inside a step."""
        return self._stepping_thread == threading.get_ident()

    @property
    def is_my_turn(self) -> bool:
        """Return whether the calling thread may step: the stepping caller, else the loop's thread.

        False while a thread is inside a step.
        """
        me = threading.get_ident()
        return self._stepping_thread is None and self._caller_thread in (None, me)

    def begin_step(self) -> None:
        """Mark the calling thread as inside a step."""
        self._stepping_thread = threading.get_ident()
        self.pass_turn()

    def end_step(self) -> None:
        """Mark the calling thread as outside a step, and wake a pause that waits for it."""
        if self.is_stepping_here:
            self._stepping_thread = None
            # A notification would wake the loop's thread in vain after each step of a caller.
            if self._pausing_thread is not None or not self.is_my_turn:
                self._changed.notify_all()

    def pass_turn(self) -> None:
        """Let the next pause begin: the engine had its turn after the last one."""
        if self._owes_turn:
            self._owes_turn = False
            self._changed.notify_all()

    @contextmanager
    def stepping(self) -> Iterator[bool]:
        """Make the calling thread the one that steps; yield False where another caller does."""
        with self._changed:
            is_mine = self._caller_thread is None
            if is_mine:
                self._caller_thread = threading.get_ident()
        try:
            yield is_mine
        finally:
            if is_mine:
                with self._changed:
                    self.end_step()
                    self._caller_thread = None
                    self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the engine between two forwards, for the calling thread alone.

        It waits for the pauses that came first and for at most one forward. A thread may pause
        again inside its own pause.
        """
        me = threading.get_ident()
        with self._changed:
            while self._must_queue(me):
                self._changed.wait()
            self._pausing_thread = me
            self._pause_depth += 1
        try:
            with self._changed:
                while self._stepping_thread is not None:
                    self._changed.wait()
            yield
        finally:
            with self._changed:
                self._pause_depth -= 1
                if not self._pause_depth:
                    self._pausing_thread = None
                    self._owes_turn = True
                self._changed.notify_all()

    def _must_queue(self, me: int) -> bool:
        if self._pausing_thread is not None:
            return self._pausing_thread != me
        # Repeated pauses must leave the engine a step in between.
        return self._owes_turn and not self._is_held and self._could_step()

    def hold(self) -> None:
        """Extend the current pause beyond its end, until `release()`."""
        assert self._pausing_thread == threading.get_ident()
        self._is_held = True

    def release(self) -> None:
        """End the pause that `hold()` extended."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def require_not_paused_here(self, consequence: str) -> None:
        """Raise `RolloutError`, with this consequence, where the calling thread paused."""
        if threading.get_ident() == self._pausing_thread:
            raise RolloutError(
                f"this thread paused the engine, so {consequence}; leave pause() first."
            )

    def require_can_wait(self) -> None:
        """Raise `RolloutError` where the calling thread's wait for an output would never end."""
        if self.is_stepping_here:
            raise RolloutError(
                "a logits processor or a model's hook cannot wait for an output during a step; "
                "generate before or after the step."
            )
        self.require_not_paused_here("no output would arrive")
        if self._is_held:
            raise RolloutError(
                "the generator is asleep, so no output would arrive; wake() it first."
            )
