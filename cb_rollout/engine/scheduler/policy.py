"""Decide which sequences are admitted first, and whether the next step prefills or decodes.

A policy is a subclass of `SchedulerPolicy` with a name. It only reads the scheduler. Called by the
thread that steps the engine.
"""

from typing import TYPE_CHECKING, ClassVar

from cb_rollout.config.enums import SchedulerType
from cb_rollout.engine.request import Request

if TYPE_CHECKING:
    from cb_rollout.engine.scheduler.scheduler import Scheduler

RUNNING_PER_PROMPT = 4
"""A prefill of few prompts costs as much as a decode step of many rows."""

MAX_DECODES_IN_A_ROW = 8
"""Decode steps that waiting prompts are held back for, at most."""


class SchedulerPolicy:
    """Admit in order of arrival; prefill when waiting >= running / 4, or after 8 decode steps."""

    registered: ClassVar[dict[str, type["SchedulerPolicy"]]] = {}

    def __init_subclass__(cls, *, name: str) -> None:
        SchedulerPolicy.registered[name] = cls

    def comes_before(self, newcomer: Request, waiting: Request) -> bool:
        """Decide whether a new sequence is admitted before one that waits; ties are stable.

        Sequences that ran before are admitted first under every policy. Equal prompts share a
        prefill only while they wait side by side.
        """
        return False

    def is_prefill_next(self, scheduler: "Scheduler") -> bool:
        """Decide whether a prefill is tried before a decode step; the other runs if it cannot."""
        if scheduler.num_decodes_in_a_row >= MAX_DECODES_IN_A_ROW:
            return True
        num_startable = min(len(scheduler.waiting), scheduler.num_admissible)
        is_worthwhile = num_startable * RUNNING_PER_PROMPT >= len(scheduler.running)
        has_decoded = scheduler.num_decodes_in_a_row > 0
        return has_decoded and (is_worthwhile or bool(scheduler.prefilling))


class Fifo(SchedulerPolicy, name=SchedulerType.FIFO):
    """Follow the defaults of `SchedulerPolicy`."""


class PrefillFirst(SchedulerPolicy, name=SchedulerType.PREFILL_FIRST):
    """Decode only when no prompt can be admitted."""

    def is_prefill_next(self, scheduler: "Scheduler") -> bool:
        return True


class LongestFirst(SchedulerPolicy, name=SchedulerType.LONGEST_FIRST):
    """Admit the longest expected first, so that it does not run alone after all others.

    This is the LPT rule (longest processing time first) of Graham, "Bounds on multiprocessing
    timing anomalies", 1969. A prompt without completions comes first: it may be the longest.
    """

    def comes_before(self, newcomer: Request, waiting: Request) -> bool:
        """Compare expected lengths; members of a group have the same and stay together."""
        ours, theirs = newcomer.expected_length, waiting.expected_length
        return theirs is not None and (ours is None or ours > theirs)


def create_policy(scheduler_type: str) -> SchedulerPolicy:
    """Return the policy registered under a name."""
    return SchedulerPolicy.registered[scheduler_type]()
