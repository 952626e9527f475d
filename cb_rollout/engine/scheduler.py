"""Which sequences run next, and which blocks and slots they hold.

Owns the queues, the block pool and the prefix index. Knows tokens and blocks, never tensors.
"""

import heapq
from collections import deque
from collections.abc import Callable

from cb_rollout.engine.blocks import BlockPool
from cb_rollout.engine.limits import Limits
from cb_rollout.engine.prefixes import PrefixIndex
from cb_rollout.engine.request import NO_SLOT, Prefill, Request
from cb_rollout.metrics import EngineCounters
from cb_rollout.types import RequestStatus


class Scheduler:
    """Admits, forks, preempts and retires sequences."""

    def __init__(
        self, limits: Limits, counters: EngineCounters, grow: Callable[[int], int]
    ) -> None:
        """Start empty, with no block.

        Args:
            limits: what may be used.
            counters: where preemptions and shared tokens are counted.
            grow: asked for this many more blocks, makes as many as it can and returns how many
                there are in all.
        """
        self.limits = limits
        self.prefixes = PrefixIndex(limits.block_size)
        self.pool = BlockPool(0, on_evict=self.prefixes.forget)
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[Prefill] = deque()
        self.running: list[Request] = []
        self.policy_version = 0
        self._counters = counters
        self._grow = grow
        self._num_ended_waiting = 0
        self._free_slots = list(range(limits.max_requests))
        self._seated: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.num_waiting or self.prefilling or self.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that are queued and have not been ended."""
        return len(self.waiting) - self._num_ended_waiting

    def add(self, request: Request) -> None:
        """Queue a sequence."""
        self.waiting.append(request)

    def schedule_prefill(self) -> list[Prefill]:
        """The prompts, or chunks of prompts, of the coming forward; empty when there are none.

        Rows are padded to the longest, so the padded size is what stays within `max_batch_tokens`.
        """
        chosen: list[Prefill] = []
        width = 0
        pending = deque(self.prefilling)
        while prefill := (pending.popleft() if pending else self._admit()):
            remaining = prefill.leader.num_tokens - prefill.leader.num_computed
            if self.limits.can_resume_prompts:
                remaining = min(remaining, self.limits.max_batch_tokens)
            padded = max(width, remaining) * (len(chosen) + 1)
            if chosen and padded > self.limits.max_batch_tokens:
                break
            prefill.num_scheduled = remaining
            chosen.append(prefill)
            width = max(width, remaining)
        return chosen

    def _admit(self) -> Prefill | None:
        """Move the first waiting sequence, and what can be forked from it, to the prefilling ones.

        A block is left for every running sequence, or they would soon preempt the newcomer.
        """
        self._pass_over_ended()
        if not self.waiting or not self._free_slots:
            return None
        leader = self.waiting[0]
        shared, node = [], 0
        if self.limits.can_match_prefixes:
            shared, node = self.prefixes.match(self.policy_version, leader.token_ids)
            self.pool.share(shared)
        num_new = self._num_blocks(leader.num_tokens) - len(shared)
        if not self._secure(num_new + len(self.running)):
            self.pool.release(shared)
            return None
        self.waiting.popleft()
        self._seat(leader, shared + self.pool.allocate(num_new))
        leader.prefix_node, leader.num_remembered = node, len(shared)
        leader.num_computed = len(shared) * self.limits.block_size
        self._counters.prefill_tokens_saved += leader.num_computed
        prefill = Prefill(leader)
        self._admit_followers(prefill)
        self.prefilling.append(prefill)
        return prefill

    def _pass_over_ended(self) -> None:
        while self.waiting and self.waiting[0].status.is_final:
            self.waiting.popleft()
            self._num_ended_waiting -= 1

    def _admit_followers(self, prefill: Prefill) -> None:
        """Seat the neighbours that ask for the same prompt; they share its whole blocks."""
        leader = prefill.leader
        if leader.group is None or leader.num_generated:
            return
        num_shared = len(leader.prompt_ids) // self.limits.block_size
        if not self.limits.can_share_blocks:
            num_shared = 0
        num_own = len(leader.block_ids) - num_shared
        while self._free_slots:
            self._pass_over_ended()
            if not self.waiting:
                return
            follower = self.waiting[0]
            if follower.group != leader.group or follower.num_generated:
                return
            if not self._secure(num_own + len(self.running)):
                return
            self.waiting.popleft()
            shared = leader.block_ids[:num_shared]
            self.pool.share(shared)
            self._seat(follower, shared + self.pool.allocate(num_own))
            prefill.followers.append(follower)

    def _seat(self, request: Request, block_ids: list[int]) -> None:
        request.slot = heapq.heappop(self._free_slots)
        request.block_ids = block_ids
        request.status = RequestStatus.PREFILLING
        self._seated.append(request)

    def take_seated(self) -> list[Request]:
        """The sequences that were given a slot and blocks since the last call."""
        seated, self._seated = self._seated, []
        return seated

    def complete_prefill(self, prefill: Prefill) -> tuple[list[int], list[int]]:
        """Account for a computed chunk; after the last one, let the group decode.

        Returns:
            The blocks to copy, source and target, so that each follower owns its last ones.
        """
        leader = prefill.leader
        leader.num_computed += prefill.num_scheduled
        self._remember(leader)
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

    def schedule_decode(self) -> list[tuple[Request, int]]:
        """Give every running sequence a place for its newest token, preempting where there is none.

        Returns:
            The sequences that got a new block, with that block.
        """
        extended = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if self._num_blocks(request.num_tokens) > len(request.block_ids):
                if not self._secure(1):
                    self._preempt(self.running[-1])
                    continue
                (block,) = self.pool.allocate(1)
                request.block_ids.append(block)
                extended.append((request, block))
            index += 1
        return extended

    def complete_decode(self) -> None:
        """Account for one computed token of every running sequence."""
        for request in self.running:
            request.num_computed += 1
            self._remember(request)

    def unservable(self, max_blocks: int) -> Request | None:
        """The first waiting sequence, if not even an empty cache of `max_blocks` could hold it."""
        self._pass_over_ended()
        if self.running or self.prefilling or not self.waiting:
            return None
        head = self.waiting[0]
        return head if self._num_blocks(head.num_tokens) > max_blocks else None

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
        if request.slot == NO_SLOT:
            self._num_ended_waiting += 1
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

    def recompute_all(self, policy_version: int) -> None:
        """From now on cache for `policy_version`: forget every older key, and compute them anew."""
        self.policy_version = policy_version
        unfinished = [*self.running]
        for prefill in self.prefilling:
            unfinished += [prefill.leader, *prefill.followers]
        self.running, self.prefilling = [], deque()
        for request in reversed(unfinished):
            self._requeue(request)
        self.pool.forget(self.prefixes.clear())

    def _preempt(self, request: Request) -> None:
        """Give up the youngest sequence's blocks; it resumes later with all its tokens."""
        self._counters.preemptions += 1
        self.running.remove(request)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self._free(request)
        request.reset_cache()
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        if request.slot != NO_SLOT:
            self.pool.release(reversed(request.block_ids))
            heapq.heappush(self._free_slots, request.slot)
            request.slot, request.block_ids = NO_SLOT, []

    def _remember(self, request: Request) -> None:
        """Offer newly filled blocks to the prefix index."""
        if not self.limits.can_match_prefixes:
            return
        size = self.limits.block_size
        while (request.num_remembered + 1) * size <= request.num_computed:
            first = request.num_remembered
            block = request.block_ids[first]
            tokens = request.token_ids[first * size : (first + 1) * size]
            request.prefix_node, is_holder = self.prefixes.insert(
                self.policy_version, request.prefix_node, tokens, block
            )
            if is_holder:
                self.pool.remember(block)
            request.num_remembered += 1

    def _secure(self, count: int) -> bool:
        """Whether `count` blocks are available, after growing if need be."""
        missing = count - self.pool.num_available
        if missing > 0:
            num_blocks = self._grow(missing)
            if num_blocks > self.pool.num_blocks:
                self.pool.grow(num_blocks)
        return count <= self.pool.num_available

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)
