"""Strategies over a hand-written sampler: every completion is counted once, none is lost."""

import random
from dataclasses import dataclass

import pytest
from documented import block, run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cb_rollout.errors import (
    ConfigurationError,
    EngineDeadError,
    IncompleteRolloutError,
    InvalidRequestError,
    RolloutError,
)
from cb_rollout.strategies import (
    DynamicSampling,
    GroupCollector,
    OverSampling,
    PartialRollouts,
    Plain,
    Retrying,
)
from cb_rollout.strategies.groups_in_flight import CompletionStats
from cb_rollout.types import GenerationOutput, RequestStatus

GROUP = 4


class Dice:
    """Ends sequences in any order, fails some, and stamps what grows with the version of then."""

    def __init__(self, seed=0, fail_rate=0.0, order="random"):
        self.draws, self.fail_rate, self.order = random.Random(seed), fail_rate, order
        self.policy_version = 0
        self.live, self.cancelled = {}, []
        self.submitted, self.delivered = {}, {}
        self.is_asleep, self.dies = False, False

    def submit(self, prompt, num_sequences):
        assert not self.is_asleep, "submitted to an engine that sleeps"
        ids = [f"r{len(self.submitted) + i}" for i in range(num_sequences)]
        for request_id in ids:
            self.submitted[request_id] = prompt
            self.live[request_id] = GenerationOutput(request_id, prompt_ids=[prompt])
        return ids

    def grow(self):
        for output in self.live.values():
            count = self.draws.randint(0, 3)
            output.generated_tokens += [7] * count
            output.logprobs += [-1.0 - self.policy_version] * count
            if count:
                output.policy_versions.append((self.policy_version, count))

    def wait(self):
        assert not self.is_asleep, "waits for an engine that sleeps"

    def take(self):
        assert not self.is_asleep, "waits for an engine that sleeps"
        if self.dies:
            raise EngineDeadError("dead")
        self.grow()
        if self.cancelled and self.draws.random() < 0.7:
            return self.deliver(self.cancelled.pop(0), RequestStatus.CANCELLED)
        ids = [i for i in self.live if i not in self.cancelled] or list(self.live)
        assert ids, "waits for a sequence, and none is live"
        request_id = ids[0] if self.order == "first" else self.draws.choice(ids)
        if request_id in self.cancelled:
            self.cancelled.remove(request_id)
        failed = self.draws.random() < self.fail_rate
        return self.deliver(request_id, RequestStatus.FAILED if failed else RequestStatus.FINISHED)

    def deliver(self, request_id, status):
        output = self.live.pop(request_id)
        output.status = status
        self.delivered[request_id] = output
        return output

    def cancel(self, request_ids):
        self.cancelled += [i for i in request_ids if i in self.live and i not in self.cancelled]

    def abort(self):
        """What sync_weights(in_flight="abort") does."""
        self.cancel(list(self.live))

    def sleep(self):
        self.is_asleep = True

    def wake(self):
        self.is_asleep = False


def numbered():
    """An endless source that knows what was taken."""
    taken = []

    def draw():
        while True:
            taken.append(len(taken))
            yield taken[-1]

    return taken, draw()


def equal_or_not(prompt, outputs):
    """No advantage for every third prompt."""
    return [0.0 if prompt % 3 == 0 else float(i) for i in range(len(outputs))]


@dataclass(frozen=True, kw_only=True)
class Everything(DynamicSampling, PartialRollouts, Retrying, OverSampling):
    """All at once, as a user may combine them."""

    def __post_init__(self):
        pass


STRATEGIES = [
    Plain(),
    OverSampling(num_extra_groups=3),
    OverSampling(num_extra_groups=2, num_extra_members=3),
    DynamicSampling(max_dropped_groups=3),
    DynamicSampling(max_dropped_groups=50, num_extra_groups=2),
    PartialRollouts(num_extra_groups=5, max_staleness=1),
    PartialRollouts(num_extra_groups=2, max_staleness=3),
    Retrying(max_retries=1, min_group_size=2),
    Retrying(max_retries=0, min_group_size=1, max_dropped_groups=2),
    Everything(num_extra_groups=3, num_extra_members=1, max_staleness=2),
]


