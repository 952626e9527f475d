"""Groups whose completions are still being generated.

Owns which sequence belongs to which group, and that each one's end is heard and counted once.
Decides nothing.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cb_rollout.errors import EngineDeadError, InvalidRequestError
from cb_rollout.strategies.completion_stats import CompletionStats
from cb_rollout.strategies.group import Group
from cb_rollout.strategies.request_stream import Sampler
from cb_rollout.types import GenerationOutput


@dataclass(slots=True)
class FlyingGroup:
    """A group that is not complete yet."""

    group: Group
    policy_version: int
    """When it was submitted; no token of it is older."""
    num_retries_left: int
    pending: list[str] = field(default_factory=list)
    """Its sequences that have not ended."""


class GroupsInFlight:
    """Groups by number, over a sampler."""

    def __init__(self, sampler: Sampler, tally: CompletionStats) -> None:
        """Start with none."""
        self._sampler, self._tally = sampler, tally
        self._num_groups = 0
        self._flying: dict[int, FlyingGroup] = {}
        self._group_of: dict[str, int] = {}
        self._backlog: deque[GenerationOutput] = deque()

    def __len__(self) -> int:
        return len(self._flying)

    def __iter__(self) -> Iterator[FlyingGroup]:
        """The groups, first submitted first."""
        return iter(list(self._flying.values()))

    def submit(self, prompt: Any, num_sequences: int, num_retries: int) -> None:
        """Queue a new group."""
        group = Group(self._num_groups, prompt)
        flying = FlyingGroup(group, self._sampler.policy_version, num_retries)
        self.submit_more(flying, num_sequences)
        self._flying[group.number] = flying
        self._num_groups += 1

    def submit_more(self, flying: FlyingGroup, num_sequences: int) -> None:
        """Queue further sequences of a group."""
        row = flying.group.prompt
        if isinstance(row, Mapping) and "prompt" not in row:
            raise InvalidRequestError(
                f"a row has no 'prompt', only {', '.join(map(repr, row))}; rename the key that "
                "holds it."
            )
        prompt = row["prompt"] if isinstance(row, Mapping) else row
        request_ids = self._sampler.submit(prompt, num_sequences)
        flying.pending += request_ids
        self._group_of |= dict.fromkeys(request_ids, flying.group.number)
        self._tally.submitted += num_sequences

    def next_output(self) -> tuple[FlyingGroup, GenerationOutput]:
        """Wait for the next sequence to end; it is no longer pending."""
        output = self._backlog.popleft() if self._backlog else self._sampler.take()
        flying = self._flying[self._group_of.pop(output.request_id)]
        flying.pending.remove(output.request_id)
        return flying, output

    def complete(self, flying: FlyingGroup) -> Group:
        """Take a group out; sequences that it does not need any more are cancelled."""
        del self._flying[flying.group.number]
        self._cancel_sequences(flying.pending)
        return flying.group

    def cancel(self, groups: Sequence[FlyingGroup]) -> None:
        """End groups, and wait until each of their sequences has delivered what it had."""
        for flying in groups:
            del self._flying[flying.group.number]
            self._tally.groups_cancelled += 1
            self._tally.cancel(flying.group.outputs)
        self._cancel_sequences([request_id for flying in groups for request_id in flying.pending])

    def _cancel_sequences(self, request_ids: Sequence[str]) -> None:
        self._sampler.cancel(request_ids)
        waiting, others = set(request_ids), []
        try:
            while waiting:
                output = self._backlog.popleft() if self._backlog else self._sampler.take()
                if output.request_id in waiting:
                    waiting.remove(output.request_id)
                    self._tally.cancel([output])
                else:
                    others.append(output)
        except EngineDeadError:
            self._tally.failed += len(waiting)
            raise
        finally:
            self._backlog.extendleft(reversed(others))
            for request_id in request_ids:
                self._group_of.pop(request_id, None)

    def num_sequences(self) -> int:
        """Completions of these groups, ended or not."""
        return sum(len(f.pending) + len(f.group.outputs) for f in self._flying.values())
