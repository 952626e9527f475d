import pytest
from documented import block, run
from fake_model import FakeModel, request_of
from tiny import tiny_model

from cb_rollout.config.enums import SchedulerType
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.core import Engine
from cb_rollout.engine.request import Limits
from cb_rollout.engine.scheduler import policy as policies
from cb_rollout.engine.scheduler.policy import SchedulerPolicy, create_policy

ShortestFirst = run(block("Add a scheduler policy"))["ShortestFirst"]


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


@pytest.mark.parametrize("scheduler_type", SchedulerType)
def test_every_scheduler_type_has_a_policy(scheduler_type):
    assert create_policy(scheduler_type).__class__ is SchedulerPolicy.registered[scheduler_type]


def test_a_policy_of_its_own_file_admits_in_its_order_and_prefills_when_it_says():
    engine = engine_of("shortest_first", max_requests=2)
    long, short, medium, equal = requests = [
        request_of([1, i], n, f"r{n}") for i, n in enumerate((9, 2, 5, 2))
    ]
    engine.add(*requests)
    assert list(engine.scheduler.waiting) == [short, equal, medium, long]
    assert names_of_steps(engine, 3) == "pdp"
    assert engine.scheduler.running == [medium, long]
    engine.drain()
    engine.check()


def test_a_real_engine_obeys_a_new_policy(monkeypatch):
    fifo = SchedulerPolicy.registered[SchedulerType.FIFO]
    monkeypatch.setitem(SchedulerPolicy.registered, SchedulerType.FIFO, ShortestFirst)
    engine = Engine(tiny_model("llama"), RolloutConfig(seed=0, max_requests_per_batch=1))
    requests = [request_of([5, 6, 7 + n], n, f"r{n}") for n in (6, 2, 4)]
    ended = []
    for request in requests:
        engine.add(request)
    while engine.has_work:
        ended += [r.max_new_tokens for r in engine.step() if r.status.is_final]
    assert ended == [2, 4, 6]
    assert fifo is policies.Fifo


def test_sequences_that_ran_before_are_admitted_first_under_every_policy():
    engine = engine_of("shortest_first", max_requests=1)
    long, short = request_of([1], 9, "long"), request_of([2], 2, "short")
    engine.add(long)
    engine.step()
    engine.scheduler.preempt([long])
    engine.add(short)
    assert list(engine.scheduler.waiting) == [long, short]


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
