from fake_model import FakeModel, request_of

from cb_rollout.engine.request import Limits


def names_of_steps(engine, num_steps):
    """What each of so many steps was: a prefill (p) or a decode (d)."""
    names = ""
    for _ in range(num_steps):
        before = engine.counters.prefill_forwards
        engine.step()
        names += "p" if engine.counters.prefill_forwards > before else "d"
    return names


def engine_of(policy, **limits):
    defaults = {"block_size": 2, "max_batch_tokens": 100, "max_requests": 10, "is_packed": True}
    limits = Limits(**defaults | limits, can_share_blocks=True, can_resume_prompts=True)
    return FakeModel(limits, 100, 100, policy=policy)


def test_sequences_that_ran_before_are_admitted_first():
    engine = engine_of("fifo", max_requests=1)
    short, long = request_of([1], 2, "short"), request_of([2], 9, "long")
    engine.add(short)
    engine.step()
    engine.scheduler.preempt([short])
    engine.add(long)
    assert list(engine.scheduler.waiting) == [short, long]


def test_few_prompts_wait_for_eight_decode_steps():
    engine = engine_of("fifo")
    engine.add(*(request_of([1, i], 50, f"r{i}") for i in range(5)))
    assert names_of_steps(engine, 3) == "pdd"
    engine.add(request_of([2], 50, "late"))
    assert names_of_steps(engine, 8) == "ddddddpd"


def test_many_prompts_run_after_the_next_decode_step():
    engine = engine_of("fifo")
    engine.add(*(request_of([1, i], 50, f"r{i}") for i in range(4)))
    assert names_of_steps(engine, 1) == "p"
    engine.add(request_of([2], 50, "late"))
    assert names_of_steps(engine, 3) == "dpd"


def test_prefill_first_decodes_only_when_no_prompt_can_run():
    engine = engine_of("prefill_first")
    engine.add(*(request_of([1, i], 50, f"r{i}") for i in range(5)))
    assert names_of_steps(engine, 2) == "pd"
    engine.add(request_of([2], 50, "late"))
    assert names_of_steps(engine, 2) == "pd"