class Steps(RuleBasedStateMachine):
    """Any strategy, any order of steps, syncs, aborts, faults and closings."""

    @initialize(
        strategy=st.sampled_from(STRATEGIES),
        seed=st.integers(0, 10_000),
        fail_rate=st.sampled_from([0.0, 0.1, 0.5]),
    )
    def begin(self, strategy, seed, fail_rate):
        self.strategy, self.fail_rate = strategy, fail_rate
        self.sampler, (self.taken, prompts) = Dice(seed, fail_rate), numbered()
        self.collector = GroupCollector(
            self.sampler, prompts, self.reward, strategy, num_generations=GROUP
        )
        self.is_flaky, self.may_lose_prompts, self.returned = False, fail_rate > 0, []

    def reward(self, prompt, outputs):
        if self.is_flaky and self.sampler.draws.random() < 0.5:
            raise OSError("the environment is away")
        values = equal_or_not(prompt, outputs)
        return [None, *values[1:]] if self.is_flaky else values

    @rule(num_groups=st.integers(1, 4))
    def collect(self, num_groups):
        version, limit = self.sampler.policy_version, self.strategy.max_staleness
        try:
            groups = self.collector.collect(num_groups)
        except (RolloutError, OSError):
            assert not self.sampler.live
            return
        assert len(groups) == num_groups
        assert [group.number for group in groups] == sorted(group.number for group in groups)
        ages = [age for group in groups for age in group.token_staleness(version)]
        assert limit is None or max(ages, default=0) <= limit
        self.returned += groups

    @rule(aborts=st.booleans())
    def sync(self, aborts):
        self.sampler.policy_version += 1
        if aborts:
            self.sampler.abort()

    @rule()
    def break_or_mend_the_reward(self):
        self.is_flaky, self.may_lose_prompts = not self.is_flaky, True

    @rule()
    def close(self):
        self.may_lose_prompts = True
        self.collector.close()
        assert not self.sampler.live

    @invariant()
    def each_completion_stands_in_one_place(self):
        stats, sampler = self.collector.stats, self.sampler
        ended = stats.kept + stats.dropped + stats.cancelled + stats.failed
        assert stats.submitted == ended + self.collector.num_in_flight == len(sampler.submitted)
        ids = [output.request_id for group in self.returned for output in group.outputs]
        assert len(ids) == len(set(ids)) == stats.kept

    @invariant()
    def a_group_is_what_was_sampled_for_its_prompt(self):
        for group in self.returned:
            assert len(group.outputs) == len(group.rewards)
            assert (self.strategy.min_group_size or GROUP) <= len(group.outputs) <= GROUP
            for output in group.outputs:
                assert output is self.sampler.delivered[output.request_id]
                assert output.status is RequestStatus.FINISHED
                assert self.sampler.submitted[output.request_id] == group.prompt

    @invariant()
    def no_prompt_is_lost_or_comes_twice(self):
        prompts = [group.prompt for group in self.returned]
        assert len(prompts) == len(set(prompts))
        if self.strategy.carries and not self.may_lose_prompts:
            collector = self.collector
            waiting = [*collector._kept, *collector._returned_prompts, *collector._in_flight]
            num_gone = len(prompts) + collector.stats.groups_dropped
            assert len(self.taken) == num_gone + len(waiting)


Steps.TestCase.settings = settings(max_examples=200, stateful_step_count=15)
TestSteps = Steps.TestCase


def collector_of(strategy=None, sampler=None, reward=equal_or_not, prompts=None):
    prompts = numbered()[1] if prompts is None else prompts
    sampler = sampler or Dice()
    return GroupCollector(sampler, prompts, reward, strategy, num_generations=GROUP)


def test_plain_returns_every_prompt_in_order_and_drops_nothing():
    collector = collector_of()
    prompts = [group.prompt for _ in range(3) for group in collector.collect(5)]
    assert prompts == list(range(15))
    assert collector.stats.kept == collector.stats.submitted == 15 * GROUP
    assert collector.metrics()["rollout/tokens_discarded"] == 0


def test_over_sampling_submits_its_extras_and_cancels_the_stragglers():
    sampler = Dice(order="first")
    collector = collector_of(OverSampling(num_extra_groups=3), sampler)
    groups = collector.collect(2)
    assert [group.prompt for group in groups] == [0, 1]
    assert len(sampler.submitted) == 5 * GROUP
    assert not sampler.live
    assert collector.metrics()["rollout/groups_cancelled"] == 3


def test_over_sampled_members_make_a_group_of_the_first_that_finish():
    sampler = Dice(order="first")
    collector = collector_of(OverSampling(num_extra_groups=0, num_extra_members=2), sampler)
    (group,) = collector.collect(1)
    assert [output.request_id for output in group.outputs] == ["r0", "r1", "r2", "r3"]
    assert collector.stats.cancelled == 2


def test_dynamic_sampling_refills_each_dropped_group_at_once():
    collector = collector_of(DynamicSampling(), Dice(order="first"))
    assert [group.prompt for group in collector.collect(4)] == [1, 2, 4, 5]
    assert collector.metrics()["rollout/groups_dropped"] == 2
    assert collector.stats.dropped == 2 * GROUP


def test_dynamic_sampling_ends_its_step_at_the_bound():
    def always_equal(prompt, outputs):
        return [1.0] * len(outputs)

    collector = collector_of(DynamicSampling(max_dropped_groups=3), reward=always_equal)
    assert len(collector.collect(4)) == 4
    assert collector.metrics()["rollout/groups_dropped"] == 3


