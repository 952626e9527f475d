"""Admit first what is expected to be longest, by the lengths of earlier completions.

Called by the thread that steps the engine.
"""

from cb_rollout.config.enums import SchedulerType
from cb_rollout.engine.request import Request
from cb_rollout.engine.scheduler.policy import SchedulerPolicy


class LongestFirst(SchedulerPolicy, name=SchedulerType.LONGEST_FIRST):
    """Admit the longest expected first, so that it does not run alone after all others.

    This is the LPT rule (longest processing time first) of Graham, "Bounds on multiprocessing
    timing anomalies", 1969. A prompt without completions comes first: it may be the longest.
    """

    def comes_before(self, newcomer: Request, waiting: Request) -> bool:
        """Compare expected lengths; members of a group have the same and stay together."""
        ours, theirs = newcomer.expected_length, waiting.expected_length
        return theirs is not None and (ours is None or ours > theirs)
