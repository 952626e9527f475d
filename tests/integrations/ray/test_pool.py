"""A pool on a local Ray cluster samples as one engine, whatever happens to its workers."""

import operator
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import char_tokenizer, plain_logprobs, tiny_model
from transformers import CompileConfig, GenerationConfig
from waiting import wait_until

from cb_rollout import (
    EngineDeadError,
    IncompleteRolloutError,
    InvalidRequestError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
    WeightSyncError,
)
from cb_rollout.errors import ConfigurationError, RolloutError

ray = pytest.importorskip("ray")
from cb_rollout.integrations.ray import RolloutPool  # noqa: E402

pytestmark = pytest.mark.slow

CONFIG = RolloutConfig(num_blocks=256, max_requests_per_batch=16, seed=11)
WAIT = 300.0


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(path)
    tiny_model().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def pool(checkpoint):
    with RolloutPool(
        checkpoint, CONFIG, num_workers=2, tokenizer=char_tokenizer(), timeout_seconds=WAIT
    ) as made:
        wait_until(lambda: made.num_alive == 2)
        yield made


def handles(pool):
    """The first actors of the workers that have started, by number."""
    return {
        number: worker.handle.actors[0]
        for number, worker in dict(pool.manager._workers).items()
        if worker.description is not None
    }


def tokens_of_workers(pool):
    """How many tokens each worker has sampled, by number."""
    workers = dict(pool.manager._workers).values()
    return {worker.number: worker.counters.tokens_generated for worker in workers}


def process_ids(pool):
    workers = dict(pool.manager._workers).values()
    return [w.description.process_id for w in workers if w.description is not None]


def weights_of(version):
    """Other weights for every version, and of version 0 the checkpoint's."""
    model = tiny_model()
    if version:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * parameter.std() * noise if parameter.dim() > 1 else 0.0)
    return model


def largest_error(output, models):
    """Of any log-probability, against a plain forward of the weights of its token's version."""
    start, errors = 0, [0.0]
    for version, count in output.policy_versions:
        expected = plain_logprobs(models(version), output.prompt_ids, output.generated_tokens)
        part = slice(start, start + count)
        pairs = zip(output.logprobs[part], expected[part], strict=True)
        errors += [abs(ours - theirs) for ours, theirs in pairs]
        start += count
    assert start == len(output.generated_tokens) == len(output.logprobs)
    return max(errors)


def test_a_pool_samples_what_a_generator_samples(pool, checkpoint):
    prompts = [[5, 6, 7 + i % 9] for i in range(24)]
    params = SamplingParams(max_new_tokens=24)
    fresh = RolloutConfig(num_blocks=256, max_requests_per_batch=16, seed=11)
    with RolloutGenerator(tiny_model(), fresh, tokenizer=char_tokenizer()) as generator:
        expected = generator.generate_batch(prompts, sampling_params=params, num_return_sequences=2)
        texts = generator.generate_batch(["ab", "cd"], sampling_params=params)
    found = pool.generate_batch(prompts, sampling_params=params, num_return_sequences=2)
    found |= pool.generate_batch(["ab", "cd"], sampling_params=params)
    assert list(found) == list(expected | texts)
    for request_id, output in (expected | texts).items():
        assert found[request_id].prompt_ids == output.prompt_ids
        assert found[request_id].generated_tokens == output.generated_tokens
        assert found[request_id].logprobs == pytest.approx(output.logprobs, abs=1e-5)
        assert found[request_id].finish_reason is output.finish_reason
        assert found[request_id].policy_versions == output.policy_versions


def test_what_a_generator_refuses_a_pool_refuses_before_anything_is_sampled(pool):
    with pytest.raises(InvalidRequestError, match="outside the model's vocabulary"):
        pool.generate_batch([[5], [9999]])
    started = pool.manager._num_started
    for processor, reason in ((operator.getitem, "IndexError"), (unknown, "No module named")):
        params = SamplingParams(logits_processors=(processor,), max_new_tokens=3)
        with pytest.raises(IncompleteRolloutError, match=reason):
            pool.generate_batch([[5]], sampling_params=params)
    assert (pool.manager._num_started, pool.num_alive) == (started, 2)
    outputs = pool.generate_batch([[5], [9999]], max_new_tokens=3, on_error="return")
    assert [output.status.value for output in outputs.values()] == ["finished", "failed"]
    with pytest.raises(RolloutError, match="cannot be pickled or copied"):
        ray.put(pool)


