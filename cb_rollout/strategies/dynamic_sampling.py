"""Dynamic sampling (DAPO, arXiv 2503.14476): replace groups without an advantage."""

from dataclasses import dataclass

from cb_rollout.strategies.base import Strategy, require_whole_numbers
from cb_rollout.strategies.group import Group


@dataclass(frozen=True, kw_only=True)
class DynamicSampling(Strategy):
    """Drops groups whose rewards are all equal, and submits another prompt at once for each.

    After `max_dropped_groups` in one step, every further group is kept, so the step ends.
    """

    name = "dynamic_sampling"

    max_dropped_groups: int = 64
    num_extra_groups: int = 0

    def __post_init__(self) -> None:
        require_whole_numbers(self, max_dropped_groups=1, num_extra_groups=0)

    def keeps(self, group: Group) -> bool:
        """Keep a group that has an advantage."""
        return group.has_advantage
