"""Track groups whose completions are still being generated, and count how each ends.

Owns the map from sequences to groups, and delivers and counts the end of each sequence once. Makes
no decisions. Called from one thread.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cb_rollout.engine.service.saved_requests import restored_output, saved_output
from cb_rollout.errors import EngineDeadError, InvalidRequestError
from cb_rollout.strategies.base import Group
from cb_rollout.strategies.request_stream import RequestStream
from cb_rollout.types import GenerationOutput

End = Literal["kept", "dropped", "cancelled", "failed"]
"""The ways in which a completion ends; each is a count of `CompletionStats`."""


@dataclass(slots=True)
class CompletionStats:
    """Counts of completions; `submitted` is the sum of the next four and of those in flight."""

    submitted: int = 0
    kept: int = 0
    """In a group that was returned."""
    dropped: int = 0
    """Finished, but not trained on: no advantage, no reward, or too small a group."""
    cancelled: int = 0
    """Cancelled with their group, or not needed by it."""
    failed: int = 0
    tokens_kept: int = 0
    tokens_discarded: int = 0
    groups_kept: int = 0
    groups_dropped: int = 0
    groups_cancelled: int = 0
    retries: int = 0
    """Repeated generations of completions, and repeated reward calls for a group."""

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
        added = {name: count - before[name] for name, count in asdict(self).items()}
        return CompletionStats(**added)


@dataclass(slots=True)
class PendingGroup:
    """A group that is not complete yet."""

    group: Group
    policy_version: int
    """The version when it was submitted; no token of it is older."""
    num_retries_left: int
    pending: list[str] = field(default_factory=list)


State = dict[str, Any]
"""Plain data and tensors, for `torch.save`."""


def saved_group(group: Group) -> State:
    """Return a group without its prompt as plain data."""
    return {
        "number": group.number,
        "outputs": [saved_output(output) for output in group.outputs],
        "rewards": list(group.rewards),
    }


def restored_group(state: Mapping[str, Any], prompt: Any, num_versions: int) -> Group:
    """Return a saved group; `num_versions` is added to the versions of its tokens."""
    return Group(
        number=state["number"],
        prompt=prompt,
        outputs=[restored_output(saved, num_versions) for saved in state["outputs"]],
        rewards=list(state["rewards"]),
    )


class GroupsInFlight:
    """Pending groups by number, over a sampler."""

    def __init__(self, sampler: RequestStream, stats: CompletionStats) -> None:
        self._sampler = sampler
        self._stats = stats
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
        row = pending.group.prompt
        prompt = row
        if isinstance(row, Mapping):
            if "prompt" not in row:
                raise InvalidRequestError(
                    f"a row has no 'prompt', only {', '.join(map(repr, row))}; rename the key that "
                    "holds the prompt."
                )
            prompt = row["prompt"]
            if row.get("images") is not None:
                prompt = {"prompt": prompt, "images": row["images"]}
        request_ids = self._sampler.submit(prompt, num_sequences)
        pending.pending += request_ids
        self._group_of |= dict.fromkeys(request_ids, pending)
        self._stats.submitted += num_sequences

    def state_dict(self) -> State:
        """Return the groups without their prompts, first submitted first."""
        groups: list[State] = []
        for pending in self:
            saved = saved_group(pending.group) | {
                "policy_version": pending.policy_version,
                "num_retries_left": pending.num_retries_left,
                "pending": list(pending.pending),
            }
            groups.append(saved)
        return {
            "num_groups": self._num_groups,
            "groups": groups,
            "backlog": [saved_output(output) for output in self._backlog],
        }

    def load_state_dict(
        self, state: Mapping[str, Any], prompts: Sequence[Any], num_versions: int
    ) -> None:
        """Restore saved groups, whose sequences continue in the sampler.

        Args:
            state: what `state_dict` returned.
            prompts: one for each group.
            num_versions: added to the number of each policy version.
        """
        self._num_groups = state["num_groups"]
        for saved, prompt in zip(state["groups"], prompts, strict=True):
            pending = PendingGroup(
                group=restored_group(saved, prompt, num_versions),
                policy_version=saved["policy_version"] + num_versions,
                num_retries_left=saved["num_retries_left"],
                pending=list(saved["pending"]),
            )
            self._groups[pending.group.number] = pending
            self._group_of |= dict.fromkeys(pending.pending, pending)
        self._backlog.extend(restored_output(saved, num_versions) for saved in state["backlog"])

    def next_output(self) -> tuple[PendingGroup, GenerationOutput]:
        """Wait for the next sequence to end, and stop counting it as pending."""
        if not self._backlog:
            self._sampler.wait()
        output = self._next()
        pending = self._group_of.pop(output.request_id)
        pending.pending.remove(output.request_id)
        return pending, output

    def complete(self, pending: PendingGroup) -> Group:
        """Remove a complete group, and cancel its surplus sequences."""
        del self._groups[pending.group.number]
        self._cancel_sequences(pending.pending)
        return pending.group

    def cancel(self, groups: Sequence[PendingGroup]) -> None:
        """End groups, and wait until each of their sequences has delivered its tokens."""
        self._stats.groups_cancelled += len(groups)
        for pending in groups:
            del self._groups[pending.group.number]
            self._stats.end("cancelled", pending.group.outputs)
        request_ids: list[str] = []
        for pending in groups:
            request_ids += pending.pending
        self._cancel_sequences(request_ids)

    def num_sequences(self) -> int:
        num_sequences = 0
        for pending in self._groups.values():
            num_sequences += len(pending.pending) + len(pending.group.outputs)
        return num_sequences

    def _next(self) -> GenerationOutput:
        if self._backlog:
            return self._backlog.popleft()
        return self._sampler.take()

    def _cancel_sequences(self, request_ids: Sequence[str]) -> None:
        """Cancel sequences, and wait until they end; keep other outputs that arrive meanwhile."""
        self._sampler.cancel(request_ids)
        waiting = set(request_ids)
        others: list[GenerationOutput] = []
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
