from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cb_rollout.engine.limits import Limits
from cb_rollout.engine.request import NO_SLOT, Request
from cb_rollout.engine.scheduler import Scheduler
from cb_rollout.metrics import EngineCounters
from cb_rollout.sampling_params import SamplingParams
from cb_rollout.types import FinishReason, RequestStatus

MOST_STEPS = 3000
# Far more than any run below needs; a run that takes longer starves somebody.


def request_of(prompt_ids, max_new_tokens=4, name="r", group=None):
    return Request(
        request_id=name,
        prompt_ids=prompt_ids,
        params=SamplingParams(),
        max_new_tokens=max_new_tokens,
        stop_tokens=frozenset(),
        seed=0,
        group=group,
    )


def cancel(engine, request):
    request.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
    engine.scheduler.retire(request)


class FakeEngine:
    """Drives a scheduler as `core.Engine` does; a key is the policy and all tokens it depends on.

    So a forward that would read a wrong, moved, overwritten or outdated key is seen at once.
    """

    def __init__(self, limits, num_blocks, most_blocks):
        self.limits, self.most_blocks = limits, most_blocks
        self.counters = EngineCounters()
        self.scheduler = Scheduler(limits, self.counters, self.grow)
        self.scheduler.pool.grow(num_blocks)
        self.requests = []
        self.keys = {}

    def add(self, *requests):
        for request in requests:
            self.requests.append(request)
            self.scheduler.add(request)

    def grow(self, count):
        now = self.scheduler.pool.num_blocks
        return max(now, min(self.most_blocks, max(2 * now, now + count)))

    def expected_token(self, request, index):
        return (len(request.request_id) + len(request.prompt_ids) + index) % 2

    def sample(self, request):
        index = request.num_generated
        version = self.scheduler.blocks.policy_version
        request.append(self.expected_token(request, index), -float(index), version)

    def compute(self, request, end):
        """What a forward does: read every cached key, then write the keys of the new tokens."""
        size, version = self.limits.block_size, self.scheduler.blocks.policy_version
        for position in range(end):
            place = (request.block_ids[position // size], position % size)
            tokens = tuple(request.token_ids[: position + 1])
            # What is computed from kept keys belongs to no version, and to this sequence alone.
            origin = request.request_id if request.has_old_keys else version
            if position < request.num_computed:
                stored_origin, *stored = self.keys.get(place, (None,))
                assert tuple(stored) == tokens, "a forward would read another token's key"
                is_kept = request.has_old_keys and isinstance(stored_origin, int)
                assert is_kept or stored_origin == origin, "a forward would read an outdated key"
            else:
                self.keys[place] = (origin, *tokens)

    def copy_blocks(self, sources, targets):
        size = self.limits.block_size
        for source, target in zip(sources, targets, strict=True):
            for offset in range(size):
                self.keys[target, offset] = self.keys.get((source, offset))

    def check_prefill(self, chosen):
        limits = self.limits
        width = max(prefill.num_scheduled for prefill in chosen)
        assert len(chosen) == 1 or width * len(chosen) <= limits.max_batch_tokens
        assert all(prefill.num_scheduled > 0 for prefill in chosen)
        for prefill in chosen:
            if limits.can_resume_prompts:
                assert prefill.num_scheduled <= limits.max_batch_tokens
            else:
                assert prefill.leader.num_computed == 0
                assert prefill.is_last_chunk
            num_shared = len(prefill.leader.prompt_ids) // limits.block_size
            num_shared *= limits.can_share_blocks
            for follower in prefill.followers:
                assert follower.prompt_ids == prefill.leader.prompt_ids
                mine, theirs = follower.block_ids, prefill.leader.block_ids
                assert mine[:num_shared] == theirs[:num_shared]
                assert not set(mine[num_shared:]) & set(theirs)

    def step(self):
        """One forward of prompts and one of running sequences; True if any ran."""
        chosen = self.scheduler.schedule_prefill()
        self.scheduler.take_seated()
        if chosen:
            self.check_prefill(chosen)
        for prefill in chosen:
            self.compute(prefill.leader, prefill.leader.num_computed + prefill.num_scheduled)
        for prefill in chosen:
            is_last_chunk = prefill.is_last_chunk
            self.copy_blocks(*self.scheduler.complete_prefill(prefill))
            if is_last_chunk:
                for request in (prefill.leader, *prefill.followers):
                    self.sample(request)
        self.scheduler.retire_running()
        extended = self.scheduler.schedule_decode()
        seated = {request.slot: request for request in self.scheduler.running}
        for slot, index, block in extended:
            assert seated[slot].block_ids[index] == block
        decoding = list(self.scheduler.running)
        for request in decoding:
            assert request.num_computed == request.num_tokens - 1
            self.compute(request, request.num_tokens)
        self.scheduler.complete_decode()
        for request in decoding:
            self.sample(request)
        self.scheduler.retire_running()
        return bool(chosen or decoding)

    def drain(self):
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_work:
                return
            self.step()
        pytest.fail("some sequence starves")

    def check(self):
        """What holds between any two calls."""
        pool = self.scheduler.pool
        seated = [request for request in self.requests if request.slot != NO_SLOT]
        held = Counter(block for request in seated for block in request.block_ids)
        counts = {b: n for b, n in enumerate(pool._reference_counts) if n}
        assert held == counts
        assert pool.num_used == len(held)
        slots = [request.slot for request in seated] + self.scheduler._free_slots
        assert sorted(slots) == list(range(self.limits.max_requests))
        unfinished = [request for request in self.requests if not request.status.is_final]
        assert len(self.scheduler.waiting) == len(unfinished) - len(seated)
        assert self.scheduler.has_work == bool(unfinished)
        for request in self.requests:
            assert request.num_computed <= request.num_tokens
            assert request.slot != NO_SLOT or not request.block_ids
            count = request.num_generated
            tokens = [self.expected_token(request, i) for i in range(count)]
            assert request.token_ids == [*request.prompt_ids, *tokens]
            assert request.logprobs == [-float(i) for i in range(count)]
            assert sum(n for _, n in request.policy_versions) == count


def engine_of(num_blocks=100, most_blocks=None, **limits):
    defaults = {
        "block_size": 2,
        "max_batch_tokens": 100,
        "max_requests": 10,
        "can_share_blocks": True,
        "can_resume_prompts": True,
    }
    return FakeEngine(Limits(**(defaults | limits)), num_blocks, most_blocks or num_blocks)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
# Two tokens only, so that prompts often share prefixes.


class SchedulerRuns(RuleBasedStateMachine):
    """Any mix of requests, steps, cancellations and new weights, over pools too small for it."""

    @initialize(
        block_size=st.integers(1, 4),
        max_batch_tokens=st.integers(1, 12),
        max_requests=st.integers(1, 5),
        most_blocks=st.integers(4, 12),
        share=st.booleans(),
        resume=st.booleans(),
    )
    def start(self, block_size, max_batch_tokens, max_requests, most_blocks, share, resume):
        limits = Limits(block_size, max_batch_tokens, max_requests, share, resume)
        self.engine = FakeEngine(limits, 2, most_blocks)
        self.room = most_blocks * block_size
        self.num_groups = 0
        self.lengths = {}

    @property
    def unfinished(self):
        return [r for r in self.engine.requests if not r.status.is_final]

    @rule(prompt=PROMPTS, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
    def add(self, prompt, lengths):
        """A group, of one or more: intake gives every prompt a group number."""
        prompt = prompt[: self.room - 1]
        self.num_groups += 1
        self.engine.add(
            *(
                request_of(prompt, min(n, self.room - len(prompt)), "r" * i, self.num_groups)
                for i, n in enumerate(lengths)
            )
        )

    @rule()
    def step(self):
        had_work = bool(self.unfinished)
        assert self.engine.step() or not had_work, "a step did nothing though there is work"

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def cancel(self, data):
        cancel(self.engine, data.draw(st.sampled_from(self.unfinished)))

    @rule()
    def change_weights(self):
        self.engine.scheduler.begin_policy_version(
            self.engine.scheduler.blocks.policy_version + 1, keep_keys=False
        )
        assert self.engine.scheduler.pool.num_used == 0
        assert len(self.engine.scheduler.blocks.prefixes) == 0

    @rule()
    def change_weights_and_keep_keys(self):
        scheduler = self.engine.scheduler
        num_running = len(scheduler.running)
        scheduler.begin_policy_version(scheduler.blocks.policy_version + 1, keep_keys=True)
        assert len(scheduler.running) == num_running
        assert len(scheduler.blocks.prefixes) == 0

    @rule()
    def run_out_of_memory_in_prefill(self):
        least = self.engine.scheduler.max_batch_tokens
        assert self.engine.scheduler.narrow_prefill() == (
            self.engine.scheduler.max_batch_tokens < least
        )

    @rule()
    def run_out_of_memory_in_decode(self):
        num_running = len(self.engine.scheduler.running)
        assert self.engine.scheduler.narrow_decode() == (num_running > 1)
        if num_running > 1:
            assert not self.engine.scheduler.running
            assert self.engine.scheduler.max_seated == num_running // 2

    @invariant()
    def everything_is_accounted_for(self):
        self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        self.engine.check()
        assert self.engine.scheduler.pool.num_used == 0
        for request in self.engine.requests:
            assert request.status.is_final
            if request.status is RequestStatus.FINISHED:
                assert request.num_generated == request.max_new_tokens


SchedulerRuns.TestCase.settings = settings(max_examples=220, stateful_step_count=50)
test_the_scheduler_keeps_its_accounts = SchedulerRuns.TestCase


def test_sequences_are_admitted_in_the_order_they_came():
    engine = engine_of(max_requests=2)
    requests = [request_of([1, i], name=f"r{i}") for i in range(4)]
    engine.add(*requests)
    engine.step()
    assert engine.scheduler.running == requests[:2]
    assert list(engine.scheduler.waiting) == requests[2:]


def test_a_long_prompt_is_computed_in_chunks():
    engine = engine_of(max_batch_tokens=4)
    request = request_of(list(range(10)))
    engine.add(request)
    for num_computed in (4, 8):
        engine.step()
        assert (request.num_computed, request.num_generated) == (num_computed, 0)
    engine.step()
    assert request.num_generated == 2


def test_a_prompt_that_cannot_be_resumed_is_computed_whole_and_alone():
    engine = engine_of(max_batch_tokens=4, can_resume_prompts=False)
    long, short = request_of(list(range(10)), name="long"), request_of([1], name="short")
    engine.add(long, short)
    (prefill,) = engine.scheduler.schedule_prefill()
    assert (prefill.leader, prefill.num_scheduled) == (long, 10)


def test_rows_are_batched_by_their_padded_size():
    engine = engine_of(max_batch_tokens=12)
    prompts = [[9] * 4, [8] * 2, [7] * 4, [6]]
    engine.add(*(request_of(prompt, name=f"r{i}") for i, prompt in enumerate(prompts)))
    chosen = engine.scheduler.schedule_prefill()
    assert [prefill.num_scheduled for prefill in chosen] == [4, 2, 4]


def test_a_group_is_computed_once_and_shares_the_whole_blocks_of_its_prompt():
    engine = engine_of()
    leader, *followers = members = [request_of([1, 2, 3, 4, 5], group=1) for _ in range(3)]
    engine.add(*members)
    (prefill,) = engine.scheduler.schedule_prefill()
    assert (prefill.leader, prefill.followers) == (leader, followers)
    assert engine.scheduler.pool.num_used == 2 + 3
    engine.compute(leader, 5)
    sources, targets = engine.scheduler.complete_prefill(prefill)
    assert engine.counters.prefill_tokens_saved == 2 * 5
    assert sources == [leader.block_ids[2]] * 2
    assert targets == [follower.block_ids[2] for follower in followers]
    assert [r.num_computed for r in members] == [5, 5, 5]
    assert all(r.status is RequestStatus.DECODING for r in members)


def test_a_group_that_may_not_share_copies_every_block():
    engine = engine_of(can_share_blocks=False)
    members = [request_of([1, 2, 3, 4, 5], group=1) for _ in range(2)]
    engine.add(*members)
    (prefill,) = engine.scheduler.schedule_prefill()
    assert engine.scheduler.pool.num_used == 6
    sources, targets = engine.scheduler.complete_prefill(prefill)
    assert (sources, targets) == (members[0].block_ids, members[1].block_ids)


def test_neighbours_of_other_groups_do_not_follow():
    engine = engine_of()
    engine.add(*(request_of([1, 2], group=group) for group in (1, 1, 2, 1)))
    chosen = engine.scheduler.schedule_prefill()
    assert [len(prefill.followers) for prefill in chosen] == [1, 0, 0]


def test_when_a_leader_is_cancelled_its_followers_are_computed_by_themselves():
    engine = engine_of(max_batch_tokens=2)
    leader, *followers = members = [request_of([1, 2, 3, 4, 5], group=1) for _ in range(3)]
    engine.add(*members)
    engine.step()
    cancel(engine, leader)
    assert list(engine.scheduler.waiting) == followers
    engine.drain()
    engine.check()
    assert [r.num_generated for r in members] == [0, 4, 4]


def test_a_cancelled_waiting_sequence_is_skipped():
    engine = engine_of(max_requests=1)
    first, second, third = requests = [request_of([1, i], name=f"r{i}") for i in range(3)]
    engine.add(*requests)
    engine.step()
    cancel(engine, second)
    engine.drain()
    assert [r.num_generated for r in (first, second, third)] == [4, 0, 4]
    assert second.status is RequestStatus.CANCELLED


def test_a_cancelled_waiting_sequence_is_no_work_and_takes_no_place_in_the_queue():
    engine = engine_of()
    request = request_of([1, 2])
    engine.add(request)
    cancel(engine, request)
    assert len(engine.scheduler.waiting) == 0
    assert not engine.scheduler.has_work


def test_a_cancelled_member_of_a_waiting_group_is_skipped():
    engine = engine_of()
    members = [request_of([1, 2], group=1) for _ in range(3)]
    engine.add(*members)
    cancel(engine, members[1])
    engine.drain()
    assert members[1].status is RequestStatus.CANCELLED
    assert [r.num_generated for r in members] == [4, 0, 4]


def test_the_youngest_is_preempted_and_keeps_what_it_has():
    engine = engine_of(num_blocks=4, block_size=2)
    old, young = request_of([1, 2, 3], 5, "old"), request_of([4], 7, "young")
    engine.add(old, young)
    while not engine.counters.preemptions:
        engine.step()
    assert list(engine.scheduler.waiting) == [young]
    kept = list(young.token_ids), list(young.logprobs)
    assert len(kept[0]) > 1
    engine.drain()
    assert (young.token_ids[: len(kept[0])], young.logprobs[: len(kept[1])]) == kept
    assert (old.num_generated, young.num_generated) == (5, 7)


@pytest.mark.parametrize("policy_version", [0, 3])
def test_a_finished_prompt_serves_the_next_request_that_starts_with_it(policy_version):
    engine = engine_of()
    engine.scheduler.begin_policy_version(policy_version, keep_keys=False)
    engine.add(request_of([1, 2, 3, 4, 5], max_new_tokens=1))
    engine.drain()
    again = request_of([1, 2, 3, 4, 9])
    engine.add(again)
    engine.scheduler.schedule_prefill()
    assert again.num_computed == 4


def test_what_a_follower_generates_is_known_behind_its_prompt_only():
    engine = engine_of()
    leader, follower = (request_of([7, 8], 5, name, group=1) for name in ("r", "rr"))
    engine.add(leader, follower)
    engine.drain()
    generated = follower.token_ids[2:]
    assert generated != leader.token_ids[2:]
    alone, behind = request_of(generated, name="a"), request_of(follower.token_ids, name="b")
    engine.add(alone, behind)
    engine.scheduler.schedule_prefill()
    assert (alone.num_computed, behind.num_computed) == (0, 6)


def test_a_finished_prompt_of_an_older_policy_serves_nobody():
    engine = engine_of()
    running = request_of([1, 2, 3, 4, 5], max_new_tokens=9)
    engine.add(running)
    engine.step()
    engine.scheduler.begin_policy_version(1, keep_keys=False)
    again = request_of([1, 2, 3, 4, 9])
    engine.add(again)
    engine.scheduler.schedule_prefill()
    assert (running.num_computed, again.num_computed) == (0, 0)
    assert engine.counters.prefill_tokens_saved == 0


def test_the_pool_grows_before_anybody_is_preempted():
    engine = engine_of(num_blocks=1, most_blocks=50)
    engine.add(*(request_of([1, 2, i], 20, f"r{i}") for i in range(3)))
    engine.drain()
    assert engine.counters.preemptions == 0
    assert 36 <= engine.scheduler.pool.num_blocks <= 50


def test_only_an_ended_sequence_can_be_retired():
    engine = engine_of()
    with pytest.raises(AssertionError):
        engine.scheduler.retire(request_of([1]))
