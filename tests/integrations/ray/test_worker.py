"""A worker samples items and takes weights."""

import pickle
import threading
import time
from dataclasses import replace

import pytest
from tiny import largest_difference, plain_logprobs, tiny_model

from cb_rollout import RequestStatus, RolloutConfig, SamplingParams, WeightSyncError
from cb_rollout.config.enums import InFlight
from cb_rollout.integrations.ray.weight_update import (
    WeightUpdate,
    bytes_of,
    new_values,
    worker_tensors,
)
from cb_rollout.integrations.ray.worker import PoolWorker, WorkItem

CONFIG = RolloutConfig(num_blocks=64, max_requests_per_batch=8, seed=0)


@pytest.fixture
def worker(tmp_path, capfd):
    tiny_model().save_pretrained(tmp_path)
    made = PoolWorker(str(tmp_path), CONFIG, None)
    yield made
    made.close()


def item(item_id="a", num_tokens=6, seed=3, **options):
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return WorkItem(item_id, [5, 6, 7], params, seed, 0, **{"records_timestamps": False} | options)


def outputs_of(worker, *items):
    worker.submit(items)
    found = {}
    while len(found) < len(items):
        outputs, _ = worker.report(10.0)
        assert outputs, "nothing ended in 10 s"
        found |= {output.request_id: output for output in outputs}
    return [found[one.item_id] for one in items]


def update_of(worker, model, version):
    expected = worker.description().tensors
    sent = [
        (tensor, bytes_of(value, tensor.dtype)) for tensor, value in new_values(model, expected)
    ]
    tensors, arrays = zip(*sent, strict=True)
    return WeightUpdate(version, tensors), arrays


def test_a_description_travels_to_the_pools_process_without_the_engine(worker):
    described = worker.description()
    received = pickle.loads(pickle.dumps(described))
    assert received.limits.vocab_size() == described.limits.vocab_size()
    assert received.limits.max_cached_tokens() == described.limits.max_cached_tokens()
    assert list(received.limits.adapters()) == []


class Gate:
    """A logits processor that holds the engine before a token until the gate opens."""

    def __init__(self, is_open, num_tokens=3):
        self.is_open, self.length = is_open, 3 + num_tokens
        self.reached = threading.Event()

    def __call__(self, input_ids, scores):
        while input_ids.shape[-1] == self.length and not self.is_open():
            self.reached.set()
            time.sleep(0.001)
        return scores


def gated(gate, num_tokens):
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, logits_processors=(gate,))
    return replace(item(), params=params)


def last_outputs(worker):
    outputs = []
    while not outputs:
        outputs, _ = worker.report(10.0)
    return outputs


def test_an_item_that_is_cancelled_before_it_arrives_ends_early(worker):
    worker.cancel(["a"])
    worker.submit([item("a", num_tokens=40), item("b")])
    found = {}
    while len(found) < 2:
        found |= {output.request_id: output for output in last_outputs(worker)}
    assert found["a"].status is RequestStatus.CANCELLED
    assert len(found["a"].generated_tokens) < 40
    assert found["b"].status is RequestStatus.FINISHED
    (output,) = outputs_of(worker, item("a"))
    assert output.status is RequestStatus.FINISHED


def test_times_are_seconds_since_the_item_arrived(worker):
    (output,) = outputs_of(worker, item(records_timestamps=True))
    assert output.created_time == 0.0
    assert len(output.timestamps) == 6
    admitted, ended = output.lifespan
    assert 0 <= admitted <= output.timestamps[0] <= output.timestamps[-1] <= ended


def test_a_cancelled_item_delivers_the_tokens_it_had(worker):
    opened = threading.Event()
    gate = Gate(opened.is_set)
    worker.submit([gated(gate, 60)])
    assert gate.reached.wait(20)
    worker.cancel(["a"])
    opened.set()
    (output,) = last_outputs(worker)
    assert output.status is RequestStatus.CANCELLED
    assert 3 <= len(output.generated_tokens) < 60
    assert largest_difference(tiny_model(), [output]) < 1e-5


def test_an_item_that_is_refused_here_is_reported_as_failed(worker):
    (output,) = outputs_of(worker, item(num_tokens=5000))
    assert output.status is RequestStatus.FAILED
    assert "at most" in output.error


def test_new_weights_are_sampled_from_with_their_version(worker):
    model = tiny_model(seed=1)
    worker.update(*update_of(worker, model, 7), InFlight.RECOMPUTE)
    (output,) = outputs_of(worker, item())
    assert output.policy_versions == [(7, 6)]
    assert largest_difference(model, [output]) < 1e-5


def test_weights_of_another_model_change_nothing(worker):
    other = tiny_model(seed=1, vocab_size=300)
    sent = [(t, bytes_of(value, t.dtype)) for t, value in new_values(other, worker_tensors(other))]
    tensors, arrays = zip(*sent, strict=True)
    with pytest.raises(WeightSyncError, match="of another model"):
        worker.update(WeightUpdate(1, tensors), arrays, InFlight.RECOMPUTE)
    (output,) = outputs_of(worker, item())
    assert output.policy_versions == [(0, 6)]
    expected = plain_logprobs(tiny_model(), output.prompt_ids, output.generated_tokens)
    assert output.logprobs == pytest.approx(expected, abs=1e-5)


def test_sequences_in_flight_carry_the_version_of_each_token(worker):
    model = tiny_model(seed=1)
    controller = worker._manager.loop.pauses
    gate = Gate(lambda: controller.is_paused)
    worker.submit([gated(gate, 8)])
    assert gate.reached.wait(20)
    worker.update(*update_of(worker, model, 4), InFlight.RECOMPUTE)
    (output,) = last_outputs(worker)
    assert output.policy_versions == [(0, 4), (4, 4)]
    for weights, part in ((tiny_model(), slice(0, 4)), (model, slice(4, None))):
        expected = plain_logprobs(weights, output.prompt_ids, output.generated_tokens)
        assert output.logprobs[part] == pytest.approx(expected[part], abs=1e-5)
