"""Partial rollouts (Kimi k1.5, arXiv 2501.12599): unfinished groups go on in the next step."""

from dataclasses import dataclass

from cb_rollout.strategies.base import Strategy, require_whole_numbers


@dataclass(frozen=True, kw_only=True)
class PartialRollouts(Strategy):
    """Takes the first complete groups and carries the others into the next step.

    A carried sequence keeps its tokens, each with the version and the log-probability it was
    sampled under, and goes on under the new weights. A group submitted more than `max_staleness`
    versions ago is cancelled instead, and its prompt starts anew.
    """

    name = "partial_rollouts"
    carries = True

    num_extra_groups: int = 8
    max_staleness: int | None = 1

    def __post_init__(self) -> None:
        require_whole_numbers(self, num_extra_groups=1, max_staleness=1)
