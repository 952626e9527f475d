"""Retries and a minimum viable group: a failing environment costs completions, not the run."""

from dataclasses import dataclass

from cb_rollout.strategies.base import Strategy, require_whole_numbers


@dataclass(frozen=True, kw_only=True)
class Retrying(Strategy):
    """Retries failed completions, then accepts a smaller group, then takes another prompt.

    A completion fails when its generation does, when the reward raises, or gives None or NaN for
    it. Each is tried `max_retries` times more. A group with at least `min_group_size` scored
    completions is then kept with those, and any other is replaced, up to `max_dropped_groups` in
    one step; past that the last failure is raised.
    """

    name = "retrying"

    max_retries: int = 2
    min_group_size: int | None = 2
    max_dropped_groups: int = 8

    def __post_init__(self) -> None:
        require_whole_numbers(self, max_retries=0, min_group_size=1, max_dropped_groups=0)
