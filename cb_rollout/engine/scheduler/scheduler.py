"""Choose which sequences run in the next step, and which table rows and blocks they hold.

Owns the queues. Handles no tensors. Called by the thread that steps the engine.
"""

import heapq
import operator
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from cb_rollout.config.enums import SchedulerType
from cb_rollout.engine.kv_cache.block_manager import BlockManager
from cb_rollout.engine.kv_cache.block_pool import BlockPool
from cb_rollout.engine.kv_cache.offloading import KVOffloader
from cb_rollout.engine.request import NO_TABLE_ROW, Limits, Prefill, Request, members
from cb_rollout.metrics.registry import EngineCounters
from cb_rollout.types import RequestStatus

# If there is no memory to prefill this many tokens, there is none for a decode step either.
MIN_BATCH_TOKENS = 16

# A prefill that continues any row gathers the keys of all its rows, padding included: at most this
# many for each token that it may compute. One layer's keys and values of 65,536 tokens (8,192 times
# this) are 256 MiB for 8 key heads of 128 in 16 bits, and four times that repeated for 32 heads.
MAX_GATHER_RATIO = 8

# A prefill of few prompts costs as much as a decode step of many rows.
RUNNING_PER_PROMPT = 4

# The most decode steps for which waiting prompts are held back.
MAX_DECODES_IN_A_ROW = 8


@dataclass(slots=True)
class PrefillSize:
    """The tokens that a prefill computes and the keys that it gathers, padding included."""

    is_packed: bool
    """True if rows are packed; False: each row is padded to the longest."""
    num_rows: int = 0
    num_new: int = 0
    """New tokens: the sum over rows if packed, otherwise the longest row's."""
    num_keys: int = 0
    """New and cached tokens: the sum over rows if packed, otherwise the longest row's."""
    has_history: bool = False
    """True if a row continues a prompt, so that keys are gathered."""

    def add(self, num_new: int, num_before: int) -> None:
        """Add a row of `num_new` tokens after `num_before` computed ones."""
        num_keys = num_before + num_new
        if self.is_packed:
            self.num_new += num_new
            self.num_keys += num_keys
        else:
            self.num_new = max(self.num_new, num_new)
            self.num_keys = max(self.num_keys, num_keys)
        self.num_rows += 1
        if num_before > 0:
            self.has_history = True

    def exceeds(self, max_batch_tokens: int) -> bool:
        """Return whether the rows exceed the limits of one prefill."""
        num_rows = 1 if self.is_packed else self.num_rows
        if num_rows * self.num_new > max_batch_tokens:
            return True
        gathers_much = num_rows * self.num_keys > MAX_GATHER_RATIO * max_batch_tokens
        return self.has_history and gathers_much


