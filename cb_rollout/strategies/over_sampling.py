"""Over-sampling: submit more than is wanted, and cancel the stragglers."""

from dataclasses import dataclass

from cb_rollout.errors import ConfigurationError
from cb_rollout.strategies.base import Strategy, require_whole_numbers


@dataclass(frozen=True, kw_only=True)
class OverSampling(Strategy):
    """Keeps the first complete groups and cancels the others.

    The kept groups are biased towards short completions; the bias grows with the number of extras.
    `PartialRollouts` has no such bias.
    """

    name = "over_sampling"

    num_extra_groups: int = 4
    num_extra_members: int = 0

    def __post_init__(self) -> None:
        require_whole_numbers(self, num_extra_groups=0, num_extra_members=0)
        if not self.num_extra_groups + self.num_extra_members:
            raise ConfigurationError(
                "OverSampling with no extra groups and no extra members is Plain; raise "
                "num_extra_groups or num_extra_members."
            )
