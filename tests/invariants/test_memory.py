"""Training and the KV cache share memory, in real processes."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from tiny import tiny_model

from cb_rollout import (
    ConfigurationError,
    IncompleteRolloutError,
    InvalidRequestError,
    OutOfCacheMemoryError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
)
from cb_rollout.engine.kv_cache import storage as storages
from cb_rollout.engine.memory import device as devices

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(do_sample=False, max_new_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells")


def tokens_of(outputs):
    return [output.generated_tokens for output in outputs.values()]


FIRST_STEP_UNDER_A_LIMIT = """
import os, resource, sys, traceback
import psutil, torch
from tiny import tiny_model
from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams

torch.set_num_threads(1)
model = tiny_model(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=6, head_dim=64,
    num_key_value_heads=4, vocab_size=512, max_position_embeddings=100_000,
).train()
size = sum(parameter.nbytes for parameter in model.parameters())
optimizer = torch.optim.AdamW(model.parameters())

def loss():
    ids = torch.arange(4)[None]
    return model(input_ids=ids, labels=ids).loss

def first_step(reserve):
    # Room for 8 times the weights: gradients and moments will take 3 of them.
    limit = psutil.Process().memory_info().data + 8 * size + (200 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    config = RolloutConfig(
        training_reserve_gib=reserve, max_memory_percent=1.0, max_requests_per_batch=8, seed=0
    )
    with RolloutGenerator(model, config, optimizer=optimizer) as generator:
        plan = generator.memory_plan()
        # Sequences that may become long, and end with their first token: the pool takes all it may.
        longest = plan.num_blocks * config.block_size - 8
        params = SamplingParams(max_new_tokens=longest, stop_token_ids=tuple(range(512)))
        generator.generate_batch([[5, 6, 7]] * 8, sampling_params=params)
        assert generator.metrics()["rollout/kv_bytes"] >= plan.kv_bytes > 2 * size, plan
        loss().backward()
        optimizer.step()

for reserve in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            first_step(reserve if reserve == "auto" else float(reserve))
            sys.stdout.write(f"{reserve}: stepped\\n")
        except BaseException as error:
            sys.stdout.write(f"{reserve}: {error!r}\\n")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@linux_only
def test_a_plan_of_step_zero_leaves_the_first_adam_step_its_memory():
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP_UNDER_A_LIMIT, "auto", "0.0"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    with_reserve, without = done.stdout.splitlines()
    assert with_reserve == "auto: stepped", done
    # The same without the reserve, so that the limit is known to bite.
    assert "can't allocate memory" in without, done


def resident_bytes():
    return psutil.Process().memory_info().rss


@linux_only
def test_sleeping_frees_the_pool_and_waking_changes_no_token():
    # Twelve tensors of 16 MiB: the size that glibc likes to keep for itself.
    model = tiny_model(num_hidden_layers=6, num_key_value_heads=4, head_dim=64)
    config = RolloutConfig(num_blocks=511, max_requests_per_batch=4)
    with RolloutGenerator(model, config) as generator:
        tokens = tokens_of(generator.generate_batch(PROMPTS, sampling_params=GREEDY))
        for _ in range(3):
            cache = generator.manager.engine._storage.cache
            pool_bytes = generator.metrics()["rollout/kv_bytes"]
            assert pool_bytes == 12 * 16 << 20
            for pages in cache.tensors:
                pages.fill_(1)  # all of it resident
            del cache, pages
            before = resident_bytes()
            generator.sleep()
            assert generator.is_asleep
            assert generator.metrics()["rollout/kv_bytes"] == 0
            assert before - resident_bytes() >= 0.9 * pool_bytes
            generator.wake()
            again = generator.generate_batch(PROMPTS, sampling_params=GREEDY)
            assert tokens_of(again) == tokens


def steps(model, optimizer, count=1):
    for _ in range(count):
        ids = torch.arange(3, 9)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_plan_is_redone_once_after_the_first_optimizer_step_in_any_loop():
    model = tiny_model().train()
    size = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with RolloutGenerator(model, optimizer=optimizer) as generator:
        plan = generator.memory_plan()
        assert plan.training.reserve == 3 * size
        generator.generate_batch(PROMPTS, sampling_params=GREEDY)
        generator.sync_weights()
        assert generator.memory_plan() is plan, "no optimizer has stepped"
        generator.generate_batch(PROMPTS, sampling_params=GREEDY)
        steps(model, optimizer)
        generator.sync_weights()
        measured = generator.memory_plan()
        assert measured.training.is_measured
        assert measured.training.optimizer_states >= 2 * size
        assert measured.training.optimizer_states_to_come == 0
        assert generator.manager.limits.max_cached_tokens() == (
            measured.num_blocks * generator.config.block_size
        )
        generator.generate_batch(PROMPTS, sampling_params=GREEDY)
        steps(model, optimizer)
        generator.sync_weights()
        assert generator.memory_plan() is measured


def test_the_highest_peak_between_rollouts_counts(monkeypatch):
    model = tiny_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    told = [(100, 105), (100, 103)]
    monkeypatch.setattr(devices, "reset_peak", lambda _: True)
    monkeypatch.setattr(devices, "used_and_peak", lambda _: told.pop(0))
    with RolloutGenerator(model, optimizer=optimizer) as generator:
        generator.generate_batch(PROMPTS, sampling_params=GREEDY)
        generator.generate_batch(PROMPTS, sampling_params=GREEDY)
        steps(model, optimizer)
        generator.sync_weights()
        assert told == []
        assert generator.memory_plan().training.activations == 5


@pytest.mark.slow
def test_kept_keys_survive_a_due_new_plan():
    model = tiny_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with RolloutGenerator(model, optimizer=optimizer) as generator:
        manager, plan = generator.manager, generator.memory_plan()
        manager.start()
        manager.add_request([5, 6], max_new_tokens=200, streaming=True, eos_token_id=-1)
        assert manager.get_result(timeout=60) is not None
        with manager.pause("keep"):
            model.train()
            steps(model, optimizer)
            num_blocks_used = manager.engine.num_blocks_used
        assert generator.memory_plan() is plan
        assert num_blocks_used > 0
        *_, last = manager.request_id_iter("req_0")
        assert len(last.generated_tokens) == 200
        generator.sync_weights("keep")
        assert generator.memory_plan() is not plan, "nothing is in flight"


def test_a_tighter_plan_after_the_first_step_refuses_in_the_caller(monkeypatch):
    model = tiny_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    config = RolloutConfig(max_memory_percent=0.25, max_requests_per_batch=1)
    with RolloutGenerator(model, config, optimizer=optimizer) as generator:
        prompt = [5] * 400
        assert generator.generate_batch([prompt], sampling_params=GREEDY)
        steps(model, optimizer)
        block_bytes = generator.memory_plan().bytes_per_block
        # Training took 40 blocks' bytes beside the cache; what is left is 40, a quarter of it ours.
        monkeypatch.setattr(devices, "used_and_peak", lambda _: (0, 40 * block_bytes))
        memory = devices.DeviceMemory(1 << 40, 80 * block_bytes)
        monkeypatch.setattr(devices, "memory", lambda _: memory)
        generator.sync_weights()
        assert generator.memory_plan().num_blocks == 10
        with pytest.raises(InvalidRequestError, match="the KV cache holds at most 320"):
            generator.generate_batch([prompt], sampling_params=GREEDY)
        assert generator.generate_batch([prompt[:300]], sampling_params=GREEDY)


def test_waking_to_less_memory_shrinks_the_pool_and_logs_it(monkeypatch, caplog):
    config = RolloutConfig(num_blocks=64, block_size=4)
    with RolloutGenerator(tiny_model(), config) as generator:
        tokens = tokens_of(generator.generate_batch(PROMPTS, sampling_params=GREEDY))
        block_bytes = generator.memory_plan().bytes_per_block
        generator.sleep()
        memory = devices.DeviceMemory(1 << 40, 5 * block_bytes)
        monkeypatch.setattr(storages.devices, "memory", lambda _: memory)
        generator.wake()
        assert tokens_of(generator.generate_batch(PROMPTS, sampling_params=GREEDY)) == tokens
        assert generator.metrics()["rollout/kv_bytes"] <= 10 * block_bytes
        assert "no memory for 64 KV cache blocks" in caplog.text
        assert "5 are allocated" in caplog.text


def test_waking_to_less_than_one_request_needs_raises_with_the_table(monkeypatch):
    config = RolloutConfig(num_blocks=64, block_size=4)
    with RolloutGenerator(tiny_model(), config) as generator:
        generator.generate_batch(PROMPTS, sampling_params=GREEDY)
        generator.sleep()
        memory = devices.DeviceMemory(1 << 40, 3 * generator.memory_plan().bytes_per_block)
        with monkeypatch.context() as patched:
            patched.setattr(storages.devices, "memory", lambda _: memory)
            with pytest.raises(IncompleteRolloutError, match="no memory for 4 KV") as raised:
                generator.generate_batch(PROMPTS, sampling_params=GREEDY)
        cause = raised.value.__cause__
        assert isinstance(cause, OutOfCacheMemoryError)
        assert "KV cache" in str(cause).splitlines()[-2]
        # Nothing is lost: with memory it goes on.
        assert generator.generate_batch(PROMPTS, sampling_params=GREEDY)


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize("num_waves", [1, 3])
def test_the_pool_never_exceeds_what_the_workload_can_use(num_waves):
    config = RolloutConfig(block_size=4, max_requests_per_batch=2)
    with RolloutGenerator(tiny_model(), config) as generator:
        # Two at a time, of 3 + 12 and 4 + 12 tokens: four blocks each.
        generator.generate_batch(PROMPTS * num_waves, sampling_params=GREEDY)
        pool = generator.manager.engine._scheduler.pool
        assert pool.num_blocks <= 8
        # Longer ones that come later make it grow, to their own need at most: eleven blocks each.
        longer = dataclasses.replace(GREEDY, max_new_tokens=40)
        generator.generate_batch([[20 + i, 9, 9, 9] for i in range(4)], sampling_params=longer)
        assert 8 < pool.num_blocks <= 2 * 11


@pytest.mark.parametrize(
    ("name", "value", "reason", "default"),
    [
        ("block_size", 10**12, r"a block of 10{12} tokens \d{5}", "32"),
        ("max_requests_per_batch", 10**10, r"a forward \d{4}", "None"),
        ("training_reserve_gib", 1e9, "training will take 10{9}", "'auto'"),
        ("max_memory_percent", 1e-12, "", "0.8"),
    ],
)
def test_the_error_names_the_setting_that_leaves_the_cache_no_room(name, value, reason, default):
    refusal = (
        rf"no memory for a KV cache with {name}=.*{reason}.*; \w+ {name}, "
        f"for example to {default}, which"
    )
    with pytest.raises(OutOfCacheMemoryError, match=refusal) as raised:
        RolloutGenerator(tiny_model(), RolloutConfig(**{name: value}))
    told = re.findall(r"(\w+)=", str(raised.value))
    assert set(told) == {name}


def test_more_blocks_than_the_device_holds_are_refused_with_the_maximum():
    refusal = r"num_blocks=10{12} .* need \d+\.\d+ GiB, but cpu has \d+\.\d+; lower num_blocks"
    with pytest.raises(ConfigurationError, match=refusal):
        RolloutGenerator(tiny_model(), RolloutConfig(num_blocks=10**12))
    with pytest.raises(ConfigurationError, match="lower block_size"):
        RolloutGenerator(tiny_model(), RolloutConfig(num_blocks=2, block_size=10**12))
