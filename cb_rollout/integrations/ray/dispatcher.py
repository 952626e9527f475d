"""Decide which worker samples which sequence, and keep what a dead worker's sequences had.

Owns every sequence from submission until its one output. Starts nothing, sends nothing and holds
no lock; its caller does.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from cb_rollout.engine.request import Request
from cb_rollout.engine.service.output_queue import OutputSink
from cb_rollout.integrations.ray.worker import ItemProgress, WorkItem
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus

# A sequence fails once so many workers in a row ended while they sampled it and reported nothing.
MAX_FRUITLESS_DEATHS = 4

# Tokens of a link of a prefix.
CHUNK_TOKENS = 32

# Links that are remembered, the latest: prefixes of two million tokens.
MAX_LINKS = 1 << 16


@dataclass(slots=True, eq=False)
class PooledSequence:
    """A sequence on its way through the pool."""

    request: Request
    """Prompt, seed and settings, as an engine of the caller would have made them."""
    sink: OutputSink
    """Receives its one output."""
    item: WorkItem
    """The present attempt; in its lists the tokens that workers reported."""
    worker: int | None = None
    """Worker that samples it; None: it waits."""
    num_attempts: int = 0
    num_fruitless_deaths: int = 0

    @property
    def version(self) -> int:
        """The version of its newest token; 0: it has none."""
        return _newest_version(self.item)

    def take(self, progress: ItemProgress) -> None:
        item = self.item
        assert progress.start == len(item.token_ids), "a report was lost"
        item.token_ids.extend(progress.token_ids)
        item.logprobs.extend(progress.logprobs)
        item.policy_versions[:] = progress.policy_versions
        self.num_fruitless_deaths = 0

    def next_item(self) -> WorkItem:
        self.num_attempts += 1
        item_id = f"{self.request.request_id}/{self.num_attempts}"
        item = self.item = replace(self.item, item_id=item_id)
        return replace(
            item,
            token_ids=list(item.token_ids),
            logprobs=list(item.logprobs),
            policy_versions=list(item.policy_versions),
        )

    def output(self, error: str | None) -> GenerationOutput:
        """Return an output of the tokens so far, failed with an error; None: cancelled."""
        return replace(
            self.request.output(),
            generated_tokens=list(self.item.token_ids),
            logprobs=list(self.item.logprobs),
            policy_versions=list(self.item.policy_versions),
            status=RequestStatus.CANCELLED if error is None else RequestStatus.FAILED,
            finish_reason=FinishReason.CANCELLED if error is None else FinishReason.ERROR,
            error=error,
        )


@dataclass(slots=True, eq=False)
class Candidate:
    """A worker that may take sequences."""

    number: int
    version: int
    """Policy version of its weights."""
    capacity: int
    """Sequences that it should hold."""


class Dispatcher:
    """The sequences of a pool, by the worker that samples them."""

    def __init__(self) -> None:
        self._waiting: deque[PooledSequence] = deque()
        self._sequences: dict[str, PooledSequence] = {}
        self._items: dict[str, PooledSequence] = {}
        self._loads: dict[int, int] = {}
        self._routes = PrefixRoutes()

    def __len__(self) -> int:
        return len(self._sequences)

    def load(self, worker: int) -> int:
        return self._loads.get(worker, 0)

    def add(self, requests: Iterable[Request], sink: OutputSink) -> None:
        """Queue sequences; those of one group come one after the other."""
        arrival: dict[int | None, int] = {}
        added = []
        for request in requests:
            assert request.request_id not in self._sequences, "one id twice"
            arrival.setdefault(request.group, len(arrival))
            item = WorkItem(
                item_id="",
                prompt_ids=request.prompt_ids,
                params=replace(request.params, max_new_tokens=request.max_new_tokens),
                seed=request.seed,
                group=request.group,
                records_timestamps=request.records_timestamps,
            )
            added.append(PooledSequence(request, sink, item))
        self._sequences |= {sequence.request.request_id: sequence for sequence in added}
        self._waiting.extend(sorted(added, key=lambda sequence: arrival[sequence.request.group]))

    def assign(self, candidates: Sequence[Candidate]) -> dict[int, list[WorkItem]]:
        """Give waiting sequences to workers, first come first served.

        A sequence goes to the worker that has the keys of half of its prompt or more, unless that
        one has a quarter of its capacity more to do than another; else to the least loaded. A group
        of at most half a worker's capacity goes to one worker. A sequence goes to no worker whose
        weights are older than its newest token.

        Returns:
            The items of each worker that gets some.
        """
        assigned: dict[int, list[WorkItem]] = {}
        while self._waiting:
            group = list(next(groupby(self._waiting, lambda sequence: sequence.request.group))[1])
            version = max(sequence.version for sequence in group)
            roomy = [
                worker
                for worker in candidates
                if worker.version >= version and self._has_room(worker, len(group))
            ]
            if not roomy:
                break
            chosen = self._least_loaded(self._near(roomy, group[0]))
            for sequence in group[: chosen.capacity - self.load(chosen.number)]:
                self._waiting.popleft()
                sequence.worker = chosen.number
                assigned.setdefault(chosen.number, []).append(sequence.next_item())
                self._items[sequence.item.item_id] = sequence
                self._loads[chosen.number] = self.load(chosen.number) + 1
        return assigned

    def take_progress(self, worker: int, progress: Iterable[ItemProgress]) -> None:
        for report in progress:
            if (sequence := self._sequence_of(worker, report.item_id)) is not None:
                sequence.take(report)

    def deliver(self, worker: int, outputs: Iterable[GenerationOutput]) -> None:
        """Deliver what a worker finished; attempts that were given up are ignored."""
        for output in outputs:
            if (sequence := self._sequence_of(worker, output.request_id)) is None:
                continue
            tokens = [*output.prompt_ids, *output.generated_tokens]
            self._routes.add(worker, _newest_version(output), tokens)
            request_id, began = sequence.request.request_id, sequence.request.created_time
            times = output.timestamps and [began + seconds for seconds in output.timestamps]
            ended = replace(output, request_id=request_id, created_time=began, timestamps=times)
            self._end(sequence, ended)

    def withdraw(self, worker: int, *, is_dead: bool, reason: str = "") -> list[str]:
        """Take a worker's sequences from it; they go on elsewhere, before those that wait.

        Args:
            worker: its number.
            is_dead: count the attempt against each of the sequences, and fail those that no worker
                survives, with the reason.
            reason: the end of the worker.

        Returns:
            The ids of its items.
        """
        taken = [sequence for sequence in self._items.values() if sequence.worker == worker]
        item_ids = [sequence.item.item_id for sequence in taken]
        going_on = []
        for sequence in taken:
            self._release(sequence)
            sequence.num_fruitless_deaths += is_dead
            if sequence.num_fruitless_deaths < MAX_FRUITLESS_DEATHS:
                going_on.append(sequence)
                continue
            error = (
                f"{sequence.num_fruitless_deaths} workers in a row ended while they sampled it, "
                f"the last: {reason}"
            )
            self._end(sequence, sequence.output(error))
        self._waiting.extendleft(reversed(going_on))
        self._loads.pop(worker, None)
        return item_ids

    def fail(self, item_ids: Iterable[str], error: str) -> None:
        """End the sequences of items that cannot be sampled, with the reason."""
        for item_id in item_ids:
            if (sequence := self._items.get(item_id)) is not None:
                self._end(sequence, sequence.output(error))

    def cancel(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """End sequences; each delivers the reported tokens. Return the items to end, by worker."""
        items: dict[int, list[str]] = {}
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is None:
                continue
            if sequence.worker is None:
                self._waiting.remove(sequence)
            else:
                items.setdefault(sequence.worker, []).append(sequence.item.item_id)
            self._end(sequence, sequence.output(None))
        return items

    def cancel_waiting(self) -> None:
        self.cancel([sequence.request.request_id for sequence in self._waiting])

    def forget_newer(self, version: int) -> None:
        """Forget tokens of later versions than `version` of the sequences that wait."""
        for sequence in self._waiting:
            item = sequence.item
            item.policy_versions[:] = [run for run in item.policy_versions if run[0] <= version]
            num_kept = sum(count for _, count in item.policy_versions)
            del item.token_ids[num_kept:], item.logprobs[num_kept:]

    def abandon(self) -> Mapping[int, OutputSink]:
        """Forget every sequence; return the sinks that get no output, by identity."""
        sinks = {id(sequence.sink): sequence.sink for sequence in self._sequences.values()}
        for collection in (self._waiting, self._sequences, self._items, self._loads):
            collection.clear()
        return sinks

    def _sequence_of(self, worker: int, item_id: str) -> PooledSequence | None:
        sequence = self._items.get(item_id)
        return sequence if sequence is not None and sequence.worker == worker else None

    def _has_room(self, worker: Candidate, num_sequences: int) -> bool:
        num_fitting = worker.capacity - self.load(worker.number)
        return num_fitting >= min(num_sequences, max(1, worker.capacity // 2))

    def _least_loaded(self, workers: Iterable[Candidate]) -> Candidate:
        return min(workers, key=lambda worker: (self.load(worker.number), worker.number))

    def _near(self, workers: Sequence[Candidate], sequence: PooledSequence) -> Sequence[Candidate]:
        least = self.load(self._least_loaded(workers).number)
        idle = {w.number: w for w in workers if self.load(w.number) <= least + w.capacity // 4}
        tokens = [*sequence.request.prompt_ids, *sequence.item.token_ids]
        version = max(worker.version for worker in workers)
        num_cached, holders = self._routes.longest(idle.keys(), version, tokens)
        return [idle[number] for number in holders] if 2 * num_cached >= len(tokens) else workers

    def _release(self, sequence: PooledSequence) -> None:
        if sequence.worker is not None:
            del self._items[sequence.item.item_id]
            self._loads[sequence.worker] -= 1
            sequence.worker = None

    def _end(self, sequence: PooledSequence, output: GenerationOutput) -> None:
        self._release(sequence)
        del self._sequences[sequence.request.request_id]
        sequence.sink.put(output)


class PrefixRoutes:
    """Workers that computed the keys of a prefix, a chain of chunks under one policy version.

    A worker's KV cache may have dropped the keys since, and hashes may collide: both cost a
    prefill, and change no token.
    """

    def __init__(self, max_links: int = MAX_LINKS) -> None:
        self._max_links = max_links
        # The links used last are at the end.
        self._workers: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, worker: int, version: int, tokens: Sequence[int]) -> None:
        """Record that a worker has computed the keys of `tokens` under a policy version."""
        for link in _links(version, tokens):
            holders = self._workers.pop(link, set())
            holders.add(worker)
            self._workers[link] = holders
        while len(self._workers) > self._max_links:
            del self._workers[next(iter(self._workers))]

    def longest(
        self, workers: Collection[int], version: int, tokens: Sequence[int]
    ) -> tuple[int, Collection[int]]:
        """Return the longest prefix's number of tokens, and the workers that have its keys."""
        num_links = 0
        for link in _links(version, tokens):
            holders = self._workers.get(link, set()).intersection(workers)
            if not holders:
                break
            num_links, workers = num_links + 1, holders
        return num_links * CHUNK_TOKENS, workers


def _newest_version(sampled: WorkItem | GenerationOutput) -> int:
    return sampled.policy_versions[-1][0] if sampled.policy_versions else 0


def _links(version: int, tokens: Sequence[int]) -> Iterator[int]:
    link = hash(version)
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        link = hash((link, *tokens[start : start + CHUNK_TOKENS]))
        yield link