@pytest.fixture(scope="module")
def two_of_each(tmp_path_factory):
    """A pool and a generator of a checkpoint whose generation config asks for two sequences."""
    path = tmp_path_factory.mktemp("two_of_each")
    model = tiny_model()
    model.generation_config.update(num_return_sequences=2, do_sample=True, temperature=0.5)
    model.save_pretrained(path)
    tokenizer = char_tokenizer()
    with (
        RolloutPool(str(path), CONFIG, num_workers=1, tokenizer=tokenizer) as made,
        RolloutGenerator(model, CONFIG, tokenizer=tokenizer) as generator,
    ):
        yield made, generator


def test_a_pool_samples_as_many_sequences_as_the_checkpoint_asks_for(two_of_each):
    found, expected = (
        [
            sampler.generate_batch([[5, 6], [7]], max_new_tokens=4),
            sampler.generate_batch([[5, 6], [7]], max_new_tokens=4, num_return_sequences=1),
            sampler.generate_batch([[5]], GenerationConfig(do_sample=True, max_new_tokens=4)),
        ]
        for sampler in two_of_each
    )
    assert [len(outputs) for outputs in found] == [len(outputs) for outputs in expected]
    assert [len(outputs) for outputs in found] == [4, 2, 1]
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours) == list(theirs)
        for request_id, output in theirs.items():
            assert ours[request_id].generated_tokens == output.generated_tokens


REFUSED = {
    "a padded tensor": torch.tensor([[0, 5], [6, 7]]),
    "a padded list": [[0, 0, 5], [5, 6, 7]],
    "booleans": [[True, False]],
    "floats": [[5.0]],
}


@pytest.mark.parametrize("inputs", REFUSED.values(), ids=REFUSED)
def test_a_pool_refuses_inputs_in_the_words_of_a_generator(two_of_each, inputs):
    said = []
    for sampler in two_of_each:
        with pytest.raises(InvalidRequestError) as raised:
            sampler.generate_batch(inputs, max_new_tokens=4)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_call_that_asks_a_pool_for_other_compiled_forwards_is_refused(two_of_each):
    asked = GenerationConfig(max_new_tokens=4, compile_config=CompileConfig(dynamic=True))
    for sampler in two_of_each:
        with pytest.raises(ConfigurationError, match="compile_config of one call"):
            sampler.generate_batch([[5]], asked)


def unknown(input_ids, scores):
    """A function of a module that the workers do not have."""
    raise AssertionError


def test_stop_strings_and_timestamps_come_back(pool):
    params = SamplingParams(max_new_tokens=60, stop=("e",), ignore_eos=True)
    outputs = pool.generate_batch(
        ["abc"], sampling_params=params, num_return_sequences=4, record_timestamps=True
    )
    tokenizer = char_tokenizer()
    for output in outputs.values():
        text = tokenizer.decode(output.generated_tokens)
        assert ("e" in text) == (output.finish_reason.value == "stop")
        admitted, ended = output.lifespan
        times = [output.created_time, admitted, *output.timestamps, ended]
        assert times == sorted(times)
        assert len(output.timestamps) == len(output.generated_tokens)


def test_the_bar_shows_the_longest_sequence_of_all_workers(pool, capsys):
    limits = [3, 7, 5]
    params = SamplingParams(ignore_eos=True)
    pool.generate_batch(
        [[5], [6], [7]], sampling_params=params, max_new_tokens=limits, progress_bar=True
    )
    last = capsys.readouterr().err.split("\r")[-1]
    assert "3/3" in last
    assert "longest=7" in last


def test_synced_weights_are_those_that_every_worker_samples_from(pool):
    version = pool.policy_version + 1
    model = weights_of(version)
    report = pool.sync_weights(model)
    assert (report.policy_version, pool.policy_version) == (version, version)
    held = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
    assert report.bytes_copied == held
    before = tokens_of_workers(pool)
    outputs = pool.generate_batch([[5, 6, i] for i in range(40)], max_new_tokens=12)
    for output in outputs.values():
        assert output.policy_versions == [(version, len(output.generated_tokens))]
        assert largest_error(output, lambda _: model) < 1e-5
    after = tokens_of_workers(pool)
    assert len(after) == 2
    assert all(after[number] > before[number] for number in after)
    with pytest.raises(WeightSyncError, match="not given"):
        pool.sync_weights({})
    assert pool.policy_version == version


def nudged(version):
    """Weights of which each version changes one row."""
    model = weights_of(min(version, 1))
    with torch.no_grad():
        model.lm_head.weight[5 + version] *= 1.5
    return model


