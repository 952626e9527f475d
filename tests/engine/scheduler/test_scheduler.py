from dataclasses import replace

import pytest
import torch
from fake_model import FakeModel, request_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cb_rollout.engine.request import Limits
from cb_rollout.engine.scheduler import scheduler as scheduling
from cb_rollout.engine.scheduler.scheduler import MAX_GATHER_RATIO
from cb_rollout.types import RequestStatus


def engine_of(num_blocks=100, max_blocks=None, policy="fifo", host_room=0, **limits):
    defaults = {
        "block_size": 2,
        "max_batch_tokens": 100,
        "max_requests": 10,
        "can_share_blocks": True,
        "can_resume_prompts": True,
        "is_packed": False,
    }
    limits = Limits(**(defaults | limits))
    most = max_blocks or num_blocks
    return FakeModel(limits, num_blocks, most, policy=policy, host_room=host_room)


# Two tokens only, so that prompts often share prefixes.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class SchedulerRuns(RuleBasedStateMachine):
    """Any mix of requests, steps, cancellations, faults and new weights, over too small pools."""

    @initialize(
        block_size=st.integers(1, 4),
        max_batch_tokens=st.integers(1, 12),
        max_requests=st.integers(1, 5),
        max_blocks=st.integers(4, 12),
        share=st.booleans(),
        resume=st.booleans(),
        has_graphs=st.booleans(),
        policy=st.sampled_from(["fifo", "prefill_first"]),
        history_factor=st.sampled_from([1, 8]),
        is_packed=st.booleans(),
        rope_limits=st.sampled_from([(), (6,), (4, 9)]),
        max_used_blocks=st.sampled_from([None, 0, 3, 6]),
        host_room=st.integers(0, 3),
    )
    def start(
        self,
        block_size,
        max_batch_tokens,
        max_requests,
        max_blocks,
        share,
        resume,
        has_graphs,
        policy,
        history_factor,
        is_packed,
        rope_limits,
        max_used_blocks,
        host_room,
    ):
        scheduling.MAX_GATHER_RATIO = history_factor
        sizes = (block_size, max_batch_tokens, max_requests)
        limits = Limits(*sizes, share, resume, is_packed, rope_limits, max_used_blocks)
        self.engine = FakeModel(
            limits, 2, max_blocks, has_graphs=has_graphs, policy=policy, host_room=host_room
        )
        self.room = max_blocks * block_size
        self.num_groups = 0

    @property
    def unfinished(self):
        return [r for r in self.engine.requests if not r.status.is_final]

    @rule(prompt=PROMPTS, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
    def add(self, prompt, lengths):
        """Add a group, of one or more: every prompt has a group number."""
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
        self.engine.cancel(data.draw(st.sampled_from(self.unfinished)))

    @rule(keep_keys=st.booleans())
    def change_weights(self, keep_keys):
        self.engine.executor.settle()
        scheduler = self.engine.scheduler
        num_running = len(scheduler.running)
        scheduler.begin_policy_version(self.engine.version + 1, keep_keys=keep_keys)
        assert len(scheduler.running) == num_running * keep_keys
        assert keep_keys or scheduler.pool.num_used == 0
        assert len(scheduler.blocks.prefixes) == 0

    @rule(num_blocks=st.integers(2, 4))
    def release_the_cache(self, num_blocks):
        self.engine.executor.settle()
        num_unfinished = len(self.unfinished)
        self.engine.reset(num_blocks)
        assert len(self.engine.scheduler.waiting) == num_unfinished

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt_the_youngest(self):
        self.engine.executor.settle()
        self.engine.preempt_youngest()

    @precondition(lambda self: self.unfinished)
    @rule()
    def run_out_of_memory(self):
        self.engine.error = torch.OutOfMemoryError("none left")
        num_failed = sum(r.status is RequestStatus.FAILED for r in self.engine.requests)
        self.engine.step()
        self.engine.error = None
        failed = [r for r in self.engine.requests if r.status is RequestStatus.FAILED]
        assert len(failed) <= num_failed + 1

    @invariant()
    def everything_is_accounted_for(self):
        self.engine.check()

    def teardown(self):
        scheduling.MAX_GATHER_RATIO = MAX_GATHER_RATIO
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        self.engine.check()
        assert self.engine.scheduler.pool.num_used == 0
        for request in self.engine.requests:
            assert request.status.is_final
            if request.status is RequestStatus.FINISHED:
                assert request.num_generated == request.max_new_tokens


SchedulerRuns.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
test_the_scheduler_keeps_its_accounts = SchedulerRuns.TestCase


def test_a_step_ahead_of_the_last_ones_tokens_waits_for_who_joins():
    engine = FakeModel(Limits(2, 100, 10, True, True, True), 100, 100, has_graphs=True)
    first, second = request_of([1, 2], 30, "first"), request_of([1, 3], 3, "second")
    engine.add(first)
    for _ in range(6):
        engine.step()
    # The first decode step was launched after the prefill, each of the others a step ahead.
    assert engine.num_ahead == 4
    engine.add(second)
    while not second.status.is_final:
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
    assert request.num_generated == 1


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


def test_packed_rows_are_batched_by_their_own_size():
    engine = engine_of(max_batch_tokens=12, is_packed=True)
    for row, length in enumerate([9, 1, 2, 1]):
        engine.add(request_of([row] * length, name=f"r{row}"))
    chosen = engine.scheduler.schedule_prefill()
    assert [prefill.num_scheduled for prefill in chosen] == [9, 1, 2]


def test_packed_rows_gather_their_own_history():
    # 8 times 10 tokens may be gathered: 60 and 20.
    engine = engine_of(num_blocks=200, max_batch_tokens=10, is_packed=True)
    prompts = [[row] * length for row, length in enumerate([59, 19, 9])]
    for prompt in prompts:
        engine.add(request_of(prompt, 1))
    engine.drain()
    for prompt in prompts:
        engine.add(request_of([*prompt, 5], 1))
    assert [p.leader.num_computed for p in engine.scheduler.schedule_prefill()] == [58, 18]


def test_rows_that_continue_long_prompts_are_few_in_one_forward():
    # 8 times 10 tokens may be gathered: two rows of 40.
    engine = engine_of(num_blocks=200, max_batch_tokens=10)
    prompts = [[row] * 39 for row in range(3)]
    for prompt in prompts:
        engine.add(request_of(prompt, 1))
    engine.drain()
    for prompt in prompts:
        engine.add(request_of([*prompt, 5], 1))
    assert [p.leader.num_computed for p in engine.scheduler.schedule_prefill()] == [38, 38]


def test_a_group_is_computed_once_and_shares_the_whole_blocks_of_its_prompt():
    engine = engine_of()
    leader, *followers = members = [request_of([1, 2, 3, 4, 5], group=1) for _ in range(3)]
    engine.add(*members)
    (prefill,) = engine.scheduler.schedule_prefill()
    assert (prefill.leader, prefill.followers) == (leader, followers)
    assert engine.scheduler.pool.num_used == 2 + 3
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
    engine.cancel(leader)
    assert list(engine.scheduler.waiting) == followers
    engine.drain()
    engine.check()
    assert [r.num_generated for r in members] == [0, 4, 4]


def test_a_cancelled_waiting_sequence_is_skipped():
    engine = engine_of(max_requests=1)
    first, second, third = requests = [request_of([1, i], name=f"r{i}") for i in range(3)]
    engine.add(*requests)
    engine.step()
    engine.cancel(second)
    engine.drain()
    assert [r.num_generated for r in (first, second, third)] == [4, 0, 4]
    assert second.status is RequestStatus.CANCELLED


def test_a_cancelled_waiting_sequence_is_no_work_and_takes_no_place_in_the_queue():
    engine = engine_of()
    request = request_of([1, 2])
    engine.add(request)
    engine.cancel(request)
    assert len(engine.scheduler.waiting) == 0
    assert not engine.scheduler.has_work


def test_a_cancelled_member_of_a_waiting_group_is_skipped():
    engine = engine_of()
    members = [request_of([1, 2], group=1) for _ in range(3)]
    engine.add(*members)
    engine.cancel(members[1])
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
    engine = engine_of(num_blocks=1, max_blocks=50)
    engine.add(*(request_of([1, 2, i], 20, f"r{i}") for i in range(3)))
    engine.drain()
    assert engine.counters.preemptions == 0
    assert 36 <= engine.scheduler.pool.num_blocks <= 50


def test_only_an_ended_sequence_can_be_retired():
    engine = engine_of()
    with pytest.raises(AssertionError):
        engine.scheduler.retire(request_of([1]))


def engine_with_one_offloaded(**limits):
    """An engine of three running sequences, of which the youngest waits with its keys kept."""
    engine = engine_of(host_room=3, **limits)
    requests = [request_of([1, 0, i], 9, f"r{i}") for i in range(3)]
    engine.add(*requests)
    for _ in range(3):
        engine.step()
    engine.preempt_youngest()
    assert engine.scheduler.offloader.holds(requests[2])
    assert list(engine.scheduler.waiting) == requests[2:]
    return engine, requests[2]


def test_a_preempted_sequence_decodes_again_from_its_kept_keys():
    engine, request = engine_with_one_offloaded()
    num_prefilled, num_generated = engine.counters.prefill_tokens, request.num_generated
    engine.step()
    assert request.num_generated == num_generated + 1
    assert engine.counters.prefill_tokens == num_prefilled
    counters = engine.counters
    counted = (counters.preemptions, counters.offloaded_sequences, counters.restored_sequences)
    assert counted == (1, 1, 1)
    engine.drain()
    engine.check()


@pytest.mark.parametrize("can_resume_prompts", [True, False])
def test_kept_keys_of_an_older_policy_never_come_back(can_resume_prompts):
    for keep_keys in (False, True):
        engine, request = engine_with_one_offloaded(can_resume_prompts=can_resume_prompts)
        engine.scheduler.begin_policy_version(1, keep_keys=keep_keys)
        assert not engine.scheduler.offloader.kept
        engine.drain()
        engine.check()
        assert engine.counters.restored_sequences == 0
        assert request.status is RequestStatus.FINISHED


def test_a_sequence_with_keys_of_an_older_policy_is_not_kept():
    engine = engine_of(host_room=3)
    engine.add(request_of([1, 0], 9))
    engine.step()
    engine.scheduler.begin_policy_version(1, keep_keys=True)
    engine.preempt_youngest()
    assert not engine.scheduler.offloader.kept
    engine.drain()


def test_a_cancelled_sequences_kept_keys_are_forgotten():
    engine, request = engine_with_one_offloaded()
    engine.cancel(request)
    assert not engine.scheduler.offloader.kept
    engine.drain()


def test_a_sequence_with_kept_keys_waits_until_its_blocks_are_free():
    engine, request = engine_with_one_offloaded(max_requests=3, num_blocks=11)
    for _ in range(2):
        # Two run, and each has a spare block beside the three of each.
        engine.add(request_of([0, 0, 0, 0], 2))
    engine.drain()
    engine.check()
    assert request.status is RequestStatus.FINISHED


def test_restored_blocks_are_shared_with_sequences_of_the_same_prefix():
    engine = engine_of(host_room=3)
    requests = [request_of([1, 0, 1, 1, 0], 9, f"r{i}", group=1) for i in range(2)]
    engine.add(*requests)
    engine.step()
    for _ in requests:
        engine.preempt_youngest()
    # Others take the blocks that were left.
    engine.scheduler.pool.forget(engine.scheduler.blocks.prefixes.clear())
    engine.step()
    first, second = (request.block_ids for request in requests)
    assert engine.counters.restored_sequences == 2
    assert first[:2] == second[:2]
    engine.drain()
    engine.check()


def test_no_sequence_is_admitted_beside_others_below_the_margin():
    # At most four of ten blocks are in use when another one is admitted.
    engine = engine_of(num_blocks=10, max_used_blocks=4)
    requests = [request_of([i] * 4, 1, f"r{i}") for i in range(4)]
    engine.add(*requests)
    chosen = engine.scheduler.schedule_prefill()
    assert [prefill.leader for prefill in chosen] == requests[:3]
    engine = engine_of(num_blocks=10, max_used_blocks=0)
    engine.add(*(request_of([i] * 4, 1, f"r{i}") for i in range(4)))
    assert len(engine.scheduler.schedule_prefill()) == 1
    engine.drain()
    engine.check()


def test_a_margin_holds_up_a_group_and_sequences_with_kept_keys_too():
    engine = engine_of(num_blocks=20, max_used_blocks=3)
    engine.add(*(request_of([1, 0, 1, 0, 1], 2, f"r{i}", group=1) for i in range(4)))
    (prefill,) = engine.scheduler.schedule_prefill()
    # The first one takes three blocks, and each other one a block of its own.
    assert len(prefill.followers) == 1
    engine, request = engine_with_one_offloaded()
    engine.scheduler.limits = replace(engine.scheduler.limits, max_used_blocks=3)
    assert engine.scheduler.pool.num_used > 3
    engine.step()
    assert list(engine.scheduler.waiting) == [request]
    engine.drain()
    engine.check()


def test_without_a_margin_a_block_stays_free_for_every_running_sequence():
    for max_used_blocks, num_admitted in ((None, 3), (100, 5)):
        engine = engine_of(num_blocks=10, max_used_blocks=max_used_blocks)
        for i in range(5):
            engine.add(request_of([i] * 4, 4, f"r{i}"))
            engine.scheduler.num_decodes_in_a_row = scheduling.MAX_DECODES_IN_A_ROW
            engine.step()
        assert engine.scheduler.num_admitted == num_admitted
        engine.drain()
