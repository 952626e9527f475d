"""Steps that the simulator predicts, against ones computed by hand."""

from dataclasses import replace

import pytest

from benchmarks.cluster.scenarios import scenarios
from benchmarks.cluster.simulation import Mode, Scenario, Speeds, simulate

SPEEDS = Speeds(steps=[(1, 0.01), (3, 0.03)], prefill=0.001, num_slots=100)


def scenario(**changes):
    settings = {
        "mode": Mode.WAITING, "speeds": SPEEDS, "num_engines": 1, "num_groups": 1,
        "group_size": 2, "prompt_tokens": 50, "draw_length": lambda _: 10, "train": 1.0,
    }  # fmt: skip
    return Scenario(**(settings | changes))


def test_a_decode_step_is_on_straight_lines_between_and_beyond_the_points():
    found = [SPEEDS.step(count) for count in (1, 2, 3, 5)]
    assert found == pytest.approx([0.01, 0.02, 0.03, 0.05])
    assert Speeds(steps=[(4, 0.5)], prefill=0, num_slots=1).step(9) == 0.5


def test_a_waiting_loop_samples_then_trains():
    # One prefill of 50 tokens for the group of two, then ten steps of two rows.
    found = simulate(scenario(rollout_overhead=0.05, sync=0.1))
    assert found.step_seconds == pytest.approx(0.05 + 10 * 0.02 + 0.05 + 1 + 0.1)
    assert found.tokens_per_second == pytest.approx(20 / found.step_seconds)
    assert found.trainer_idle == pytest.approx(0.4 / found.step_seconds)
    assert found.engines_idle == pytest.approx(1 - 0.25 / found.step_seconds)
    assert (found.staleness_mean, found.staleness_max) == (0, 0)


def test_what_has_no_slot_waits():
    found = simulate(scenario(speeds=replace(SPEEDS, num_slots=1)))
    assert found.step_seconds == pytest.approx(0.05 + 2 * 10 * 0.01 + 1)


def test_rows_that_end_leave_the_others_faster():
    lengths = iter([10, 20] * 99)
    found = simulate(scenario(draw_length=lambda _: next(lengths)))
    assert found.step_seconds == pytest.approx(0.05 + 10 * 0.02 + 10 * 0.01 + 1)


def test_two_engines_share_the_groups():
    one = simulate(scenario(num_groups=2))
    two = simulate(scenario(num_groups=2, num_engines=2))
    assert one.step_seconds == pytest.approx(0.1 + 10 * 0.04 + 1)
    assert two.step_seconds == pytest.approx(0.05 + 10 * 0.02 + 1)


def test_a_trainer_that_is_slower_than_the_engines_never_waits_for_them():
    found = simulate(scenario(mode=Mode.OVERLAPPING, sync=0.1, max_staleness=2))
    assert found.step_seconds == pytest.approx(1.1)
    assert found.trainer_idle == pytest.approx(0.1 / 1.1)
    assert 0 < found.staleness_mean <= 2


def test_engines_that_are_slower_than_the_trainer_never_idle():
    speeds = Speeds(steps=[(1, 0.01), (100, 0.012)], prefill=1e-5, num_slots=100)
    waiting = scenario(train=0.05, speeds=speeds)
    found = simulate(replace(waiting, mode=Mode.OVERLAPPING, max_staleness=4))
    assert found.engines_idle == pytest.approx(0, abs=1e-9)
    assert found.tokens_per_second > simulate(waiting).tokens_per_second


def test_sampling_ahead_loses_where_keys_cost_more_than_waiting():
    waiting = scenario(train=0.01, group_size=8)
    found = simulate(replace(waiting, mode=Mode.OVERLAPPING, max_staleness=4))
    assert found.tokens_per_second < simulate(waiting).tokens_per_second


def test_new_weights_have_keys_computed_again_and_pause_the_engines():
    fast = scenario(mode=Mode.OVERLAPPING, train=0.05, max_staleness=4)
    slow = simulate(replace(fast, pause=0.2))
    assert slow.step_seconds > simulate(fast).step_seconds + 0.1


def test_an_engine_that_ends_costs_time_and_no_tokens():
    whole = simulate(scenario(num_groups=8, num_engines=2), num_steps=50)
    failing = scenario(num_groups=8, num_engines=2, failures_per_hour=600.0, restart=5.0)
    found = simulate(failing, num_steps=50)
    assert found.step_seconds > whole.step_seconds
    per_step = found.tokens_per_second * found.step_seconds
    assert per_step == pytest.approx(whole.tokens_per_second * whole.step_seconds)


def test_a_step_of_a_scenario_trains_on_all_tokens_of_its_groups():
    named = scenarios([8])
    colocated, pooled = (
        simulate(named[name], num_steps=2)
        for name in ("8 GPUs, colocated", "8 GPUs, pooled, max_staleness=4")
    )
    assert pooled.tokens_per_second > colocated.tokens_per_second
    assert colocated.staleness_max == 0 < pooled.staleness_max
