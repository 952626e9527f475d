"""A worker continues what another began, and takes weights whole or not at all."""

import threading
import time
from dataclasses import replace

import pytest
from tiny import largest_difference, plain_logprobs, tiny_model

from cb_rollout import RequestStatus, RolloutConfig, SamplingParams, WeightSyncError
from cb_rollout.config.enums import InFlight
from cb_rollout.integrations.ray import worker as worker_module
from cb_rollout.integrations.ray.weight_update import WeightUpdate, packed
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
        report = worker.report(10.0)
        assert report.outputs, "nothing ended in 10 s"
        found |= {output.request_id: output for output in report.outputs}
    return [found[one.item_id] for one in items]


def update_of(worker, model, version):
    found = list(packed(model, worker.description().tensors))
    return WeightUpdate(version, [sent for sent, _ in found]), [buffer for _, buffer in found]


def test_a_sequence_goes_on_after_the_tokens_it_had_as_if_it_had_never_moved(worker):
    (whole,) = outputs_of(worker, item())
    (resumed,) = outputs_of(
        worker,
        item(
            "b",
            token_ids=whole.generated_tokens[:3],
            logprobs=whole.logprobs[:3],
            policy_versions=[(0, 3)],
        ),
    )
    assert resumed.generated_tokens == whole.generated_tokens
    assert resumed.logprobs[:3] == whole.logprobs[:3]
    assert resumed.policy_versions == [(0, 6)]
    assert largest_difference(tiny_model(), [resumed]) < 1e-5


def test_resumed_sequences_of_one_group_each_keep_their_own_tokens(worker):
    wholes = outputs_of(worker, *(item(str(seed), seed=seed) for seed in range(4)))
    resumed = outputs_of(
        worker,
        *(
            item(
                f"again {seed}",
                seed=seed,
                token_ids=whole.generated_tokens[:seed],
                logprobs=whole.logprobs[:seed],
                policy_versions=[(0, seed)] if seed else [],
            )
            for seed, whole in enumerate(wholes)
        ),
    )
    assert [o.generated_tokens for o in resumed] == [o.generated_tokens for o in wholes]


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


def last_report(worker):
    report = worker.report(10.0)
    while not report.outputs:
        report = worker.report(10.0)
    return report


def test_an_item_that_is_cancelled_before_it_arrives_is_not_sampled(worker):
    worker.cancel(["a"])
    worker.submit([item("a", num_tokens=40), item("b")])
    report = last_report(worker)
    assert [output.request_id for output in report.outputs] == ["b"]
    assert worker._manager.status().requests_running == 0
    assert [output.request_id for output in outputs_of(worker, item("a"))] == ["a"]


def test_an_item_that_would_begin_anew_reports_that_it_goes_on(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "PROGRESS_REPORT_SECONDS", 0.0)
    opened = threading.Event()
    gate = Gate(opened.is_set)
    worker.submit([replace(gated(gate, 6), records_timestamps=True)])
    assert gate.reached.wait(20)
    (progress,) = worker.report(0.0).progress
    assert (progress.item_id, progress.token_ids) == ("a", [])
    assert worker.report(0.0).progress == []
    opened.set()
    (output,) = last_report(worker).outputs
    assert len(output.generated_tokens) == len(output.timestamps) == 6
    assert output.created_time == 0.0
    assert 0 <= output.timestamps[0] <= output.timestamps[-1]


def test_progress_is_all_tokens_but_the_newest_and_each_is_reported_once(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "PROGRESS_REPORT_SECONDS", 0.0)
    opened = threading.Event()
    gate = Gate(opened.is_set)
    worker.submit([gated(gate, 6)])
    assert gate.reached.wait(20)
    (progress,) = worker.report(0.0).progress
    assert worker.report(0.0).progress == []
    opened.set()
    (output,) = last_report(worker).outputs
    assert (progress.start, progress.policy_versions) == (0, [(0, 2)])
    assert progress.token_ids == output.generated_tokens[:2]
    assert progress.logprobs == output.logprobs[:2]


def test_a_cancelled_item_is_not_reported_with_progress(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "PROGRESS_REPORT_SECONDS", 0.0)
    opened = threading.Event()
    gate = Gate(opened.is_set)
    worker.submit([gated(gate, 60)])
    assert gate.reached.wait(20)
    worker.cancel(["a"])
    assert worker.report(0.0).progress == []
    opened.set()
    assert last_report(worker).outputs[0].status is RequestStatus.CANCELLED


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


def test_refused_weights_change_nothing(worker):
    model = tiny_model(seed=1)
    update, buffers = update_of(worker, model, 1)
    damaged = [[array.copy() for array in buffer] for buffer in buffers]
    damaged[0][0][5] ^= 1
    with pytest.raises(WeightSyncError, match="checksum"):
        worker.update(update, damaged, InFlight.RECOMPUTE)
    with pytest.raises(WeightSyncError, match="cut off"):
        worker.update(update, buffers[:-1], InFlight.RECOMPUTE)
    (output,) = outputs_of(worker, item())
    assert output.policy_versions == [(0, 6)]
    expected = plain_logprobs(tiny_model(), output.prompt_ids, output.generated_tokens)
    assert output.logprobs == pytest.approx(expected, abs=1e-5)
    worker.update(update, buffers, InFlight.RECOMPUTE)
    with pytest.raises(WeightSyncError, match="version 1 came to a worker that has version 1"):
        worker.update(update, buffers, InFlight.RECOMPUTE)


def test_sequences_in_flight_carry_the_version_of_each_token(worker):
    model = tiny_model(seed=1)
    controller = worker._manager.loop.pauses
    gate = Gate(lambda: controller.is_paused)
    worker.submit([gated(gate, 8)])
    assert gate.reached.wait(20)
    worker.update(*update_of(worker, model, 4), InFlight.RECOMPUTE)
    (output,) = last_report(worker).outputs
    assert output.policy_versions == [(0, 4), (4, 4)]
    for weights, part in ((tiny_model(), slice(0, 4)), (model, slice(4, None))):
        expected = plain_logprobs(weights, output.prompt_ids, output.generated_tokens)
        assert output.logprobs[part] == pytest.approx(expected[part], abs=1e-5)
