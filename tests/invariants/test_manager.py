"""The manager under the reference's method names."""

import asyncio
import threading

import pytest
from tiny import plain_logprobs, tiny_model

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
        with pytest.raises(RolloutError, match=r"leave pause\(\) first"):
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
    with manager.pause(), pytest.raises(RolloutError, match=r"cannot end; leave pause\(\) first"):
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
    with pytest.raises(RolloutError, match=r"not running, .* start\(\) it"), alone.pause():
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
    assert {output.request_id for output in taken.values()} == set(ids)


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
    with pytest.raises(RolloutError, match=r"none runs in this thread; .* request_id_iter\(\)"):
        manager.register_result_handler("mine", print)
    with pytest.raises(InvalidRequestError, match="has ended and was delivered"):
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
    with pytest.raises(ConfigurationError, match="rollout_dtype='float32' needs other weights"):
        ContinuousBatchingManager(
            tiny_model().bfloat16(), None, RolloutConfig(rollout_dtype="float32")
        )