def test_partial_rollouts_carry_what_is_unfinished_with_its_tokens():
    sampler = Dice(seed=3)
    collector = collector_of(PartialRollouts(num_extra_groups=4, max_staleness=2), sampler)
    collector.collect(2)
    carried = set(sampler.live)
    assert carried
    assert sampler.is_asleep
    sampler.policy_version += 1
    spanning = [
        output
        for _ in range(3)
        for group in collector.collect(2)
        for output in group.outputs
        if len({version for version, _ in output.policy_versions}) == 2
    ]
    assert {output.request_id for output in spanning} & carried
    assert collector.stats.cancelled == 0


def test_a_group_carried_for_too_long_starts_anew_with_its_prompt():
    sampler = Dice(order="first")
    collector = collector_of(PartialRollouts(num_extra_groups=2, max_staleness=1), sampler)
    collector.collect(1)
    sampler.policy_version += 2
    group = collector.collect(1)[0]
    assert group.prompt == 1
    assert {v for o in group.outputs for v, _ in o.policy_versions} <= {2}
    assert collector.stats.groups_cancelled == 2


def test_a_carried_group_that_a_sync_aborted_starts_anew():
    sampler = Dice(order="first")
    collector = collector_of(PartialRollouts(num_extra_groups=2), sampler)
    collector.collect(1)
    sampler.abort()
    prompts = [group.prompt for _ in range(3) for group in collector.collect(1)]
    assert sorted(prompts) == [1, 2, 3]


def test_a_failed_completion_is_generated_again():
    class FailsOnce(Dice):
        def deliver(self, request_id, status):
            return super().deliver(
                request_id, RequestStatus.FAILED if request_id == "r2" else status
            )

    collector = collector_of(Retrying(max_retries=1), FailsOnce())
    (group,) = collector.collect(1)
    assert len(group.outputs) == GROUP
    assert collector.stats.retries == 1


def test_a_reward_that_raises_is_called_again_for_what_is_missing_only():
    calls = []

    def reward(prompt, outputs):
        calls.append(len(outputs))
        if len(calls) == 1:
            raise OSError("away")
        return [None] * 2 + [1.0] * (len(outputs) - 2) if len(calls) == 2 else [0.0] * len(outputs)

    collector = collector_of(Retrying(max_retries=2), reward=reward)
    (group,) = collector.collect(1)
    assert calls == [4, 4, 2]
    assert sorted(group.rewards) == [0.0, 0.0, 1.0, 1.0]


def test_a_minimum_viable_group_is_kept_without_what_could_not_be_scored():
    def reward(prompt, outputs):
        return [1.0, 0.0, None, float("nan")][: len(outputs)] if len(outputs) == 4 else [None] * 2

    collector = collector_of(Retrying(max_retries=1, min_group_size=2), reward=reward)
    (group,) = collector.collect(1)
    assert group.rewards == [1.0, 0.0]
    assert collector.stats.dropped == 2


def test_a_failing_environment_is_raised_past_the_bound_with_its_cause():
    def reward(prompt, outputs):
        raise OSError("no route to host")

    collector = collector_of(Retrying(max_retries=1, max_dropped_groups=2), reward=reward)
    with pytest.raises(RolloutError, match=r"0 of 4 .* needs 2; .* OSError: no route") as caught:
        collector.collect(2)
    assert isinstance(caught.value.__cause__, OSError)
    assert collector.num_in_flight == 0


def test_without_retries_a_reward_raises_as_it_is_and_the_next_call_goes_on():
    is_broken = True

    def reward(prompt, outputs):
        if is_broken and prompt == 1:
            raise KeyError("answer")
        return [0.0] * len(outputs)

    collector = collector_of(sampler=Dice(order="first"), reward=reward)
    with pytest.raises(KeyError, match="answer"):
        collector.collect(3)
    is_broken = False
    assert [group.prompt for group in collector.collect(2)] == [0, 2]


def test_a_failed_completion_is_raised_where_nobody_retries_it():
    collector = collector_of(sampler=Dice(fail_rate=1.0))
    with pytest.raises(IncompleteRolloutError, match=r"r[0-3] of group 0") as caught:
        collector.collect(1)
    assert len(caught.value.outputs) == 1


def test_a_finite_source_ends_with_fewer_groups_and_then_none():
    collector = collector_of(OverSampling(), prompts=range(5))
    assert [len(collector.collect(3)) for _ in range(3)] == [3, 0, 0]
    collector = collector_of(prompts=[1, 2, 4, 5, 7])
    assert [len(collector.collect(3)) for _ in range(3)] == [3, 2, 0]


