"""The count of every completion that a collector asked for. Arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from cb_rollout.types import GenerationOutput


@dataclass(slots=True)
class CompletionStats:
    """Where completions ended; `submitted` is the sum of the next four and what is in flight."""

    submitted: int = 0
    kept: int = 0
    """In a group that was returned."""
    dropped: int = 0
    """Finished, and not trained on: no advantage, no reward, or too few others in its group."""
    cancelled: int = 0
    """Of groups that were cancelled, or more than their group needed."""
    failed: int = 0
    """Could not be generated."""
    tokens_kept: int = 0
    tokens_discarded: int = 0
    groups_kept: int = 0
    groups_dropped: int = 0
    groups_cancelled: int = 0
    retries: int = 0
    """Completions generated again, and calls of the reward after the first for a group."""

    def keep(self, outputs: Sequence[GenerationOutput]) -> None:
        """A group was returned."""
        self.groups_kept += 1
        self.kept += len(outputs)
        self.tokens_kept += _num_tokens(outputs)

    def drop(self, outputs: Sequence[GenerationOutput]) -> None:
        """Finished completions will not be returned."""
        self.dropped += len(outputs)
        self.tokens_discarded += _num_tokens(outputs)

    def cancel(self, outputs: Sequence[GenerationOutput]) -> None:
        """Completions, finished or not, are no longer wanted."""
        self.cancelled += len(outputs)
        self.tokens_discarded += _num_tokens(outputs)

    def fail(self, output: GenerationOutput) -> None:
        """One could not be generated."""
        self.failed += 1
        self.tokens_discarded += len(output.generated_tokens)

    def copy(self) -> "CompletionStats":
        """These counts now."""
        return replace(self)

    def since(self, earlier: "CompletionStats") -> "CompletionStats":
        """What was added after `earlier`."""
        return CompletionStats(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


def _num_tokens(outputs: Sequence[GenerationOutput]) -> int:
    return sum(len(output.generated_tokens) for output in outputs)
