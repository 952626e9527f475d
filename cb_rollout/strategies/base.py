"""Define groups of completions, and strategies that decide which are submitted and kept.

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
    """Index of the group in its collector, from 0, in the order of the prompts."""
    prompt: Any
    """The item from the prompt source: a prompt, or the row that contains it."""
    outputs: list[GenerationOutput] = field(default_factory=list)
    """Finished outputs: as many as requested, or fewer if the strategy allows it."""
    rewards: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.generated_tokens) for output in self.outputs)

    @property
    def policy_version(self) -> int | None:
        """The oldest version that sampled a token; None: the group has no token."""
        versions: list[int] = []
        for output in self.outputs:
            versions += [version for version, _ in output.policy_versions]
        return min(versions, default=None)

    @property
    def has_advantage(self) -> bool:
        """False: all rewards are equal, so every advantage is zero."""
        return max(self.rewards) > min(self.rewards)

    def token_staleness(self, policy_version: int) -> list[int]:
        """Return each token's age, as the number of versions up to `policy_version`, in order."""
        ages: list[int] = []
        for output in self.outputs:
            for version, num_tokens in output.policy_versions:
                ages += [policy_version - version] * num_tokens
        return ages


class Strategy:
    """Base of all strategies: submits the requested groups and drops nothing.

    A subclass declares the attributes that it changes as dataclass fields.
    """

    num_extra_groups: int = 0
    """Number of groups in flight beyond those that the step still needs."""
    num_extra_members: int = 0
    """Completions per prompt beyond the group size; the first to finish form the group."""
    carries: bool = False
    """True: unfinished groups continue in the next step. False: they are cancelled."""
    max_staleness: int | None = None
    """Maximum age of a carried group in policy versions; an older one starts over."""
    max_dropped_groups: int = 0
    """Maximum number of groups that are replaced in a step."""
    max_retries: int = 0
    """Maximum retries of a completion that failed or could not be scored."""
    min_group_size: int | None = None
    """Minimum number of scored completions in a group; None: all of them."""

    def decisions(self) -> dict[str, Any]:
        """Return the values of all settings above, by name."""
        return {name: getattr(self, name) for name in Strategy.__annotations__}

    def keeps(self, group: Group) -> bool:
        """Decide whether a complete, scored group is worth training on."""
        return True


def require_whole_numbers(strategy: Strategy, **least: int) -> None:
    """Raise `ConfigurationError` unless each setting is a whole number in its range."""
    for name, low in least.items():
        value = getattr(strategy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigurationError(
                f"{type(strategy).__name__}({name}={value!r}) is not a whole number >= {low}."
            )


@dataclass(frozen=True, kw_only=True)
class Plain(Strategy):
    """The default: keeps every group, in order, regardless of its rewards."""


@dataclass(frozen=True, kw_only=True)
class DynamicSampling(Strategy):
    """Drops groups whose rewards are all equal, and submits another prompt for each at once.

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
    """Submits more groups than needed, keeps the first complete ones and cancels the others.

    More extra groups bias the kept groups more strongly towards short completions.
    """

    num_extra_groups: int = 4
    num_extra_members: int = 0

    def __post_init__(self) -> None:
        require_whole_numbers(self, num_extra_groups=0, num_extra_members=0)
        if not self.num_extra_groups + self.num_extra_members:
            raise ConfigurationError(
                "OverSampling without extra groups or extra members does nothing; raise "
                "num_extra_groups or num_extra_members, or use Plain()."
            )


@dataclass(frozen=True, kw_only=True)
class PartialRollouts(Strategy):
    """Takes the first complete groups and carries the others into the next step.

    A carried sequence keeps its tokens, with their versions and log-probabilities, and continues
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

    A completion fails if its generation fails, if the reward raises, or if the reward is None or
    NaN. It is retried up to `max_retries` times. A group with at least `min_group_size` scored
    completions is then kept, with only these. Any other group is replaced, at most
    `max_dropped_groups` in one step; after that, the last failure is raised.
    """

    max_retries: int = 2
    min_group_size: int | None = 2
    max_dropped_groups: int = 8

    def __post_init__(self) -> None:
        require_whole_numbers(self, max_retries=0, min_group_size=1, max_dropped_groups=0)
