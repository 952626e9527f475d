"""Track groups whose completions are still generated, and count how each completion ends.

Owns the map from sequences to groups, and delivers and counts the end of each sequence once.
Decides nothing. Called from one thread.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cb_rollout.errors import EngineDeadError, InvalidRequestError
from cb_rollout.strategies.base import Group
from cb_rollout.strategies.request_stream import RequestStream
from cb_rollout.types import GenerationOutput

End = Literal["kept", "dropped", "cancelled", "failed"]
"""The ways in which a completion ends; each is a count of `CompletionStats`."""


@dataclass(slots=True)
class CompletionStats:
    """Counts of completions; `submitted` is the sum of the next four and those in flight."""

    submitted: int = 0
    kept: int = 0
    """In a group that was returned."""
    dropped: int = 0
    """Finished, and not trained on: no advantage, no reward, or too few others in the group."""
    cancelled: int = 0
    """Of groups that were cancelled, or more than their group needed."""
    failed: int = 0
    tokens_kept: int = 0
    tokens_discarded: int = 0
    groups_kept: int = 0
    groups_dropped: int = 0
    groups_cancelled: int = 0
    retries: int = 0
    """Completions generated again, and calls of the reward after the first for a group."""

    def end(self, how: End, outputs: Sequence[GenerationOutput]) -> None:
        """Count completions that end in this way, and their tokens."""
        setattr(self, how, getattr(self, how) + len(outputs))
        num_tokens = sum(len(output.generated_tokens) for output in outputs)
        if how == "kept":
            self.tokens_kept += num_tokens
        else:
            self.tokens_discarded += num_tokens

    def since(self, earlier: "CompletionStats") -> "CompletionStats":
        """Return the counts added after `earlier`."""
        before = asdict(earlier)
        return CompletionStats(**{name: n - before[name] for name, n in asdict(self).items()})


@dataclass(slots=True)
class PendingGroup:
    """A group that is not complete yet."""

    group: Group
    policy_version: int
    """The version when it was submitted; no token of it is older."""
    num_retries_left: int
    pending: list[str] = field(default_factory=list)


class GroupsInFlight:
    """Pending groups by number, over a sampler."""

    def __init__(self, sampler: RequestStream, stats: CompletionStats) -> None:
        self._sampler, self._stats = sampler, stats
        self._num_groups = 0
        self._groups: dict[int, PendingGroup] = {}
        self._group_of: dict[str, PendingGroup] = {}
        self._backlog: deque[GenerationOutput] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[PendingGroup]:
        """Iterate over a copy of the groups, first submitted first."""
        return iter(list(self._groups.values()))

    def submit(self, prompt: Any, num_sequences: int, num_retries: int) -> None:
        group = Group(self._num_groups, prompt)
        pending = PendingGroup(group, self._sampler.policy_version, num_retries)
        self.submit_more(pending, num_sequences)
        self._groups[group.number] = pending
        self._num_groups += 1

    def submit_more(self, pending: PendingGroup, num_sequences: int) -> None:
        prompt = row = pending.group.prompt
        if isinstance(row, Mapping):
            if "prompt" not in row:
                raise InvalidRequestError(
                    f"a row has no 'prompt', only {', '.join(map(repr, row))}; rename the key that "
                    "holds it."
                )
            prompt = row["prompt"]
            if row.get("images") is not None:
                prompt = {"prompt": prompt, "images": row["images"]}
        request_ids = self._sampler.submit(prompt, num_sequences)
        pending.pending += request_ids
        self._group_of |= dict.fromkeys(request_ids, pending)
        self._stats.submitted += num_sequences

    def next_output(self) -> tuple[PendingGroup, GenerationOutput]:
        """Wait for the next sequence to end; it is no longer pending."""
        output = self._next()
        pending = self._group_of.pop(output.request_id)
        pending.pending.remove(output.request_id)
        return pending, output

    def complete(self, pending: PendingGroup) -> Group:
        """Take a group out, and cancel the sequences that it does not need any more."""
        del self._groups[pending.group.number]
        self._cancel_sequences(pending.pending)
        return pending.group

    def cancel(self, groups: Sequence[PendingGroup]) -> None:
        """End groups, and wait until each of their sequences has delivered its tokens."""
        self._stats.groups_cancelled += len(groups)
        for pending in groups:
            del self._groups[pending.group.number]
            self._stats.end("cancelled", pending.group.outputs)
        self._cancel_sequences([request_id for pending in groups for request_id in pending.pending])

    def num_sequences(self) -> int:
        return sum(len(p.pending) + len(p.group.outputs) for p in self._groups.values())

    def _next(self) -> GenerationOutput:
        return self._backlog.popleft() if self._backlog else self._sampler.take()

    def _cancel_sequences(self, request_ids: Sequence[str]) -> None:
        self._sampler.cancel(request_ids)
        waiting, others = set(request_ids), []
        try:
            while waiting:
                output = self._next()
                if output.request_id in waiting:
                    waiting.remove(output.request_id)
                    self._stats.end("cancelled", [output])
                else:
                    others.append(output)
        except EngineDeadError:
            self._stats.failed += len(waiting)
            raise
        finally:
            self._backlog.extendleft(reversed(others))
            for request_id in request_ids:
                self._group_of.pop(request_id, None)