def test_workers_are_sent_deltas_and_a_late_one_whole_weights(checkpoint):
    prompts, reports = [[5, 6, 7 + i] for i in range(8)], []
    with RolloutPool(
        checkpoint, CONFIG, num_workers=2, weight_deltas=True, timeout_seconds=WAIT
    ) as pool:
        wait_until(lambda: pool.num_alive == 2)
        for version in (1, 2, 3, 4):
            reports.append(pool.sync_weights(nudged(version)))
            if version == 2:
                killed = process_ids(pool)[0]
                os.kill(killed, signal.SIGKILL)
                wait_until(lambda: killed not in process_ids(pool) and pool.num_alive == 2)  # noqa: B023
            outputs = pool.generate_batch(prompts, max_new_tokens=12)
            assert {v for o in outputs.values() for v, _ in o.policy_versions} == {version}
            assert max(largest_error(o, nudged) for o in outputs.values()) <= 1e-5
    whole, *deltas = [report.bytes_copied for report in reports]
    # Buffers are sent too.
    assert whole >= sum(p.nbytes for p in tiny_model().parameters())
    assert max(deltas) < whole / 50


def test_weights_that_no_worker_takes_leave_the_old_ones(pool, monkeypatch):
    version = pool.policy_version
    put = pool._cluster.put
    monkeypatch.setattr(pool._cluster, "put", lambda array: put(array[:-1]))
    with pytest.raises(WeightSyncError, match="no worker accepted the weights"):
        pool.sync_weights(weights_of(99).state_dict())
    monkeypatch.undo()
    assert pool.policy_version == version
    (output,) = pool.generate_batch([[5, 6]], max_new_tokens=12).values()
    assert largest_error(output, weights_of) < 1e-5
    wait_until(lambda: pool.num_alive == 2)


def test_a_worker_killed_in_the_middle_of_an_update_is_replaced_by_one_that_has_it(pool):
    version = pool.policy_version + 1
    processes = process_ids(pool)
    number, victim = next(iter(handles(pool).items()))
    state = weights_of(version).state_dict()
    send = pool._cluster.call_all

    def send_and_kill(handle, method, *arguments):
        sent = send(handle, method, *arguments)
        if method == "update" and handle.actors[0] is victim:
            ray.kill(victim)
        return sent

    pool._cluster.call_all = send_and_kill
    try:
        pool.sync_weights(state)
    finally:
        del pool._cluster.call_all
    outputs = pool.generate_batch([[5, 6, i] for i in range(20)], max_new_tokens=12)
    wait_until(lambda: pool.num_alive == 2)
    assert number not in handles(pool)
    assert len({*processes, *process_ids(pool)}) == 3
    outputs |= pool.generate_batch([[5, 6, i] for i in range(20)], max_new_tokens=12)
    for output in outputs.values():
        assert output.policy_versions == [(version, len(output.generated_tokens))]
        assert largest_error(output, weights_of) < 1e-5


def test_a_sequence_of_a_killed_worker_is_sampled_again_elsewhere(pool):
    """A killed worker's sequences end with the tokens that they would have had."""

    def slowly(input_ids, scores):
        time.sleep(0.02)
        return scores

    params = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=5)
    outputs = pool.generate_batch([[5], [6]], sampling_params=params)
    expected = [output.generated_tokens for output in outputs.values()]
    wait_until(lambda: pool.num_alive == 2)
    dispatcher = pool.manager._dispatcher
    killed = []

    def kill_one_that_samples():
        while not killed:
            killed.extend([one.worker for one in list(dispatcher._items.values())][:1])
        time.sleep(0.3)
        ray.kill(handles(pool)[killed[0]])

    threading.Thread(target=kill_one_that_samples, daemon=True).start()
    slow = replace(params, logits_processors=(slowly,))
    found = list(pool.generate_batch([[5], [6]], sampling_params=slow).values())
    assert killed
    assert killed[0] not in pool.manager._workers
    assert [output.generated_tokens for output in found] == expected
    assert max(largest_error(output, weights_of) for output in found) < 1e-5


