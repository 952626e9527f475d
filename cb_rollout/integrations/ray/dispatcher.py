"""Decide which worker samples which sequence.

Owns every sequence from its submission to its single output. Starting workers, sending and locking
are left to the caller.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from cb_rollout.engine.request import Request
from cb_rollout.engine.service.output_queue import OutputSink
from cb_rollout.integrations.ray.worker import WorkItem
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus

# A sequence fails once this many workers in a row have ended while they sampled it.
MAX_DEATHS = 4


@dataclass(slots=True, eq=False)
class PooledSequence:
    """A sequence on its way through the pool."""

    request: Request
    """Prompt, seed and settings, as a local engine would have made them."""
    sink: OutputSink
    """Receives its single output."""
    worker: int | None = None
    """Worker that samples it; None: it is waiting."""
    item_id: str = ""
    """Id of the current attempt."""
    num_attempts: int = 0
    num_deaths: int = 0
    is_cancelled: bool = False
    """True: its worker was told to end it, and will deliver the tokens so far."""

    def next_item(self) -> WorkItem:
        request = self.request
        self.num_attempts += 1
        self.item_id = f"{request.request_id}/{self.num_attempts}"
        return WorkItem(
            item_id=self.item_id,
            prompt_ids=request.prompt_ids,
            params=replace(request.params, max_new_tokens=request.max_new_tokens),
            seed=request.seed,
            group=request.group,
            records_timestamps=request.records_timestamps,
            images=request.images,
        )

    def output(self, error: str | None) -> GenerationOutput:
        """Return an output without tokens: failed with `error`, or cancelled if it is None."""
        if error is None:
            self.request.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
        else:
            self.request.fail(error)
        return self.request.output()


class Dispatcher:
    """The sequences of a pool, by the worker that samples them."""

    def __init__(self) -> None:
        self._waiting: deque[PooledSequence] = deque()
        self._sequences: dict[str, PooledSequence] = {}
        self._items: dict[str, PooledSequence] = {}
        self._loads: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def load(self, worker: int) -> int:
        return self._loads.get(worker, 0)

    def add(self, requests: Iterable[Request], sink: OutputSink) -> None:
        """Queue sequences; the members of a group must be adjacent."""
        arrival: dict[int | None, int] = {}
        added = []
        for request in requests:
            assert request.request_id not in self._sequences, "one id twice"
            arrival.setdefault(request.group, len(arrival))
            added.append(PooledSequence(request, sink))
        self._sequences |= {sequence.request.request_id: sequence for sequence in added}
        self._waiting.extend(sorted(added, key=lambda sequence: arrival[sequence.request.group]))

    def assign(self, capacities: Mapping[int, int]) -> dict[int, list[WorkItem]]:
        """Give waiting sequences to the least loaded workers, first come first served.

        `capacities` are the sequences that each worker should hold. A group of at most half of them
        goes to one worker. Returns the items of each worker that gets some.
        """
        assigned: dict[int, list[WorkItem]] = {}
        while self._waiting:
            group = self._first_waiting_group()
            roomy = []
            for worker, capacity in capacities.items():
                room = capacity - self.load(worker)
                if room >= min(len(group), max(1, capacity // 2)):
                    roomy.append(worker)
            if not roomy:
                break
            chosen = min(roomy, key=lambda worker: (self.load(worker), worker))
            room = capacities[chosen] - self.load(chosen)
            for sequence in group[:room]:
                self._waiting.popleft()
                sequence.worker = chosen
                assigned.setdefault(chosen, []).append(sequence.next_item())
                self._items[sequence.item_id] = sequence
                self._loads[chosen] = self.load(chosen) + 1
        return assigned

    def _first_waiting_group(self) -> list[PooledSequence]:
        """Return the sequences of the group at the head of the queue."""
        group_of_first = self._waiting[0].request.group
        return list(takewhile(lambda s: s.request.group == group_of_first, self._waiting))

    def deliver(self, worker: int, outputs: Iterable[GenerationOutput]) -> None:
        """Deliver a worker's finished sequences; ignore abandoned attempts."""
        for output in outputs:
            sequence = self._items.get(output.request_id)
            if sequence is None or sequence.worker != worker:
                continue
            request, began = sequence.request, sequence.request.created_time
            since_began, until_ended = output.lifespan
            ended = replace(
                output,
                request_id=request.request_id,
                created_time=began,
                lifespan=(began + since_began, began + until_ended),
                timestamps=output.timestamps and [began + s for s in output.timestamps],
                images=request.images,
            )
            self._end(sequence, ended)

    def withdraw(self, worker: int, *, is_dead: bool, reason: str = "") -> int:
        """Take back a worker's sequences; they restart elsewhere, ahead of the queue.

        `is_dead` counts the attempt against each sequence, and fails a sequence that has ended too
        many workers, with the `reason` for the worker's end. Returns the number of sequences.
        """
        taken = [sequence for sequence in self._items.values() if sequence.worker == worker]
        again = []
        for sequence in taken:
            self._release(sequence)
            sequence.num_deaths += is_dead
            if sequence.is_cancelled:
                self._end(sequence, sequence.output(None))
            elif sequence.num_deaths < MAX_DEATHS:
                again.append(sequence)
            else:
                text = f"{MAX_DEATHS} workers in a row ended while they sampled it, the last: "
                self._end(sequence, sequence.output(text + reason))
        self._waiting.extendleft(reversed(again))
        self._loads.pop(worker, None)
        return len(taken)

    def fail(self, item_ids: Iterable[str], error: str) -> None:
        """Fail the sequences of items that cannot be sampled, with the reason."""
        for item_id in item_ids:
            if (sequence := self._items.get(item_id)) is not None:
                self._end(sequence, sequence.output(error))

    def cancel(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """Cancel waiting sequences; return the items that workers must cancel, by worker."""
        items: dict[int, list[str]] = {}
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is None:
                continue
            if sequence.worker is None:
                self._waiting.remove(sequence)
                self._end(sequence, sequence.output(None))
            else:
                sequence.is_cancelled = True
                items.setdefault(sequence.worker, []).append(sequence.item_id)
        return items

    def cancel_waiting(self) -> None:
        self.cancel([sequence.request.request_id for sequence in self._waiting])

    def abandon(self) -> Iterable[OutputSink]:
        """Forget every sequence; return the sinks that will get no output."""
        sinks = {id(sequence.sink): sequence.sink for sequence in self._sequences.values()}
        for collection in (self._waiting, self._sequences, self._items, self._loads):
            collection.clear()
        return sinks.values()

    def _release(self, sequence: PooledSequence) -> None:
        if sequence.worker is not None:
            del self._items[sequence.item_id]
            self._loads[sequence.worker] -= 1
            sequence.worker = None

    def _end(self, sequence: PooledSequence, output: GenerationOutput) -> None:
        self._release(sequence)
        del self._sequences[sequence.request.request_id]
        sequence.sink.put(output)
