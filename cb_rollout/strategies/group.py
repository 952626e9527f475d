"""A group: the completions of one prompt, and what they earned. Plain data, without torch."""

from dataclasses import dataclass, field
from typing import Any

from cb_rollout.types import GenerationOutput


@dataclass(slots=True)
class Group:
    """Completions of one prompt, scored together."""

    number: int
    """Counts the groups of one collector, from 0, in the order of their prompts."""
    prompt: Any
    """What the source of prompts gave, whole: a prompt, or a row that holds one."""
    outputs: list[GenerationOutput] = field(default_factory=list)
    """All finished; as many as were asked for, or fewer where the strategy allows it."""
    rewards: list[float] = field(default_factory=list)
    """One for each output."""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all completions."""
        return sum(len(output.generated_tokens) for output in self.outputs)

    @property
    def policy_version(self) -> int | None:
        """The oldest version that sampled any of its tokens; None where there is no token."""
        versions = [version for output in self.outputs for version, _ in output.policy_versions]
        return min(versions, default=None)

    @property
    def has_advantage(self) -> bool:
        """Whether any reward differs from another; if none does, every advantage is zero."""
        return max(self.rewards) > min(self.rewards)

    def token_staleness(self, policy_version: int) -> list[int]:
        """How many versions before `policy_version` each token was sampled, in order."""
        return [
            policy_version - version
            for output in self.outputs
            for version, num_tokens in output.policy_versions
            for _ in range(num_tokens)
        ]