def test_a_model_that_no_worker_can_load_is_its_own_error(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        RolloutPool(str(tmp_path), CONFIG, num_workers=1)
    with pytest.raises(ConfigurationError, match="num_workers=0"):
        RolloutPool(str(tmp_path), CONFIG, num_workers=0)
    with pytest.raises(ConfigurationError, match="leave it at 'auto'"):
        RolloutPool(str(tmp_path), RolloutConfig(weight_sync="shared"), num_workers=1)


@pytest.mark.parametrize(
    ("size", "resources", "message"),
    [
        (1, {"accelerators": 1}, "1 x {'accelerators': 1}, the cluster has 0 accelerators, 0 of"),
        (2, {"CPU": 6}, "2 x {'CPU': 6}, the cluster has 8 CPU, "),
    ],
)
def test_resources_that_the_cluster_lacks_are_named(checkpoint, size, resources, message):
    with pytest.raises(EngineDeadError, match=re.escape(message)) as raised:
        RolloutPool(
            checkpoint,
            replace(CONFIG, tensor_parallel_size=size),
            num_workers=1,
            resources_per_worker=resources,
            start_timeout_seconds=2.0,
        )
    assert raised.match("free. Lower resources_per_worker")


NUM_REQUESTS, NUM_VERSIONS, NUM_KILLS, CHUNK = 5040, 20, 2, 60

# Ray keeps a pool of shared memory, whose pages count once they were used.
MAX_GROWTH = 32 << 20


def prompt_of(number):
    return [5 + number % 7, 6, number % 251]


class Sampling:
    """Two threads that sample all requests, chunk by chunk."""

    def __init__(self, pool):
        self.pool, self.outputs, self.failures = pool, {}, []
        self.threads = [
            threading.Thread(target=self.run, args=(first,), daemon=True) for first in (0, CHUNK)
        ]
        for thread in self.threads:
            thread.start()

    def run(self, first):
        chance = random.Random(first)
        try:
            for start in range(first, NUM_REQUESTS, 2 * CHUNK):
                prompts = [prompt_of(number) for number in range(start, start + CHUNK)]
                lengths = [chance.randint(1, 24) for _ in prompts]
                found = self.pool.generate_batch(prompts, max_new_tokens=lengths)
                for length, output in zip(lengths, found.values(), strict=True):
                    assert 1 <= len(output.generated_tokens) <= length
                assert not found.keys() & self.outputs.keys()
                self.outputs.update(found)
        except BaseException as error:
            self.failures.append(error)
            raise

    def wait_for(self, count):
        wait_until(lambda: self.failures or len(self.outputs) >= count)
        assert not self.failures


def resident(process_ids):
    """Resident bytes of this process and of workers."""
    return {pid: psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *process_ids)}


