"""Dynamic sampling (DAPO, arXiv 2503.14476): groups without an advantage are replaced."""

from dataclasses import dataclass

from cb_rollout.strategies.base import Strategy, require_whole_numbers
from cb_rollout.strategies.group import Group


@dataclass(frozen=True, kw_only=True)
class DynamicSampling(Strategy):
    """Drops groups whose rewards are all equal, and submits another prompt at once for each.

    Past `max_dropped_groups` in one step, groups are kept as they come: the step ends.
    """

    name = "dynamic_sampling"

    max_dropped_groups: int = 64
    num_extra_groups: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        require_whole_numbers(self, max_dropped_groups=1, num_extra_groups=0)

    def keeps(self, group: Group) -> bool:
        """Whether the group has an advantage to learn from."""
        return group.has_advantage
