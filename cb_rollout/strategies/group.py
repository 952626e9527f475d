"""A group: the completions of one prompt and their rewards. Plain data, without torch."""

from dataclasses import dataclass, field
from typing import Any

from cb_rollout.types import GenerationOutput


@dataclass(slots=True)
class Group:
    """Completions of one prompt, scored together."""

    number: int
    """Counts the groups of one collector, from 0, in the order of their prompts."""
    prompt: Any
    """The item of the prompt source, whole: a prompt, or a row that holds one."""
    outputs: list[GenerationOutput] = field(default_factory=list)
    """All finished; as many as were asked for, or fewer where the strategy allows it."""
    rewards: list[float] = field(default_factory=list)
    """One for each output."""

    @property
    def num_tokens(self) -> int:
        """Count the sampled tokens of all completions."""
        return sum(len(output.generated_tokens) for output in self.outputs)

    @property
    def policy_version(self) -> int | None:
        """Return the oldest version that sampled any of its tokens; None where it has no token."""
        versions = [version for output in self.outputs for version, _ in output.policy_versions]
        return min(versions, default=None)

    @property
    def has_advantage(self) -> bool:
        """Return True if any two rewards differ; if none do, every advantage is zero."""
        return max(self.rewards) > min(self.rewards)

    def token_staleness(self, policy_version: int) -> list[int]:
        """Return each token's age in versions before `policy_version`, in order."""
        return [
            policy_version - version
            for output in self.outputs
            for version, num_tokens in output.policy_versions
            for _ in range(num_tokens)
        ]
