"""The manager under the reference's method names."""

import asyncio
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tiny import plain_logprobs, tiny_model
from transformers import GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from cb_rollout import (
    ConfigurationError,
    ContinuousBatchingManager,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestStatus,
    RolloutConfig,
    RolloutError,
    RolloutGenerator,
    SamplingParams,
)
from cb_rollout.types import CancelResult

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
CHILDREN = ("__child#0", "__child#1")
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)


@pytest.fixture
def manager():
    manager = ContinuousBatchingManager(tiny_model(), None, RolloutConfig(max_queue_size=64))
    manager.start()
    yield manager
    if manager.is_running():
        manager.stop(timeout=0)


def test_requests_are_served_and_iteration_ends(manager):
    ids = manager.add_requests([[5, 6], [7, 8], [5, 6]], sampling_params=PARAMS)
    single = manager.add_request([9], request_id="mine", max_new_tokens=3, eos_token_id=-1)
    outputs = {output.request_id: output for output in manager}
    assert set(outputs) == {*ids, "mine"}
    assert single == "mine"
    assert len(outputs["mine"].generated_tokens) == 3
    for request_id in ids:
        output = outputs[request_id]
        expected = plain_logprobs(manager.model, output.prompt_ids, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_request_takes_fields_of_its_own_as_keywords(manager):
    wild = {"max_new_tokens": 8, "do_sample": True, "temperature": 50.0, "seed": 1}
    greedy = manager.add_request([5, 6], max_new_tokens=8, eos_token_id=-1)
    sampled, again = manager.add_requests([[5, 6], [5, 6]], ignore_eos=True, **wild)
    only_top = manager.add_request([5, 6], ignore_eos=True, top_k=1, **wild)
    tokens = {output.request_id: output.generated_tokens for output in manager}
    assert tokens[sampled] == tokens[again] != tokens[greedy] == tokens[only_top]
    with pytest.raises(InvalidRequestError, match="'temperatures'; did you mean 'temperature'"):
        manager.add_request([5, 6], temperatures=0.5)


def several(num_return_sequences, **settings):
    return GenerationConfig(
        num_return_sequences=num_return_sequences, max_new_tokens=6, eos_token_id=-1, **settings
    )


def managed(generation_config, config=None, **arguments):
    manager = ContinuousBatchingManager(tiny_model(), generation_config, config, **arguments)
    manager.start()
    return manager


def test_a_request_is_as_many_sequences_as_the_generation_config_says():
    manager = managed(several(3, do_sample=True))
    assert manager.num_return_sequences == 3
    mine = manager.add_request([5, 6], request_id="mine", streaming=True)
    others = manager.add_requests([[7], [8, 9]])
    assert [mine, *others] == ["mine", "req_0", "req_1"]
    outputs = {output.request_id: output for output in manager if output.is_finished()}
    ids = [f"{first}{end}" for first in (mine, *others) for end in ("", *CHILDREN)]
    assert sorted(outputs) == sorted(ids)
    for first in (mine, *others):
        tokens = [outputs[f"{first}{end}"].generated_tokens for end in ("", *CHILDREN)]
        assert len(set(map(tuple, tokens))) == 3
    for output in outputs.values():
        expected = plain_logprobs(manager.model, output.prompt_ids, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)
    manager.destroy()
    assert not manager.is_running()


def test_several_sequences_of_a_greedy_request_are_equal_which_is_warned_of():
    manager = managed(several(2, do_sample=True))
    with pytest.warns(UserWarning, match="makes all num_return_sequences=2") as caught:
        manager.add_request([5, 6], do_sample=False)
    assert caught[0].filename == __file__
    first, second = manager
    assert first.generated_tokens == second.generated_tokens
    manager.set_generation_config(several(1))
    manager.add_request([5, 6])
    assert len(list(manager)) == 1
    with pytest.raises(InvalidRequestError, match=r"num_return_sequences=0 is not a whole number"):
        manager.set_generation_config(SimpleNamespace(num_return_sequences=0))
    manager.destroy()


def test_the_model_s_own_generation_config_says_it_too():
    model = tiny_model()
    model.generation_config.update(num_return_sequences=2, do_sample=True)
    manager = ContinuousBatchingManager(model)
    assert manager.generation_config is model.generation_config
    assert manager.num_return_sequences == 2


def test_no_more_requests_run_together_than_hinted():
    hints = WorkloadHints(max_prompt_length=2, max_generated_length=6, num_requests=2)
    manager = managed(several(1), workload_hints=hints)
    manager.add_requests([[5, 6]] * 5)
    assert len(list(manager)) == 5
    assert manager.continuous_batching_config.max_requests_per_batch == 2
    assert manager.counters.decode_forwards >= 15
    manager.destroy()
    config = RolloutConfig(max_requests_per_batch=3)
    for hinted in (WorkloadHints(), WorkloadHints(num_requests=9)):
        manager = ContinuousBatchingManager(tiny_model(), None, config, hinted)
        assert manager.continuous_batching_config.max_requests_per_batch == 3
    many = ContinuousBatchingManager(tiny_model(), workload_hints=WorkloadHints(num_requests=9999))
    assert many.continuous_batching_config.max_requests_per_batch == 256


def test_a_config_is_read_with_the_sizes_that_were_chosen():
    manager = ContinuousBatchingManager(tiny_model(), None, RolloutConfig(block_size=16))
    config = manager.continuous_batching_config
    assert config.block_size == 16
    assert config.num_blocks == manager.memory_plan.num_blocks
    assert config.max_batch_tokens == manager.engine.limits.max_batch_tokens
    again = ContinuousBatchingManager(tiny_model(), None, config)
    assert again.continuous_batching_config == config


def test_a_manager_knows_whether_it_is_warm(manager):
    assert not manager.warmed_up
    manager.warmup(0)
    assert manager.warmed_up


def test_a_join_is_timed_from_the_stop(manager, caplog):
    caplog.set_level("INFO", logger="cb_rollout")
    manager.add_request([5, 6], sampling_params=LONG)
    manager.join(time.perf_counter(), 0.0)
    assert "still runs after a join of timeout=0.0 seconds" in caplog.text
    manager.stop(block=False, hard_stop=True)
    manager.join(time.perf_counter() - 60)
    assert re.search(r"the thread ended after 6\d\.\d\d seconds", caplog.text)
    manager.join()


def test_destroy_finishes_what_is_in_flight_and_frees_the_cache(manager):
    request_id = manager.add_request([5, 6], sampling_params=PARAMS)
    manager.destroy()
    assert manager.get_result(request_id, timeout=0).status is RequestStatus.FINISHED
    assert not manager.is_running()
    assert manager.status().kv_bytes == 0
    manager.destroy()


def test_an_output_has_the_times_at_which_it_began_to_run_and_ended(manager):
    manager.add_request(
        [5, 6], streaming=True, record_timestamps=True, max_new_tokens=2, eos_token_id=-1
    )
    first, last = manager
    began, ended = last.lifespan
    assert last.created_time <= began <= last.timestamps[0] <= last.timestamps[-1] <= ended
    assert first.lifespan == (began, -1)
    with manager.pause():
        manager.cancel_request(manager.add_request([5, 6], sampling_params=PARAMS))
    (cancelled,) = manager
    began, ended = cancelled.lifespan
    assert cancelled.created_time <= began == ended


def test_a_cancelled_request_delivers_what_it_had(manager):
    request_id = manager.add_request([5, 6], streaming=True, sampling_params=LONG)
    stream = manager.request_id_iter(request_id)
    first = next(stream)
    assert first.status is RequestStatus.DECODING
    assert manager.cancel_request(request_id) is CancelResult.LIVE
    *_, last = stream
    assert last.status is RequestStatus.CANCELLED
    assert 0 < len(last.generated_tokens) == len(last.logprobs) < 400
    assert manager.cancel_request(request_id) is CancelResult.FINISHED
    assert manager.cancel_request("nobody") is CancelResult.UNKNOWN
    assert manager.engine.num_blocks_used == 0


def test_an_id_in_use_and_a_full_queue_are_refused(manager):
    with manager.pause():
        manager.add_request([5], request_id="mine", sampling_params=PARAMS)
        with pytest.raises(InvalidRequestError, match="request_id='mine' is in use"):
            manager.add_request([5], request_id="mine", sampling_params=PARAMS)
        with pytest.raises(QueueFullError, match="max_queue_size=64"):
            manager.add_requests([[5]] * 64, sampling_params=PARAMS)
    assert manager.get_result("mine").is_finished()


def test_nothing_steps_inside_a_pause(manager):
    request_id = manager.add_request([5, 6], streaming=True, sampling_params=LONG)
    assert manager.get_result(request_id) is not None
    with manager.pause():
        before = manager.counters.tokens_generated
        assert manager.get_result("nobody", timeout=0.05) is None
        assert manager.counters.tokens_generated == before
        with pytest.raises(RolloutError, match=r"leave the pause\(\) block first"):
            manager.stop()
    manager.cancel_request(request_id)


def test_stop_finishes_what_is_in_flight_and_start_goes_on(manager):
    ids = manager.add_requests([[5, 6]] * 4, sampling_params=PARAMS)
    manager.stop(keep_for_next_session=True)
    assert not manager.is_running()
    assert all(manager.get_result(i, timeout=0).status is RequestStatus.FINISHED for i in ids)
    with pytest.raises(RolloutError, match=r"start\(\)"):
        manager.add_request([5], sampling_params=PARAMS)
    manager.start()
    request_id = manager.add_request([5], sampling_params=PARAMS)
    assert manager.get_result(request_id).is_finished()


def test_stop_with_a_timeout_cancels_the_rest(manager):
    request_id = manager.add_request([5, 6], sampling_params=LONG)
    manager.stop(timeout=0)
    assert not manager.is_running()
    assert manager.get_result(request_id, timeout=0).status is RequestStatus.CANCELLED


def test_stop_inside_ones_own_pause_is_refused_with_nothing_in_flight_too(manager):
    with (
        manager.pause(),
        pytest.raises(RolloutError, match=r"cannot end; leave the pause\(\) block first"),
    ):
        manager.stop(timeout=30)
    assert manager.is_running()


def test_a_sleeping_engine_with_nothing_in_flight_stops(manager):
    manager.sleep()
    stopping = threading.Thread(target=manager.stop)
    stopping.start()
    stopping.join(30)
    is_stuck = stopping.is_alive()
    manager.wake()
    stopping.join()
    assert not is_stuck
    assert not manager.is_running()


def test_a_pause_of_nothing_says_so(manager):
    alone = ContinuousBatchingManager(manager.model)
    with pytest.raises(RolloutError, match=r"not running, .* call start\(\)"), alone.pause():
        pass
    manager.loop.fail(ValueError("broken"))
    with pytest.raises(EngineDeadError, match="ValueError: broken"), manager.pause():
        pass
    manager.join()
    # A generator starts its own with the next rollout.
    generator = RolloutGenerator(manager.model)
    with generator.manager.pause():
        pass
    assert generator.policy_version == 1


def test_a_hard_stop_cancels_what_is_in_flight_even_asleep(manager):
    manager.sleep()
    request_id = manager.add_request([5, 6], sampling_params=LONG)
    manager.stop(hard_stop=True, timeout=30)
    manager.wake()
    assert manager.get_result(request_id, timeout=0).status is RequestStatus.CANCELLED


def test_two_threads_wait_for_their_own_results(manager):
    with manager.pause():
        ids = manager.add_requests([[5], [6], [7], [8]], sampling_params=PARAMS)
    taken = {}

    def take(mine):
        for request_id in mine:
            taken[request_id] = manager.get_result(request_id)

    threads = [threading.Thread(target=take, args=(part,)) for part in (ids[:2], ids[2:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(ids)
    for request_id, output in taken.items():
        assert output.request_id == request_id
        assert output.prompt_ids == [5 + ids.index(request_id)]


def test_a_handler_is_called_on_the_loop_with_every_output(manager):
    async def collect():
        outputs, done = [], asyncio.Event()

        def handle(output):
            outputs.append(output)
            if output.is_finished():
                done.set()

        with manager.pause():
            request_id = manager.add_request([5, 6], streaming=True, sampling_params=PARAMS)
            manager.register_result_handler(request_id, handle)
        await asyncio.wait_for(done.wait(), timeout=60)
        return outputs

    outputs = asyncio.run(collect())
    assert [len(output.generated_tokens) for output in outputs] == list(range(1, 13))
    assert outputs[-1].status is RequestStatus.FINISHED
    with pytest.raises(
        RolloutError, match=r"none is running in this thread; .* request_id_iter\(\)"
    ):
        manager.register_result_handler("mine", print)
    with pytest.raises(InvalidRequestError, match="has already ended and was delivered"):
        asyncio.run(_register_late(manager, outputs[-1].request_id))


async def _register_late(manager, request_id):
    manager.register_result_handler(request_id, print)


@pytest.mark.parametrize(
    ("settings", "who"),
    [
        ({"old_logps": "rollout"}, "attach"),
        ({"verify_every_steps": 5}, "attach"),
        ({"verify_num_sequences": 3}, "attach"),
        ({"max_logprob_drift": 0.1}, "attach"),
        ({"record_num_sequences": 1}, "attach"),
        ({"verify_weight_sync": True}, "RolloutGenerator"),
    ],
)
def test_a_manager_alone_refuses_what_it_would_ignore(settings, who):
    (name,) = settings
    with pytest.raises(ConfigurationError, match=f"{name}=.*alone.*{who}.*or leave it at"):
        ContinuousBatchingManager(tiny_model(), None, RolloutConfig(**settings))


def test_a_manager_alone_takes_what_asks_for_nothing():
    config = RolloutConfig(
        verify_every_steps=0, record_num_sequences=0, release_cache="never", weight_sync="shared"
    )
    ContinuousBatchingManager(tiny_model(), None, config)


def test_a_manager_alone_computes_in_rollout_dtype():
    config = RolloutConfig(rollout_dtype="bfloat16", weight_sync="shared", seed=0)
    outputs = []
    for manager in (
        ContinuousBatchingManager(tiny_model(), None, config),
        RolloutGenerator(tiny_model(), config).manager,
    ):
        manager.start()
        manager.add_request([5, 6], max_new_tokens=8, eos_token_id=-1)
        outputs.append(manager.get_result(timeout=60))
        manager.stop()
    alone, generators = outputs
    assert alone.logprobs == generators.logprobs
    exact = plain_logprobs(tiny_model(), [5, 6], alone.generated_tokens)
    assert max(abs(a - b) for a, b in zip(alone.logprobs, exact, strict=True)) > 1e-4
    with pytest.raises(ConfigurationError, match="rollout_dtype='float32' differs from"):
        ContinuousBatchingManager(
            tiny_model().bfloat16(), None, RolloutConfig(rollout_dtype="float32")
        )


@pytest.mark.parametrize("way", ["generator", "manager"])
def test_a_generation_config_that_is_edited_in_place_is_followed(way):
    model = tiny_model()
    own = model.generation_config
    own.update(do_sample=True, max_new_tokens=12, eos_token_id=None)
    model.config.eos_token_id = None
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        generator.generate_batch([[5, 6, 7]])
        own.update(do_sample=False, max_new_tokens=5, num_return_sequences=1)
        if way == "generator":
            (output,) = generator.generate_batch([[5, 6, 7]]).values()
        else:
            generator.wake()
            generator.manager.start()
            output = generator.manager.get_result(generator.manager.add_request([5, 6, 7]))
        assert len(output.generated_tokens) == 5
        ids = torch.tensor([[5, 6, 7]])
        expected = model.generate(ids, do_sample=False, max_new_tokens=5, eos_token_id=None)
        assert output.generated_tokens == expected[0, 3:].tolist()
        model.config.eos_token_id = output.generated_tokens[1]
        (ended,) = generator.generate_batch([[5, 6, 7]]).values()
        assert ended.generated_tokens == output.generated_tokens[:2]
