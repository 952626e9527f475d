"""Decide which thread may use the engine: the one that steps it, or the one that paused it.

Owns turns to step, pauses and sleep, but not the engine. It shares the loop's condition, so every
change wakes the threads that wait; `begin_step`, `end_step` and `pass_turn` are called under it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from cb_rollout.engine.service.interrupts import Interrupts, interrupts_deferred
from cb_rollout.errors import RolloutError

# `may_begin` may change, or raise, without a notification.
POLL_SECONDS = 1.0


class PauseReason(StrEnum):
    """A reason why the engine stays paused after the block; each is released separately."""

    SLEEP = "the generator is asleep, so no output would arrive; call wake() first."
    CLIENT = "a client paused the engine with POST /pause; send POST /resume first."
    TRAINING = (
        "the trainer uses the model until the next rollout, so no output would arrive; call "
        "generator.wake() first."
    )
    UPDATE = "a weight update failed partway through; update the weights again first."
    WEIGHTS = "sleep(level=2) released the rollout weights; call sync_weights() first."


class PauseController:
    """Keep steps and pauses of an engine apart; any thread may pause."""

    def __init__(self, changed: threading.Condition, could_step: Callable[[], bool]) -> None:
        """Share the loop's condition; `could_step` returns whether the loop's thread runs."""
        self._changed = changed
        self._could_step = could_step
        self._stepping_thread: int | None = None
        self._caller_thread: int | None = None
        self._owes_turn = False
        self.reasons: set[PauseReason] = set()
        self._pausing_thread: int | None = None
        self._pause_depth = 0
        self._training_thread: int | None = None

    @property
    def is_paused(self) -> bool:
        return bool(self.reasons) or self._pausing_thread is not None

    @property
    def is_nested(self) -> bool:
        return self._pause_depth > 1

    @property
    def is_stepping_here(self) -> bool:
        return self._stepping_thread == threading.get_ident()

    @property
    def is_my_turn(self) -> bool:
        """Return whether the calling thread may step: the stepping caller, else the loop's thread.

        False while a thread is inside a step.
        """
        me = threading.get_ident()
        return self._stepping_thread is None and self._caller_thread in (None, me)

    def begin_step(self) -> None:
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
        """Let the next pause begin: the engine had its turn after the last pause."""
        if self._owes_turn:
            self._owes_turn = False
            self._changed.notify_all()

    @contextmanager
    def stepping(self) -> Iterator[bool]:
        """Let the calling thread step the engine; yield False if another caller steps it.

        A thread may enter again inside its own block.
        """
        me = threading.get_ident()
        is_mine = is_outermost = False
        try:
            with interrupts_deferred(), self._changed:
                is_outermost = self._caller_thread is None
                if is_outermost:
                    self._caller_thread = me
                is_mine = self._caller_thread == me
            yield is_mine
        finally:
            if is_mine:
                with interrupts_deferred(), self._changed:
                    self.end_step()
                    if is_outermost:
                        self._caller_thread = None
                    self._changed.notify_all()

    @contextmanager
    def paused(self, may_begin: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Pause the engine between two forwards; only the calling thread may use it.

        It waits for the pauses that came first and for at most one forward. A thread may pause
        again inside its own pause. `may_begin` is called under the condition, once the thread has
        nothing else to wait for; if it returns False, the thread waits for another change.
        """
        me = threading.get_ident()
        begun: list[int] = []
        try:
            try:
                with interrupts_deferred() as interrupts:
                    while not begun:
                        with self._changed:
                            if self._can_begin(me, may_begin):
                                self._pausing_thread = me
                                self._pause_depth += 1
                                begun.append(me)
                            else:
                                self._changed.wait(interrupts.limit(POLL_SECONDS))
                        interrupts.deliver()
                    self._await_step_end(interrupts)
                yield
            finally:
                self._end_pause(begun)
        finally:
            # An interrupt may have come before the first call.
            self._end_pause(begun)

    def _can_begin(self, me: int, may_begin: Callable[[], bool]) -> bool:
        if self._pausing_thread is not None:
            return self._pausing_thread == me
        # Repeated pauses must leave the engine a step in between, unless this thread steps it.
        could_step = self._could_step() and self._caller_thread != me
        owes_step = self._owes_turn and not self.reasons and could_step
        return not owes_step and may_begin()

    def _await_step_end(self, interrupts: Interrupts) -> None:
        while self._stepping_thread is not None:
            with self._changed:
                if self._stepping_thread is not None:
                    self._changed.wait(interrupts.limit(None))
            interrupts.deliver()

    def _end_pause(self, begun: list[int]) -> None:
        with interrupts_deferred(), self._changed:
            if begun:
                begun.clear()
                self._pause_depth -= 1
                if not self._pause_depth:
                    self._pausing_thread = None
                    self._owes_turn = True
                self._changed.notify_all()

    def hold(self, reason: PauseReason) -> None:
        """Extend the current pause beyond its end, until this reason is released."""
        assert self._pausing_thread == threading.get_ident()
        self.reasons.add(reason)
        if reason is PauseReason.TRAINING:
            self._training_thread = threading.get_ident()

    def may_run_module(self) -> bool:
        """Return whether the calling thread may run the module that trains.

        While it is lent to the trainer, only the thread that lent it may run it: another thread
        would change the mode and the active adapters of a training forward.
        """
        is_lent = PauseReason.TRAINING in self.reasons
        return not is_lent or self._training_thread == threading.get_ident()

    def require_module(self) -> None:
        """Raise `RolloutError` if the module is lent to the trainer, by another thread."""
        if not self.may_run_module():
            raise RolloutError(PauseReason.TRAINING)

    def release(self, *reasons: PauseReason) -> None:
        with interrupts_deferred(), self._changed:
            self.reasons.difference_update(reasons)
            self._changed.notify_all()

    def require_weights(self) -> None:
        """Raise `RolloutError` if the weights that generate were released."""
        if PauseReason.WEIGHTS in self.reasons:
            raise RolloutError(PauseReason.WEIGHTS)

    def require_not_paused_here(self, consequence: str) -> None:
        """Raise `RolloutError`, naming the consequence, if the calling thread paused the engine."""
        if threading.get_ident() == self._pausing_thread:
            raise RolloutError(
                f"this thread paused the engine, so {consequence}; leave the pause() block first."
            )

    def require_can_wait(self) -> None:
        """Raise `RolloutError` if the calling thread's wait for an output would never end."""
        if self.is_stepping_here:
            raise RolloutError(
                "a logits processor or a model's hook cannot wait for an output during a step; "
                "generate before or after the step."
            )
        self.require_not_paused_here("no output would arrive")
        if self.reasons:
            raise RolloutError(min(self.reasons))
