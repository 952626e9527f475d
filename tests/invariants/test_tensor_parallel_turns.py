"""Processes that share a model's layers take the same turns, whatever meets them when.

Here the processes are threads, and each has the whole model, so nothing but the turns keeps their
engines in step.
"""

import queue
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny import tiny_model

from cb_rollout import (
    ContinuousBatchingManager,
    EngineDeadError,
    RequestStatus,
    RolloutConfig,
    SamplingParams,
)
from cb_rollout.engine.service import manager as manager_module
from cb_rollout.engine.service.lockstep import LockstepCommand

CONFIG = RolloutConfig(seed=0, block_size=4, num_blocks=10, max_batch_tokens=16)
OPERATIONS = ("add", "add", "add", "cancel", "pause", "nested", "take", "sleep", "warmup")
TIMEOUT_SECONDS = 60


class ThreadGroup:
    """An `EngineGroup` between two threads."""

    ranks = (0, 1)
    data_parallel_rank = number = 0

    def __init__(self, rank: int, turns: "queue.Queue[LockstepCommand]") -> None:
        self.rank = self.group_rank = rank
        self._turns = turns

    def all_reduce_min(self, value: int) -> int:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value] * len(self.ranks)

    def send(self, turn: LockstepCommand | None) -> LockstepCommand:
        if turn is None:
            return self._turns.get(timeout=TIMEOUT_SECONDS)
        self._turns.put(turn)
        return turn


@pytest.fixture
def managers(monkeypatch):
    """Two managers that are one engine; the first leads."""
    turns: queue.Queue[LockstepCommand] = queue.Queue()
    groups = iter([ThreadGroup(rank, turns) for rank in range(2)])
    monkeypatch.setattr(manager_module.hf_compat, "tensor_parallel_group", lambda _: "group")
    monkeypatch.setattr(manager_module, "EngineGroup", lambda *_: next(groups))
    pair = [ContinuousBatchingManager(tiny_model(), None, CONFIG) for _ in range(2)]
    yield pair
    for manager in pair:
        manager.stop(hard_stop=True, timeout=TIMEOUT_SECONDS)


def run_schedule(manager: ContinuousBatchingManager, seed: int) -> list[Any]:
    draws, live, delivered = random.Random(seed), [], []
    for _ in range(draws.randint(3, 9)):
        operation = draws.choice(OPERATIONS)
        if operation == "add":
            prompt = [draws.randrange(3, 256) for _ in range(draws.randint(2, 12))]
            params = SamplingParams(max_new_tokens=draws.randint(1, 12))
            live += manager.add_requests([prompt] * draws.randint(1, 3), sampling_params=params)
        elif operation == "cancel" and live:
            manager.cancel_request(draws.choice(live))
        elif operation in ("pause", "nested"):
            with manager.pause(draws.choice(["keep", "recompute", "abort"])):
                if operation == "nested":
                    with manager.pause():
                        pass
        elif operation == "take" and live:
            delivered.append(manager.get_result(timeout=TIMEOUT_SECONDS))
            live.remove(delivered[-1].request_id)
        elif operation == "sleep":
            manager.sleep()
            manager.wake()
        elif operation == "warmup":
            manager.warmup()
    delivered += [manager.get_result(timeout=TIMEOUT_SECONDS) for _ in live]
    return [(o.request_id, o.generated_tokens, o.policy_versions, o.status) for o in delivered]


def together(work, managers, *arguments):
    """Run `work` for every manager, each in a thread."""
    with ThreadPoolExecutor(len(managers)) as pool:
        futures = [pool.submit(work, manager, *arguments) for manager in managers]
        return [future.result(timeout=TIMEOUT_SECONDS) for future in futures]


def require_equal_schedules(managers, seeds):
    for manager in managers:
        manager.start()
    for seed in seeds:
        leading, following = together(run_schedule, managers, seed)
        assert leading == following, f"schedule {seed}"
    counters = [manager.counters for manager in managers]
    assert counters[0].decode_forwards == counters[1].decode_forwards
    assert counters[0].preemptions == counters[1].preemptions > 0
    assert [manager.status().kv_blocks_used for manager in managers] == [0, 0]


def test_random_schedules_deliver_the_same_on_every_process(managers):
    require_equal_schedules(managers, range(15))


@pytest.mark.slow
def test_hundreds_of_random_schedules_end(managers):
    require_equal_schedules(managers, range(300))


def test_a_process_that_asks_for_something_else_is_told(managers):
    for manager in managers:
        manager.start()
    managers[0].add_request([5, 6, 7])
    managers[1].add_request([5, 6, 8])
    with pytest.raises(EngineDeadError, match=r"different prompt.*same calls in the same order"):
        managers[1].get_result(timeout=TIMEOUT_SECONDS)
    with pytest.raises(EngineDeadError, match="make a new generator on every process"):
        managers[1].start()


def test_a_process_that_samples_other_tokens_is_told(managers):
    with torch.no_grad():
        managers[1].model.lm_head.weight.neg_()
    for manager in managers:
        manager.start()
    for manager in managers:
        manager.add_request([5, 6, 7], max_new_tokens=8)
    with pytest.raises(EngineDeadError, match="sampled different tokens"):
        managers[1].get_result(timeout=TIMEOUT_SECONDS)


def test_stopping_ends_all_processes_after_the_same_turn(managers):
    for manager in managers:
        manager.start()
        manager.add_request([5, 6, 7], max_new_tokens=36, eos_token_id=-1)
    together(lambda manager: manager.stop(hard_stop=True), managers)
    first, second = (manager.get_result(timeout=TIMEOUT_SECONDS) for manager in managers)
    assert first.generated_tokens == second.generated_tokens
    # Stopped amid the request.
    assert first.status == second.status == RequestStatus.CANCELLED
    assert not any(manager.is_running() for manager in managers)
