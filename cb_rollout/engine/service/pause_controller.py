"""Who may touch the engine: the thread that steps, or the one caller that holds it still.

Owns turns, pauses and sleep, not the engine. Shares the loop's condition, so that whoever waits
hears of every change.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cb_rollout.errors import RolloutError


class PauseController:
    """Keeps steps and pauses apart."""

    def __init__(self, changed: threading.Condition, could_step: Callable[[], bool]) -> None:
        """Start open.

        Args:
            changed: the loop's condition.
            could_step: whether a thread is there to step.
        """
        self._changed, self._could_step = changed, could_step
        self._stepping_thread: int | None = None
        self._caller_thread: int | None = None
        self._owes_turn = False
        self._is_held = False
        self._pausing_thread: int | None = None
        self._pause_depth = 0

    @property
    def is_shut(self) -> bool:
        """Whether no step may begin."""
        return self._is_held or self._pausing_thread is not None

    @property
    def is_stepping_here(self) -> bool:
        """Whether the calling thread is inside a step."""
        return self._stepping_thread == threading.get_ident()

    @property
    def is_my_turn(self) -> bool:
        """Whether the calling thread is the one that steps: a driving caller, or else the loop's.

        Never while another thread is in a step.
        """
        me = threading.get_ident()
        return self._stepping_thread is None and self._caller_thread in (None, me)

    def begin_step(self) -> None:
        """The calling thread, whose turn it is, steps."""
        self._stepping_thread = threading.get_ident()
        self.pass_turn()

    def end_step(self) -> None:
        """The calling thread is in no step any more."""
        if self.is_stepping_here:
            self._stepping_thread = None
            # A loop's thread that stands by for a driving caller sleeps on.
            if self._pausing_thread is not None or not self.is_my_turn:
                self._changed.notify_all()

    def pass_turn(self) -> None:
        """The engine had its turn after a pause, whether there was something to do or not."""
        if self._owes_turn:
            self._owes_turn = False
            self._changed.notify_all()

    @contextmanager
    def stepping(self) -> Iterator[bool]:
        """Step in the loop's thread's place; gives whether the calling thread may."""
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
        # Whoever pauses again and again leaves the engine a step in between.
        return self._owes_turn and not self._is_held and self._could_step()

    def hold(self) -> None:
        """Stay shut after the pause that this is called in, until `release()`."""
        assert self._pausing_thread == threading.get_ident()
        self._is_held = True

    def release(self) -> None:
        """Open again after `hold()`."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def require_open_for_me(self) -> None:
        """Raise where the calling thread would wait for what stands still until it acts."""
        if self.is_stepping_here:
            raise RolloutError(
                "what runs inside a step cannot wait for the engine that runs it; generate before "
                "or after, not in a logits processor or a model's hook."
            )
        if threading.get_ident() == self._pausing_thread:
            raise RolloutError(
                "this thread paused the engine, so what it waits for would never come; leave "
                "pause() first."
            )
        if self._is_held:
            raise RolloutError(
                "the generator is asleep, so what this waits for would never come; wake() it first."
            )
