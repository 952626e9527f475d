"""Define groups of completions, and strategies: which to submit, to keep and to carry over.

A strategy holds settings and no state; `GroupCollector` acts on them. Loads no torch.
"""

from dataclasses import dataclass, field
from typing import Any

from cb_rollout.errors import ConfigurationError
from cb_rollout.types import GenerationOutput


@dataclass(slots=True)
class Group:
    """Completions of a prompt, scored together."""

    number: int
    """Counts the groups of one collector, from 0, in the order of their prompts."""
    prompt: Any
    """The item of the prompt source, whole: a prompt, or a row that holds one."""
    outputs: list[GenerationOutput] = field(default_factory=list)
    """All finished; as many as were asked for, or fewer where the strategy allows it."""
    rewards: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.generated_tokens) for output in self.outputs)

    @property
    def policy_version(self) -> int | None:
        """The oldest version that sampled a token; None: the group has no token."""
        versions = [version for output in self.outputs for version, _ in output.policy_versions]
        return min(versions, default=None)

    @property
    def has_advantage(self) -> bool:
        """False: all rewards are equal, so every advantage is zero."""
        return max(self.rewards) > min(self.rewards)

    def token_staleness(self, policy_version: int) -> list[int]:
        """Return each token's age in versions before `policy_version`, in order."""
        return [
            policy_version - version
            for output in self.outputs
            for version, num_tokens in output.policy_versions
            for _ in range(num_tokens)
        ]


class Strategy:
    """Base of all strategies: submits what is wanted and drops nothing.

    A subclass turns the attributes that it decides into dataclass fields.
    """

    num_extra_groups: int = 0
    """Groups in flight beyond those still wanted."""
    num_extra_members: int = 0
    """Completions of each prompt beyond a group's size; the first to finish make the group."""
    carries: bool = False
    """True: unfinished groups go on in the next step. False: they are cancelled."""
    max_staleness: int | None = None
    """Most policy versions that a carried group may last; an older one starts over."""
    max_dropped_groups: int = 0
    """Most groups replaced by others in a step."""
    max_retries: int = 0
    """Further tries of a completion that failed or could not be scored."""
    min_group_size: int | None = None
    """Fewest scored completions that still make a group; None: all of them."""

    def decisions(self) -> dict[str, Any]:
        """Return the values of all settings above, by name."""
        return {name: getattr(self, name) for name in Strategy.__annotations__}

    def keeps(self, group: Group) -> bool:
        """Decide whether a complete, scored group is worth training on."""
        return True


def require_whole_numbers(strategy: Strategy, **least: int) -> None:
    """Raise `ConfigurationError` for a setting that is not a whole number, or below its least."""
    for name, low in least.items():
        value = getattr(strategy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigurationError(
                f"{type(strategy).__name__}({name}={value!r}) is not a whole number >= {low}."
            )


@dataclass(frozen=True, kw_only=True)
class Plain(Strategy):
    """The default: each prompt's whole group, in order, whatever its rewards."""


@dataclass(frozen=True, kw_only=True)
class DynamicSampling(Strategy):
    """Drops groups whose rewards are all equal, and submits another prompt at once for each.

    After `max_dropped_groups` in one step, every further group is kept, so the step ends.
    From DAPO, arXiv 2503.14476.
    """

    max_dropped_groups: int = 64
    num_extra_groups: int = 0

    def __post_init__(self) -> None:
        require_whole_numbers(self, max_dropped_groups=1, num_extra_groups=0)

    def keeps(self, group: Group) -> bool:
        return group.has_advantage


@dataclass(frozen=True, kw_only=True)
class OverSampling(Strategy):
    """Submits more than is wanted, keeps the first complete groups and cancels the others.

    The more extras, the more the kept groups are biased towards short completions.
    """

    num_extra_groups: int = 4
    num_extra_members: int = 0

    def __post_init__(self) -> None:
        require_whole_numbers(self, num_extra_groups=0, num_extra_members=0)
        if not self.num_extra_groups + self.num_extra_members:
            raise ConfigurationError(
                "OverSampling with no extra groups and no extra members is Plain; raise "
                "num_extra_groups or num_extra_members."
            )


@dataclass(frozen=True, kw_only=True)
class PartialRollouts(Strategy):
    """Takes the first complete groups and carries the others into the next step.

    A carried sequence keeps its tokens, with their versions and log-probabilities, and goes on
    under the new weights. A group submitted more than `max_staleness` versions ago starts over.
    From Kimi k1.5, arXiv 2501.12599.
    """

    carries = True

    num_extra_groups: int = 8
    max_staleness: int | None = 1

    def __post_init__(self) -> None:
        require_whole_numbers(self, num_extra_groups=1, max_staleness=1)


@dataclass(frozen=True, kw_only=True)
class Retrying(Strategy):
    """Retries failed completions, then accepts a smaller group, then takes another prompt.

    A completion fails when its generation does, when the reward raises, or gives None or NaN for
    it. Each is tried `max_retries` times more. A group with at least `min_group_size` scored
    completions is then kept with those, and any other is replaced, up to `max_dropped_groups` in
    one step; past that the last failure is raised.
    """

    max_retries: int = 2
    min_group_size: int | None = 2
    max_dropped_groups: int = 8

    def __post_init__(self) -> None:
        require_whole_numbers(self, max_retries=0, min_group_size=1, max_dropped_groups=0)
