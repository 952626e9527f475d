from dataclasses import fields

from cb_rollout.metrics.counters import EngineCounters


def test_counters_start_at_zero():
    assert all(getattr(EngineCounters(), field.name) == 0 for field in fields(EngineCounters))


def test_a_difference_is_what_was_added_and_the_peak_is_carried_over():
    earlier = EngineCounters(tokens_generated=10, preemptions=1, kv_blocks_peak=7)
    now = EngineCounters(tokens_generated=25, preemptions=1, prefill_tokens=5, kv_blocks_peak=7)
    assert now.since(earlier) == EngineCounters(
        tokens_generated=15, prefill_tokens=5, kv_blocks_peak=7
    )


def test_a_copy_stands_still():
    counters = EngineCounters(tokens_generated=10)
    copy = counters.copy()
    counters.tokens_generated += 5
    assert copy == EngineCounters(tokens_generated=10)


def test_every_counter_is_subtracted_but_the_peak():
    names = [field.name for field in fields(EngineCounters)]
    now = EngineCounters(**{name: 10 + i for i, name in enumerate(names)})
    difference = now.since(EngineCounters(**dict.fromkeys(names, 10)))
    for i, name in enumerate(names):
        expected = 10 + i if name == "kv_blocks_peak" else i
        assert getattr(difference, name) == expected
