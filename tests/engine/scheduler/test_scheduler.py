import pytest
from fake_engine import FakeEngine, GraphedFakeEngine, cancel, request_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cb_rollout.engine.request import Limits
from cb_rollout.types import RequestStatus


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
        kind=st.sampled_from([FakeEngine, GraphedFakeEngine]),
    )
    def start(self, block_size, max_batch_tokens, max_requests, most_blocks, share, resume, kind):
        limits = Limits(block_size, max_batch_tokens, max_requests, share, resume)
        self.engine = kind(limits, 2, most_blocks)
        self.room = most_blocks * block_size
        self.num_groups = 0
        self.lengths = {}

    @property
    def unfinished(self):
        return [r for r in self.engine.requests if not r.status.is_final]

    @rule(prompt=PROMPTS, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
    def add(self, prompt, lengths):
        """A group, of one or more: input_processor gives every prompt a group number."""
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
        self.engine.settle()
        self.engine.scheduler.begin_policy_version(
            self.engine.scheduler.blocks.policy_version + 1, keep_keys=False
        )
        assert self.engine.scheduler.pool.num_used == 0
        assert len(self.engine.scheduler.blocks.prefixes) == 0

    @rule()
    def change_weights_and_keep_keys(self):
        self.engine.settle()
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
        self.engine.settle()
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


def test_a_step_ahead_of_the_last_ones_tokens_waits_for_who_joins():
    engine = GraphedFakeEngine(Limits(2, 100, 10, True, True), 100, 100)
    first, second = request_of([1, 2], 30, "first"), request_of([1, 3], 3, "second")
    engine.add(first)
    for _ in range(5):
        engine.step()
    # The first decode step was launched after its prompt's, each of the others a step before.
    assert engine.num_ahead == 4
    engine.add(second)
    for _ in range(3):
        engine.step()
    assert second.status is RequestStatus.FINISHED
    engine.drain()
    engine.check()
    # Two more waited: where the second one joined, and where its row was left out again.
    assert engine.num_ahead == engine.counters.decode_forwards - 3


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
