"""Choose which sequences run in the next step, and which table rows and blocks they hold.

Owns the queues. Handles no tensors. Called by the thread that steps the engine.
"""

import heapq
import operator
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from cb_rollout.config.enums import SchedulerType
from cb_rollout.engine.kv_cache.block_manager import BlockManager
from cb_rollout.engine.kv_cache.block_pool import BlockPool
from cb_rollout.engine.request import NO_TABLE_ROW, Limits, Prefill, Request, members
from cb_rollout.metrics.registry import EngineCounters
from cb_rollout.types import RequestStatus

# A prefill that has no memory for this many tokens has none for a decode either.
MIN_BATCH_TOKENS = 16

# A prefill that continues any row gathers the keys of all its rows, padding included: at most this
# many for each token that it may compute. One layer's keys of 65,536 tokens (8,192 times this) are
# 256 MiB for 8 key heads of 128 in 16 bits, and four times that repeated for 32 heads.
MAX_GATHER_RATIO = 8

# A prefill of few prompts costs as much as a decode step of many rows.
RUNNING_PER_PROMPT = 4

# Decode steps that waiting prompts are held back for, at most.
MAX_DECODES_IN_A_ROW = 8


@dataclass(eq=False)
class Scheduler:
    """Admits, forks, preempts and retires sequences; lives as long as its engine."""

    limits: Limits
    counters: EngineCounters
    grow: Callable[[int], int]
    """Makes room for as many more blocks as it can, and returns the total."""
    scheduler_type: str = SchedulerType.FIFO
    before_release: Callable[[Request], None] = lambda request: None
    """Called with each sequence that is about to lose its blocks."""
    waiting: OrderedDict[Request, None] = field(default_factory=OrderedDict, init=False)
    """Sequences that wait for blocks and a table row, the next one first."""
    prefilling: deque[Prefill] = field(default_factory=deque, init=False)
    running: list[Request] = field(default_factory=list, init=False)
    blocks: BlockManager = field(init=False)
    max_batch_tokens: int = field(init=False)
    """Tokens of one prefill; shrinks where a forward ran out of memory."""
    max_admitted: int = field(init=False)
    """Sequences that may hold a table row; shrinks likewise."""
    num_decodes_in_a_row: int = field(init=False)
    """Decode steps since the last prefill."""

    def __post_init__(self) -> None:
        self._start_empty(self.limits, policy_version=0)

    def _start_empty(self, limits: Limits, policy_version: int) -> None:
        self.limits = limits
        self.blocks = BlockManager(limits, self.grow, policy_version)
        self.max_batch_tokens, self.max_admitted = limits.max_batch_tokens, limits.max_requests
        self.num_decodes_in_a_row = 0
        self._free_table_rows = list(range(limits.max_requests))
        self._newly_admitted: list[Request] = []

    def reset(self, limits: Limits) -> None:
        """Have all unfinished sequences wait again, hold no block, and follow other limits."""
        self.begin_policy_version(self.blocks.policy_version, keep_keys=False)
        self._start_empty(limits, self.blocks.policy_version)

    def clear(self) -> None:
        """Drop all sequences, without touching them, and every block."""
        self.waiting.clear()
        self.prefilling, self.running = deque(), []
        self._start_empty(self.limits, self.blocks.policy_version)

    @property
    def pool(self) -> BlockPool:
        return self.blocks.pool

    @property
    def is_prefill_next(self) -> bool:
        """Return whether a prefill is tried before a decode step; the other runs if it cannot."""
        num_decodes = self.num_decodes_in_a_row
        is_prefill_first = self.scheduler_type == SchedulerType.PREFILL_FIRST
        if is_prefill_first or num_decodes >= MAX_DECODES_IN_A_ROW:
            return True
        num_startable = min(len(self.waiting), self.num_admissible)
        is_worthwhile = num_startable * RUNNING_PER_PROMPT >= len(self.running)
        return num_decodes > 0 and (is_worthwhile or bool(self.prefilling))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def next_waiting(self) -> Request | None:
        return next(iter(self.waiting), None)

    @property
    def num_admitted(self) -> int:
        return self.limits.max_requests - len(self._free_table_rows)

    @property
    def num_admissible(self) -> int:
        """Sequences that may still be admitted; negative after `narrow_decode`."""
        return self.max_admitted - self.num_admitted

    def num_usable_blocks(self) -> list[int]:
        """Return the blocks of each sequence at its longest, for as many as have table rows."""
        requests = [*members(self.prefilling), *self.running]
        requests += islice(self.waiting, self.limits.max_requests - len(requests))
        needed = self.blocks.num_needed
        return [needed(len(r.prompt_ids) + r.max_new_tokens) for r in requests]

    def add(self, request: Request) -> None:
        self.waiting[request] = None

    def schedule_prefill(self) -> list[Prefill]:
        """Choose prompts, or chunks of them: at most `max_batch_tokens`, any padding included.

        Where a row continues, all rows together gather at most `MAX_GATHER_RATIO` times as many.
        The first chunk of a prompt with images runs alone, up to the last image's end at least.
        """
        chosen: list[Prefill] = []
        has_history = False
        # Padded, each row takes as much as the longest.
        is_packed, num_new, num_keys = self.limits.is_packed, 0, 0
        combine = operator.add if is_packed else max
        pending = deque(self.prefilling)
        while prefill := (pending.popleft() if pending else self._admit()):
            before = prefill.leader.num_computed
            remaining = prefill.leader.num_tokens - before
            num_image_tokens = prefill.leader.num_image_tokens - before
            if self.limits.can_resume_prompts:
                remaining = min(remaining, max(self.max_batch_tokens, num_image_tokens))
            if chosen and num_image_tokens > 0:
                break
            num_new, num_keys = combine(num_new, remaining), combine(num_keys, before + remaining)
            has_history |= before > 0
            num_rows = 1 if is_packed else len(chosen) + 1
            is_full = num_rows * num_new > self.max_batch_tokens
            gathers_much = num_rows * num_keys > MAX_GATHER_RATIO * self.max_batch_tokens
            if chosen and (is_full or (has_history and gathers_much)):
                break
            prefill.num_scheduled = remaining
            chosen.append(prefill)
            if num_image_tokens > 0:
                break
        return chosen

    def _admit(self) -> Prefill | None:
        """Begin the prefill of the first waiting sequence and of its followers.

        A block stays free for every running sequence, or they would soon preempt the newcomer.
        """
        leader = self.next_waiting
        if leader is None or self.num_admissible <= 0:
            return None
        num_spare = len(self.running)
        if not self.blocks.allocate_prompt(leader, num_spare):
            return None
        self._assign_table_row(leader)
        self.counters.prefill_tokens_saved += leader.num_computed
        prefill = Prefill(leader)
        can_fork = leader.group is not None and not leader.num_generated
        while can_fork and self.num_admissible > 0 and (follower := self.next_waiting):
            is_alike = follower.group == leader.group and not follower.num_generated
            if not (is_alike and self.blocks.allocate_fork(follower, leader, num_spare)):
                break
            self._assign_table_row(follower)
            prefill.followers.append(follower)
        self.prefilling.append(prefill)
        return prefill

    def _assign_table_row(self, request: Request) -> None:
        del self.waiting[request]
        request.table_row = heapq.heappop(self._free_table_rows)
        request.status = RequestStatus.PREFILLING
        if request.admitted_time is None:
            request.admitted_time = time.perf_counter()
        self._newly_admitted.append(request)

    def take_admitted(self) -> list[Request]:
        """Return the sequences that got a table row and blocks since the last call."""
        admitted, self._newly_admitted = self._newly_admitted, []
        return admitted

    def complete_prefill(self, prefill: Prefill) -> tuple[list[int], list[int]]:
        """Account for a computed chunk; after the last one, let the group decode.

        Returns blocks to copy, sources and targets, so that each follower owns its last ones.
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
            num_shared = sum(map(operator.eq, leader.block_ids, follower.block_ids))
            sources += leader.block_ids[num_shared:]
            targets += follower.block_ids[num_shared:]
            follower.num_computed = leader.num_computed
            self.counters.prefill_tokens_saved += follower.num_tokens
            follower.prefix_node = leader.prefix_node
            follower.num_remembered = leader.num_remembered
        for request in members([prefill]):
            request.status = RequestStatus.DECODING
            self.running.append(request)
        return sources, targets

    def schedule_decode(self) -> list[tuple[int, int, int]]:
        """Give every running sequence a slot for its newest token; preempt where there is none.

        A sequence whose keys its newest token changes waits again, to be prefilled again. Returns
        the new blocks, as `BlockManager.extend`.
        """
        limits = self.limits
        if limits.rope_limits:
            changed = [r for r in self.running if limits.rope_side(r.num_tokens) != r.rope_side]
            self._requeue_running(changed)
        extended: list[tuple[int, int, int]] = []
        index, size = 0, limits.block_size
        while index < len(self.running):
            request = self.running[index]
            if len(request.token_ids) > size * len(request.block_ids):
                blocks = self.blocks.extend(request, request.num_tokens)
                if blocks is None:
                    self.preempt([self.running[-1]])
                    continue
                extended += blocks
            index += 1
        return extended

    def complete_decode(self, requests: list[Request]) -> None:
        """Account for a decode step: after sampling all tokens but the newest are computed."""
        self.counters.decode_forwards += 1
        size = self.limits.block_size
        for request in requests:
            num_before, num_computed = request.num_computed, len(request.token_ids) - 1
            request.num_computed = num_computed
            if num_computed // size > num_before // size:
                self.blocks.remember(request)

    def retire_running(self) -> None:
        """Remove the running sequences that ended, and free their blocks."""
        decoding = RequestStatus.DECODING
        ended = [request for request in self.running if request.status is not decoding]
        if ended:
            self.running = [r for r in self.running if r.status is decoding]
            for request in ended:
                assert request.status.is_final
                self._free(request)

    def retire(self, request: Request) -> None:
        assert request.status.is_final
        if request.table_row == NO_TABLE_ROW:
            del self.waiting[request]
            return
        if request in self.running:
            self.running.remove(request)
        for prefill in list(self.prefilling):
            if request in prefill.followers:
                prefill.followers.remove(request)
            elif prefill.leader is request:
                self.prefilling.remove(prefill)
                self._requeue_all(prefill.followers)
        self._free(request)

    def begin_policy_version(self, policy_version: int, keep_keys: bool) -> None:
        """Cache for `policy_version` from now on: no older key is ever matched again.

        With `keep_keys` running sequences go on with their keys, which no other sequence will
        share. Else they are computed again, as unfinished prompts always are.
        """
        if keep_keys:
            for request in self.running:
                request.has_old_keys = True
        else:
            self._requeue_running(self.running)
        prefilling, self.prefilling = self.prefilling, deque()
        self._requeue_all(members(prefilling))
        self.blocks.begin_policy_version(policy_version)

    def narrow_prefill(self) -> bool:
        """Halve the tokens of a prefill, after one ran out of memory; False at the minimum."""
        if self.max_batch_tokens <= MIN_BATCH_TOKENS:
            return False
        self.max_batch_tokens = max(MIN_BATCH_TOKENS, self.max_batch_tokens // 2)
        return True

    def narrow_decode(self) -> bool:
        """Preempt all and halve their number, after a decode ran out of memory; False for one."""
        if len(self.running) <= 1:
            return False
        self.max_admitted = len(self.running) // 2
        self.preempt(self.running)
        return True

    def preempt(self, requests: list[Request]) -> None:
        """Free the blocks of running sequences; they resume later with all their tokens."""
        preempted = [request for request in requests if request in self.running]
        self.counters.preemptions += len(preempted)
        for request in preempted:
            request.num_preemptions += 1
        self._requeue_running(preempted)

    def _requeue_running(self, requests: list[Request]) -> None:
        if requests:
            self.running = [request for request in self.running if request not in requests]
            self._requeue_all(requests)

    def _requeue_all(self, requests: list[Request]) -> None:
        for request in reversed(requests):
            self._free(request)
            request.reset_cache()
            self.waiting[request] = None
            self.waiting.move_to_end(request, last=False)

    def _free(self, request: Request) -> None:
        if request.table_row != NO_TABLE_ROW:
            self.before_release(request)
            self.pool.release(reversed(request.block_ids))
            heapq.heappush(self._free_table_rows, request.table_row)
            request.table_row, request.block_ids = NO_TABLE_ROW, []