def test_a_row_holds_its_prompt_beside_what_the_reward_needs():
    sampler = Dice()
    rows = [{"prompt": 5, "answer": "x"}]
    seen = []

    def reward(row, outputs):
        seen.append(row["answer"])
        return [0.0] * len(outputs)

    collector = collector_of(sampler=sampler, reward=reward, prompts=rows)
    (group,) = collector.collect(1)
    assert seen == ["x"]
    assert group.prompt is rows[0]
    assert set(sampler.submitted.values()) == {5}


def test_a_reward_of_another_length_is_refused():
    collector = collector_of(reward=lambda prompt, outputs: [0.0])
    with pytest.raises(RolloutError, match=r"gave \[0.0\] for 4 completions"):
        collector.collect(1)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (1.0, "gave 1.0 .* one number per completion"),
        (["good"] * GROUP, "good.* for 4 completions"),
    ],
)
def test_a_reward_that_gives_no_numbers_is_refused(returned, said):
    with pytest.raises(RolloutError, match=said):
        collector_of(reward=lambda prompt, outputs: returned).collect(1)


def test_a_row_without_a_prompt_is_refused_with_what_it_has():
    with pytest.raises(InvalidRequestError, match="no 'prompt', only 'question', 'answer'"):
        collector_of(prompts=[{"question": "1+1", "answer": "2"}]).collect(1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompts": "one text"}, "prompts is a str"),
        ({"prompts": 3}, "prompts is a int"),
        ({"reward": 1.0}, "reward=1.0 cannot be called"),
        ({"strategy": "plain"}, "strategy='plain' is not a strategy"),
        ({"strategy": DynamicSampling}, "is not a strategy; pass an instance"),
    ],
)
def test_what_a_collector_cannot_use_is_named(wrong, said):
    with pytest.raises(ConfigurationError, match=said):
        collector_of(**wrong)


def test_a_dead_engine_is_raised_and_leaves_nothing_in_flight():
    sampler = Dice()
    collector = collector_of(sampler=sampler)
    sampler.dies = True
    with pytest.raises(EngineDeadError):
        collector.collect(1)
    assert collector.num_in_flight == 0


def test_staleness_is_told_per_token():
    sampler = Dice(seed=1)
    collector = collector_of(PartialRollouts(num_extra_groups=3), sampler)
    collector.collect(1)
    sampler.policy_version += 1
    groups = collector.collect(1)
    ages = [age for group in groups for age in group.token_staleness(1)]
    assert len(ages) == sum(group.num_tokens for group in groups)
    metrics = collector.metrics()
    assert metrics["rollout/staleness_max"] == max(ages) == 1
    assert metrics["rollout/staleness_mean"] == pytest.approx(sum(ages) / len(ages))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: OverSampling(num_extra_groups=0), "or extra members does nothing"),
        (lambda: OverSampling(num_extra_groups=-1), r"num_extra_groups=-1\) is not a whole"),
        (lambda: DynamicSampling(max_dropped_groups=0), "max_dropped_groups=0"),
        (lambda: PartialRollouts(max_staleness=0), "max_staleness=0"),
        (lambda: PartialRollouts(max_staleness=True), "max_staleness=True"),
        (lambda: Retrying(min_group_size=0), "min_group_size=0"),
        (lambda: collector_of(Retrying(min_group_size=5)), "num_generations=4 is below 5"),
        (lambda: collector_of().collect(0), r"collect\(0\)"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_a_strategy_takes_one_class_and_no_other_line():
    every_nth = run(block("Add a strategy"))["EveryNth"]
    collector = collector_of(every_nth(period=3), Dice(order="first"))
    assert [group.prompt for group in collector.collect(4)] == [0, 3, 6, 9]
    assert collector.stats.groups_dropped == 6


def test_counts_since_an_earlier_copy_are_what_was_added():
    earlier = CompletionStats(submitted=2, kept=1)
    assert CompletionStats(submitted=5, kept=2).since(earlier) == CompletionStats(
        submitted=3, kept=1
    )


def test_groups_kept_since_a_call_that_raised_are_not_returned_too_late():
    sampler, (_, prompts) = Dice(order="first"), numbered()
    calls = []

    def reward(prompt, outputs):
        calls.append(prompt)
        if len(calls) == 2:
            raise OSError("the environment is away")
        return [float(i) for i in range(len(outputs))]

    strategy = PartialRollouts(num_extra_groups=1, max_staleness=1)
    collector = GroupCollector(sampler, prompts, reward, strategy, num_generations=GROUP)
    with pytest.raises(OSError, match="away"):
        collector.collect(2)
    sampler.policy_version += 2
    groups = collector.collect(1)
    assert all(age == 0 for age in groups[0].token_staleness(sampler.policy_version))
    assert groups[0].prompt == calls[0], "its prompt comes first"
    assert collector.stats.groups_cancelled