# Minutes; a test of an attached pool kills a worker by day.
@pytest.mark.nightly
def test_nothing_is_lost_while_workers_die_and_weights_change(checkpoint):
    """Three workers, 20 versions, two workers killed at random moments and one added."""
    chance = random.Random(0)
    kills = chance.sample(range(1, NUM_VERSIONS), NUM_KILLS)
    with RolloutPool(checkpoint, CONFIG, num_workers=3, timeout_seconds=WAIT) as pool:
        wait_until(lambda: pool.num_alive == 3)
        processes = set(process_ids(pool))
        sampling = Sampling(pool)
        for version in range(1, NUM_VERSIONS + 1):
            sampling.wait_for(version * (NUM_REQUESTS - 4 * CHUNK) // NUM_VERSIONS)
            if version in kills:
                ray.kill(chance.choice(list(handles(pool).values())))
            if version == NUM_VERSIONS // 2:
                pool.resize(4)
            processes |= set(process_ids(pool))
            pool.sync_weights(weights_of(version).state_dict())
            if version == NUM_VERSIONS // 2 + 1:
                before = resident(process_ids(pool))
        sampling.wait_for(NUM_REQUESTS)
        wait_until(lambda: pool.num_alive == 4)
        processes |= set(process_ids(pool))
        growth = {
            pid: size - before[pid]
            for pid, size in resident(process_ids(pool)).items()
            if pid in before
        }
        assert len(growth) >= 2
        assert max(growth.values()) < MAX_GROWTH, growth
        dispatcher = pool.manager._dispatcher
        assert (len(dispatcher), dispatcher._items, dispatcher._sequences) == (0, {}, {})
    require_exact(sampling.outputs.values())
    assert len(processes) == 4 + NUM_KILLS
    assert not [process for process in processes if psutil.pid_exists(process)]


def require_exact(outputs):
    prompts = Counter(tuple(output.prompt_ids) for output in outputs)
    assert prompts == Counter(tuple(prompt_of(number)) for number in range(NUM_REQUESTS))
    models = {version: weights_of(version) for version in range(NUM_VERSIONS + 1)}
    seen = Counter()
    for output in outputs:
        versions = [version for version, _ in output.policy_versions]
        assert versions == sorted(set(versions))
        seen.update(versions)
        assert largest_error(output, models.__getitem__) < 1e-5
    assert len(seen) > NUM_VERSIONS // 2


@pytest.fixture(scope="module")
def split_pool(checkpoint):
    config = replace(CONFIG, tensor_parallel_size=2)
    with RolloutPool(
        checkpoint, config, num_workers=2, tokenizer=char_tokenizer(), weight_deltas=True
    ) as made:
        wait_until(lambda: made.num_alive == 2)
        yield made


def test_split_workers_sample_what_a_generator_samples_and_take_deltas(split_pool):
    prompts = [[5, 6, 7 + i % 9] for i in range(12)]
    params = SamplingParams(max_new_tokens=24, temperature=1.0)
    model = weights_of(0)
    reports = []
    for version in range(3):
        with RolloutGenerator(model, CONFIG) as generator:
            expected = generator.generate_batch(prompts, sampling_params=params)
        outputs = split_pool.generate_batch(prompts, sampling_params=params)
        for output, alone in zip(outputs.values(), expected.values(), strict=True):
            assert output.policy_versions == [(version, len(output.generated_tokens))]
            if version == 0:
                # Later batches of a pool have seeds of their own.
                assert output.generated_tokens == alone.generated_tokens
            assert largest_error(output, lambda _: model) < 1e-5
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[::7].mul_(0.9)
        reports.append(split_pool.sync_weights(model))
    whole, *deltas = [report.bytes_copied for report in reports]
    assert max(deltas) < whole / 3


def test_a_split_worker_ends_and_is_replaced_as_a_whole(split_pool):
    """The process that is killed leads, or follows."""
    for rank in (0, 1):
        victim = next(iter(split_pool.manager._workers.values()))
        shards = {process.pid for process in split_pool._cluster._processes}
        assert len(shards) == 4
        with ThreadPoolExecutor() as threads:
            prompts = [[5, 6, 7 + i % 9] for i in range(24)]
            sampled = threads.submit(split_pool.generate_batch, prompts, max_new_tokens=60)
            wait_until(lambda: split_pool.manager.status().requests_running > 0)
            ray.kill(victim.handle.actors[rank])
            outputs = sampled.result()
        assert all(output.is_finished() for output in outputs.values())
        assert victim.number not in split_pool.manager._workers
        wait_until(lambda: split_pool.num_alive == 2)
        # Both of its processes ended, and no other one.
        now = {process.pid for process in split_pool._cluster._processes}
        assert len(now) == 4
        assert len(shards & now) == 2


def test_heads_that_a_split_does_not_divide_are_named(checkpoint):
    config = replace(CONFIG, tensor_parallel_size=3)
    with pytest.raises(ConfigurationError, match=r"does not divide the model's 2 key and value"):
        RolloutPool(checkpoint, config, num_workers=1, resources_per_worker={"CPU": 0.1})


def test_adapters_travel_alone_and_run_unmerged(checkpoint):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny_model(), lora).eval()
    with RolloutPool(checkpoint, CONFIG, num_workers=1, peft_config=lora) as pool:
        for version in (1, 2):
            report = pool.sync_weights(model)
            trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            assert report.bytes_copied == trained
            outputs = pool.generate_batch([[5, 6, i] for i in range(8)], max_new_tokens=12)
            for output in outputs.values():
                assert output.policy_versions == [(version, len(output.generated_tokens))]
                assert largest_error(output, lambda _: model) < 1e-5
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9 if parameter.requires_grad else 1.0)
        # A worker that starts late gets them too.
        (process,) = process_ids(pool)
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: process_ids(pool) not in ([], [process]))
        (output,) = pool.generate_batch([[5, 6]], max_new_tokens=12).values()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(0.9 if parameter.requires_grad else 1.0)
        assert largest_error(output, lambda _: model) < 1e-5


def test_another_base_or_scaling_than_the_workers_is_refused(checkpoint):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    with RolloutPool(checkpoint, CONFIG, num_workers=1, peft_config=lora) as pool:
        stronger = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"])
        with pytest.raises(WeightSyncError, match="2 frozen weights or adapter scalings"):
            pool.sync_weights(get_peft_model(tiny_model(), stronger))
        other = tiny_model()
        torch.nn.init.constant_(other.model.norm.weight, 1.5)
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
            pool.sync_weights(get_peft_model(other, lora))
        with pytest.raises(WeightSyncError, match=r"v_proj\.weight"):
            pool.sync_weights(get_peft_model(tiny_model(), replace_targets(lora)))
        assert pool.sync_weights(get_peft_model(tiny_model(), lora)).policy_version == 1
    with pytest.raises(ConfigurationError, match="peft_config='lora' is not a PEFT config"):
        RolloutPool(checkpoint, CONFIG, num_workers=1, peft_config="lora")
    with pytest.raises(ConfigurationError, match="leave peft_config out"):
        RolloutPool(
            checkpoint, replace(CONFIG, tensor_parallel_size=2), num_workers=1, peft_config=lora
        )


def replace_targets(lora):
    return LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules=["q_proj", "v_proj"])