@dataclass(eq=False)
class Scheduler:
    """Admits, forks, preempts and retires sequences; lives as long as its engine."""

    limits: Limits
    counters: EngineCounters
    grow: Callable[[int], int]
    """Grows the cache by up to this many blocks, and returns the total."""
    scheduler_type: str = SchedulerType.FIFO
    before_release: Callable[[Request], None] = lambda request: None
    """Called with each sequence that is about to lose its blocks."""
    offloader: KVOffloader | None = None
    """Stores the keys of preempted sequences; None: they are recomputed."""
    waiting: OrderedDict[Request, None] = field(default_factory=OrderedDict, init=False)
    """Sequences that wait for blocks and a table row, the next one first."""
    prefilling: deque[Prefill] = field(default_factory=deque, init=False)
    running: list[Request] = field(default_factory=list, init=False)
    blocks: BlockManager = field(init=False)
    max_batch_tokens: int = field(init=False)
    """Maximum tokens of one prefill; shrinks when a forward runs out of memory."""
    max_admitted: int = field(init=False)
    """Maximum sequences with a table row; shrinks in the same way."""
    num_decodes_in_a_row: int = field(init=False)
    """Decode steps since the last prefill."""

    def __post_init__(self) -> None:
        self._start_empty(self.limits, policy_version=0)

    def _start_empty(self, limits: Limits, policy_version: int) -> None:
        self.limits = limits
        self.blocks = BlockManager(limits, self.grow, policy_version)
        self.max_batch_tokens = limits.max_batch_tokens
        self.max_admitted = limits.max_requests
        self.num_decodes_in_a_row = 0
        self._free_table_rows = list(range(limits.max_requests))
        self._newly_admitted: list[Request] = []

    def reset(self, limits: Limits) -> None:
        """Return all unfinished sequences to the queue, without blocks, under new limits.

        Keys on the host are dropped too, and their memory is freed.
        """
        if self.offloader is not None:
            self.offloader.release()
        self.begin_policy_version(self.blocks.policy_version, keep_keys=False)
        self._start_empty(limits, self.blocks.policy_version)

    def scheduled(self) -> list[Request]:
        """Return all sequences, in the order in which they would wait after a `reset`."""
        return [*members(self.prefilling), *self.running, *self.waiting]

    def clear(self) -> None:
        """Drop all sequences, without touching them, and every block."""
        self.waiting.clear()
        self.prefilling = deque()
        self.running = []
        if self.offloader is not None:
            self.offloader.clear()
        self._start_empty(self.limits, self.blocks.policy_version)

    @property
    def pool(self) -> BlockPool:
        return self.blocks.pool

    @property
    def is_prefill_next(self) -> bool:
        """Return whether to try a prefill before a decode step; else a decode step comes first."""
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
        """Number of sequences that may still be admitted; negative after `narrow_decode`."""
        return self.max_admitted - self.num_admitted

    def num_usable_blocks(self) -> list[int]:
        """Return the blocks needed at full length by each sequence that can get a table row."""
        requests = [*members(self.prefilling), *self.running]
        requests += islice(self.waiting, self.limits.max_requests - len(requests))
        needed = self.blocks.num_needed
        return [needed(len(r.prompt_ids) + r.max_new_tokens) for r in requests]

    def add(self, request: Request) -> None:
        self.waiting[request] = None

    def record_turn(self, *, is_prefill: bool) -> None:
        """Record the kind of the last step, which decides the order of later ones."""
        self.num_decodes_in_a_row = 0 if is_prefill else self.num_decodes_in_a_row + 1

    def schedule_prefill(self) -> list[Prefill]:
        """Choose prompts or chunks of at most `max_batch_tokens`, including padding.

        If a row continues a prompt, all rows together gather at most `MAX_GATHER_RATIO` times as
        many keys. The first chunk of a prompt with images runs alone, and reaches at least the end
        of the last image.
        """
        chosen: list[Prefill] = []
        size = PrefillSize(is_packed=self.limits.is_packed)
        for prefill in self._prefills():
            leader = prefill.leader
            num_before = leader.num_computed
            num_new = leader.num_tokens - num_before
            num_image_tokens = leader.num_image_tokens - num_before
            if self.limits.can_resume_prompts:
                num_new = min(num_new, max(self.max_batch_tokens, num_image_tokens))
            has_images = num_image_tokens > 0
            size.add(num_new, num_before)
            if chosen and (has_images or size.exceeds(self.max_batch_tokens)):
                break
            prefill.num_scheduled = num_new
            chosen.append(prefill)
            if has_images:
                break
        return chosen

    def _prefills(self) -> Iterator[Prefill]:
        """Yield unfinished prefills, then new prefills of waiting sequences."""
        yield from list(self.prefilling)
        while True:
            prefill = self._admit()
            if prefill is None:
                return
            yield prefill

    def _admit(self) -> Prefill | None:
        """Begin the prefill of the first waiting sequence and of its followers.

        `resume` admits a sequence whose keys are on the host.
        """
        leader = self.next_waiting
        if leader is None or not self._may_admit or self._is_offloaded(leader):
            return None
        num_spare = self._num_spare_blocks
        if not self.blocks.allocate_prompt(leader, num_spare):
            return None
        self._assign_table_row(leader)
        self.counters.prefill_tokens_saved += leader.num_computed
        if not leader.num_generated:
            leader.num_cached_tokens = leader.num_computed
        prefill = Prefill(leader)
        can_fork = leader.group is not None and not leader.num_generated
        while can_fork and self._may_admit:
            follower = self.next_waiting
            if follower is None or follower.group != leader.group or follower.num_generated:
                break
            if not self.blocks.allocate_fork(follower, leader, num_spare):
                break
            self._assign_table_row(follower)
            prefill.followers.append(follower)
        self.prefilling.append(prefill)
        return prefill

    @property
    def _may_admit(self) -> bool:
        """Return whether table rows and the safety margin allow another sequence."""
        if self.num_admissible <= 0:
            return False
        most = self.limits.max_used_blocks
        # While none is admitted, a margin would hold up all of them.
        return most is None or self.num_admitted == 0 or self.pool.num_used <= most

    @property
    def _num_spare_blocks(self) -> int:
        """Return the number of blocks that must stay free when a sequence is admitted.

        Without a margin, this is one per running sequence: with fewer, the running sequences would
        soon preempt the new one.
        """
        return len(self.running) if self.limits.max_used_blocks is None else 0

    def _is_offloaded(self, request: Request) -> bool:
        return self.offloader is not None and self.offloader.holds(request)

    def resume(self) -> bool:
        """Admit sequences from the head of the queue whose keys are on the host.

        They decode in the next step. Sequences that are faster to recompute are prefilled instead.
        Returns whether any sequence was admitted.
        """
        is_any = False
        while True:
            request = self.next_waiting
            if request is None or not self._is_offloaded(request):
                break
            assert self.offloader is not None
            if not self._may_admit:
                break
            if not self.blocks.allocate_prompt(request, self._num_spare_blocks):
                break
            is_any = True
            self._assign_table_row(request)
            if not self.offloader.restore(request, self.blocks.policy_version):
                self.counters.prefill_tokens_saved += request.num_computed
                self.prefilling.append(Prefill(request))
                continue
            self.counters.restored_sequences += 1
            # Sequences that share its prefix find it again.
            self.blocks.remember(request)
            request.status = RequestStatus.DECODING
            self.running.append(request)
        return is_any

    def _assign_table_row(self, request: Request) -> None:
        del self.waiting[request]
        request.table_row = heapq.heappop(self._free_table_rows)
        request.status = RequestStatus.PREFILLING
        now = time.perf_counter()
        if request.admitted_time is None:
            request.admitted_time = now
        else:
            request.resumed_times.append(now)
        self._newly_admitted.append(request)

    def take_admitted(self) -> list[Request]:
        """Return the sequences that got a table row and blocks since the last call."""
        admitted = self._newly_admitted
        self._newly_admitted = []
        return admitted

    def complete_prefill(self, prefill: Prefill) -> tuple[list[int], list[int]]:
        """Record a computed chunk; after the last one, the group can decode.

        Returns the blocks to copy, as sources and targets, so that each follower has its own last
        block.
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
            follower.num_cached_tokens = follower.num_tokens
            follower.prefix_node = leader.prefix_node
            follower.num_remembered = leader.num_remembered
        for request in members([prefill]):
            request.status = RequestStatus.DECODING
            self.running.append(request)
        return sources, targets

    def schedule_decode(self) -> list[tuple[int, int, int]]:
        """Give every running sequence a slot for its newest token; preempt if blocks run out.

        If the newest token changes a sequence's keys, the sequence is requeued for another prefill.
        Returns the new blocks, as `BlockManager.extend` does.
        """
        limits = self.limits
        if limits.rope_limits:
            changed = [r for r in self.running if limits.rope_side(r.num_tokens) != r.rope_side]
            self._requeue_running(changed)
        extended: list[tuple[int, int, int]] = []
        size = limits.block_size
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if len(request.token_ids) > size * len(request.block_ids):
                blocks = self.blocks.extend(request, request.num_tokens)
                if blocks is None:
                    youngest = self.running[-1]
                    self._offload(youngest)
                    self.preempt([youngest])
                    continue
                extended += blocks
            index += 1
        return extended

    def _offload(self, request: Request) -> None:
        """Copy the keys of a running sequence to the host if that is faster than recomputing."""
        is_changing = self.limits.rope_side(request.num_tokens) != request.rope_side
        if self.offloader is None or is_changing:
            return
        if self.offloader.save(request, self.blocks.policy_version):
            self.counters.offloaded_sequences += 1

    def complete_decode(self, requests: list[Request]) -> None:
        """Record a decode step: after sampling, all tokens except the newest are computed."""
        self.counters.decode_forwards += 1
        self.counters.rows_computed += len(requests)
        size = self.limits.block_size
        for request in requests:
            num_before = request.num_computed
            num_computed = len(request.token_ids) - 1
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
        if self.offloader is not None:
            self.offloader.drop(request)
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
        """Cache keys for `policy_version` from now on; older keys are never matched again.

        With `keep_keys`, running sequences keep their keys, which are no longer shared. Otherwise
        their keys are recomputed, as those of unfinished prompts and waiting sequences always are.
        """
        if self.offloader is not None:
            self.offloader.clear()
        if keep_keys:
            for request in self.running:
                request.has_old_keys = True
        else:
            self._requeue_running(self.running)
        prefilling = self.prefilling
        self.prefilling = deque()
        self._requeue_all(members(prefilling))
        self.blocks.begin_policy_version(policy_version)

    def narrow_prefill(self) -> bool:
        """Halve the tokens of a prefill, after one ran out of memory; False at the minimum."""
        if self.max_batch_tokens <= MIN_BATCH_TOKENS:
            return False
        self.max_batch_tokens = max(MIN_BATCH_TOKENS, self.max_batch_tokens // 2)
        return True

    def narrow_decode(self) -> bool:
        """Preempt all and halve the maximum, after a decode ran out of memory; False if it is 1."""
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
        self._requeue_running(preempted, "preempted")

    def _requeue_running(self, requests: list[Request], reason: str = "recomputed") -> None:
        if requests:
            self.running = [request for request in self.running if request not in requests]
            self._requeue_all(requests, reason)

    def _requeue_all(self, requests: list[Request], reason: str = "recomputed") -> None:
        now = time.perf_counter()
        for request in reversed(requests):
            request.requeues.append((now, reason))
            self._free(request)
            request.reset_cache()
            self.waiting[request] = None
            self.waiting.move_to_end(request, last=False)

    def _free(self, request: Request) -> None:
        if request.table_row != NO_TABLE_ROW:
            self.before_release(request)
            self.pool.release(reversed(request.block_ids))
            heapq.heappush(self._free_table_rows, request.table_row)
            request.table_row = NO_TABLE_ROW
            request.block_ids = []
