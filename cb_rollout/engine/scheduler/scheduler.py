"""Sequences that wait for blocks and a table row, first come first.

One that ended while it waited stays where it is and is passed over, so that ending it costs the
same however many wait.

Which sequences run next, and which table_rows they hold.

Owns the queues. Knows tokens and blocks, never tensors.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from cb_rollout.engine.kv_cache.block_manager import BlockManager
from cb_rollout.engine.kv_cache.offload import NoOffload
from cb_rollout.engine.request import NO_TABLE_ROW, Limits, Prefill, Request
from cb_rollout.metrics.counters import EngineCounters
from cb_rollout.types import RequestStatus


class WaitingQueue:
    """A queue whose length counts the unfinished."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        """Start with `requests`."""
        self._requests = deque(requests)
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._requests) - self._num_ended

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._requests if not request.status.is_final)

    @property
    def head(self) -> Request | None:
        """Who is next; None: nobody waits."""
        while self._requests and self._requests[0].status.is_final:
            self._requests.popleft()
            self._num_ended -= 1
        return self._requests[0] if self._requests else None

    def append(self, request: Request) -> None:
        """Queue a newcomer."""
        self._requests.append(request)

    def appendleft(self, request: Request) -> None:
        """Let one that ran before be next."""
        self._requests.appendleft(request)

    def take(self) -> Request:
        """Remove and return the head, which must exist."""
        head = self.head
        assert head is not None
        return self._requests.popleft()

    def note_ended(self) -> None:
        """One of the queue was ended."""
        self._num_ended += 1


MIN_BATCH_TOKENS = 16
# A prefill that has no memory for this many tokens has none for a decode either.


class Scheduler:
    """Admits, forks, preempts and retires sequences."""

    def __init__(
        self,
        limits: Limits,
        counters: EngineCounters,
        grow: Callable[[int], int],
        policy_version: int = 0,
        offloader: NoOffload | None = None,
    ) -> None:
        """Start empty, with no block.

        Args:
            limits: what may be used.
            counters: where preemptions and shared tokens are counted.
            grow: asked for this many more blocks, makes as many as it can and returns how many
                there are in all.
            policy_version: under which keys are computed.
            offloader: may keep the keys of preempted sequences; None: they are computed anew.
        """
        self.limits = limits
        self._offloader = offloader or NoOffload()
        self.blocks = BlockManager(limits, grow, policy_version)
        self.pool = self.blocks.pool
        self.waiting = WaitingQueue()
        self.prefilling: deque[Prefill] = deque()
        self.running: list[Request] = []
        self.max_batch_tokens = limits.max_batch_tokens
        """Shrinks where a forward ran out of memory."""
        self.max_seated = limits.max_requests
        """Most sequences that hold a table row; shrinks likewise."""
        self._counters = counters
        self._free_table_rows = list(range(limits.max_requests))
        self._seated: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(len(self.waiting) or self.prefilling or self.running)

    def num_usable_blocks(self) -> list[int]:
        """Return the blocks that each running sequence may come to need; shared ones twice.

        Waiting sequences count as far as table rows go.
        """
        seated = [m for prefill in self.prefilling for m in (prefill.leader, *prefill.followers)]
        seated += self.running
        waiting = islice(self.waiting, self.limits.max_requests - len(seated))
        return [
            self.blocks.num_needed(len(request.prompt_ids) + request.max_new_tokens)
            for request in (*seated, *waiting)
        ]

    def add(self, request: Request) -> None:
        """Queue a sequence."""
        self.waiting.append(request)

    def schedule_prefill(self) -> list[Prefill]:
        """The prompts, or chunks, of the coming forward; padded, `max_batch_tokens` at most."""
        chosen: list[Prefill] = []
        width = 0
        pending = deque(self.prefilling)
        while prefill := (pending.popleft() if pending else self._admit()):
            remaining = prefill.leader.num_tokens - prefill.leader.num_computed
            if self.limits.can_resume_prompts:
                remaining = min(remaining, self.max_batch_tokens)
            padded = max(width, remaining) * (len(chosen) + 1)
            if chosen and padded > self.max_batch_tokens:
                break
            prefill.num_scheduled = remaining
            chosen.append(prefill)
            width = max(width, remaining)
        return chosen

    def _admit(self) -> Prefill | None:
        """Move the first waiting sequence, and what can be forked from it, to the prefilling ones.

        A block is left for every running sequence, or they would soon preempt the newcomer.
        """
        leader = self.waiting.head
        if leader is None or not self._can_seat:
            return None
        if not self.blocks.allocate_prompt(leader, num_spare=len(self.running)):
            return None
        self.waiting.take()
        self._seat(leader)
        self._offloader.restore(leader)
        self._counters.prefill_tokens_saved += leader.num_computed
        prefill = Prefill(leader)
        self._admit_followers(prefill)
        self.prefilling.append(prefill)
        return prefill

    @property
    def num_seated(self) -> int:
        """Sequences that hold a table row."""
        return self.limits.max_requests - len(self._free_table_rows)

    @property
    def _can_seat(self) -> bool:
        return self.num_seated < self.max_seated

    def _admit_followers(self, prefill: Prefill) -> None:
        """Seat the neighbours that ask for the same prompt; they share its whole blocks."""
        leader = prefill.leader
        if leader.group is None or leader.num_generated:
            return
        while self._can_seat and (follower := self.waiting.head):
            if follower.group != leader.group or follower.num_generated:
                return
            if not self.blocks.allocate_fork(follower, leader, num_spare=len(self.running)):
                return
            self.waiting.take()
            self._seat(follower)
            prefill.followers.append(follower)

    def _seat(self, request: Request) -> None:
        request.table_row = heapq.heappop(self._free_table_rows)
        request.status = RequestStatus.PREFILLING
        if request.seated_time is None:
            request.seated_time = time.perf_counter()
        self._seated.append(request)

    def take_seated(self) -> list[Request]:
        """The sequences that were given a table row and blocks since the last call."""
        seated, self._seated = self._seated, []
        return seated

    def complete_prefill(self, prefill: Prefill) -> tuple[list[int], list[int]]:
        """Account for a computed chunk; after the last one, let the group decode.

        Returns:
            The blocks to copy, source and target, so that each follower owns its last ones.
        """
        leader = prefill.leader
        leader.num_computed += prefill.num_scheduled
        self.blocks.remember(leader)
        if leader.num_computed < leader.num_tokens:
            return [], []
        self.prefilling.remove(prefill)
        sources: list[int] = []
        targets: list[int] = []
        for follower in prefill.followers:
            for source, target in zip(leader.block_ids, follower.block_ids, strict=True):
                if source != target:
                    sources.append(source)
                    targets.append(target)
            follower.num_computed = leader.num_computed
            self._counters.prefill_tokens_saved += follower.num_tokens
            follower.prefix_node = leader.prefix_node
            follower.num_remembered = leader.num_remembered
        for request in (leader, *prefill.followers):
            request.status = RequestStatus.DECODING
            self.running.append(request)
        return sources, targets

    def schedule_decode(self) -> list[tuple[int, int, int]]:
        """Give every running sequence a place for its newest token, preempting where there is none.

        Returns:
            The blocks that sequences got, each as table row, index within the sequence, and block.
        """
        extended: list[tuple[int, int, int]] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if self.blocks.num_needed(request.num_tokens) > len(request.block_ids):
                blocks = self.blocks.extend(request, request.num_tokens)
                if blocks is None:
                    self._offloader.save(self.running[-1])
                    self.preempt([self.running[-1]])
                    continue
                extended += blocks
            index += 1
        return extended

    def complete_decode(self, requests: list[Request]) -> None:
        """Account for one computed token of each of these running sequences."""
        for request in requests:
            request.num_computed += 1
            self.blocks.remember(request)

    def complete_drafted(self) -> None:
        """Account for a step that brought several tokens: all but the newest are computed."""
        for request in self.running:
            request.num_computed = request.num_tokens - 1
            self.blocks.remember(request)

    def retire_running(self) -> list[Request]:
        """Take the running sequences that ended out, and free what they held."""
        ended = [request for request in self.running if request.status.is_final]
        if ended:
            self.running = [r for r in self.running if not r.status.is_final]
            for request in ended:
                self._free(request)
        return ended

    def retire(self, request: Request) -> None:
        """Take out one sequence that was ended from outside, wherever it is.

        A waiting one is passed over when its turn comes.
        """
        assert request.status.is_final
        self._offloader.drop(request)
        if request.table_row == NO_TABLE_ROW:
            self.waiting.note_ended()
            return
        if request in self.running:
            self.running.remove(request)
        for prefill in list(self.prefilling):
            if request in prefill.followers:
                prefill.followers.remove(request)
            elif prefill.leader is request:
                self.prefilling.remove(prefill)
                for follower in reversed(prefill.followers):
                    self._requeue(follower)
        self._free(request)

    def begin_policy_version(self, policy_version: int, keep_keys: bool) -> None:
        """From now on cache for `policy_version`: no older key is ever matched again.

        Running sequences go on with the keys they have (`keep_keys`), which no other sequence will
        share, or are computed anew; unfinished prompts always are.
        """
        self._offloader.clear()
        if keep_keys:
            for request in self.running:
                request.has_old_keys = True
        else:
            self._requeue_all(self.running)
            self.running = []
        members = [m for prefill in self.prefilling for m in (prefill.leader, *prefill.followers)]
        self.prefilling = deque()
        self._requeue_all(members)
        self.blocks.begin_policy_version(policy_version)

    def narrow_prefill(self) -> bool:
        """After a prefill ran out of memory: halve what one takes; False when it cannot be less."""
        if self.max_batch_tokens <= MIN_BATCH_TOKENS:
            return False
        self.max_batch_tokens = max(MIN_BATCH_TOKENS, self.max_batch_tokens // 2)
        return True

    def narrow_decode(self) -> bool:
        """After a decode ran out of memory: preempt all, and seat half as many; False when one."""
        if len(self.running) <= 1:
            return False
        self.max_seated = len(self.running) // 2
        self.preempt(self.running)
        return True

    def preempt(self, requests: list[Request]) -> None:
        """Give up what running sequences hold; they resume later with all their tokens."""
        preempted = [request for request in requests if request in self.running]
        self._counters.preemptions += len(preempted)
        for request in preempted:
            request.num_preemptions += 1
        self.running = [request for request in self.running if request not in preempted]
        self._requeue_all(preempted)

    def _requeue_all(self, requests: list[Request]) -> None:
        for request in reversed(requests):
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self._free(request)
        request.reset_cache()
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        if request.table_row != NO_TABLE_ROW:
            self.pool.release(reversed(request.block_ids))
            heapq.heappush(self._free_table_rows, request.table_row)
            request.table_row, request.block_ids = NO_TABLE_ROW, []
