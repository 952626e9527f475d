"""The spans of requests and rollouts: their parents, names, attributes and errors."""

import threading
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace import SpanKind, StatusCode
from telemetry import observed, require_within
from tiny import tiny_model

from cb_rollout import (
    ConfigurationError,
    ContinuousBatchingManager,
    EngineDeadError,
    IncompleteRolloutError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
)
from cb_rollout.integrations import otel
from cb_rollout.metrics import observer as observation

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=0)
PROMPTS = [[5, 6, 7], [8, 9], [8, 9]]
PHASES = ("queue", "prefill", "decode", "request")


@pytest.fixture
def generator():
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0, block_size=8)) as generator:
        yield generator


@pytest.fixture
def telemetry():
    with observed() as telemetry:
        yield telemetry


def test_each_sequence_of_a_rollout_is_one_span_inside_it_with_its_phases(generator, telemetry):
    outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    (rollout,) = telemetry.spans("rollout")
    assert rollout.parent is None
    assert rollout.attributes == {
        "cb_rollout.policy_version": 0,
        "cb_rollout.sequences": 3,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 18,
    }
    requests = telemetry.spans("request")
    ids = {span.attributes["cb_rollout.request_id"]: span for span in requests}
    assert len(requests) == 3
    assert set(ids) == set(outputs)
    for span in requests:
        require_within(span, rollout)
        phases = telemetry.children(span)
        assert [phase.name for phase in phases] == ["queued", "prefill", "decode"]
        for phase in phases:
            require_within(phase, span)
        assert all(before.end_time == after.start_time for before, after in pairwise(phases))
        assert (phases[0].start_time, phases[-1].end_time) == (span.start_time, span.end_time)


def test_a_span_says_ids_settings_tokens_versions_and_the_reason_of_the_end(generator, telemetry):
    generator.sync_weights()
    generator.generate_batch([[5, 6, 7]], sampling_params=PARAMS)
    (span,) = telemetry.spans("request")
    attributes = dict(span.attributes)
    assert attributes.pop("cb_rollout.group") == "0"
    assert isinstance(attributes.pop("gen_ai.request.seed"), int)
    assert attributes == {
        "cb_rollout.policy_version": 1,
        "cb_rollout.policy_versions": (1,),
        "cb_rollout.preemptions": 0,
        "cb_rollout.request_id": "req_0",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "cb_rollout",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 6,
    }
    (event,) = span.events
    assert (event.name, event.timestamp) == ("finished", span.end_time)
    assert (span.status.status_code, span.kind) == (StatusCode.UNSET, SpanKind.INTERNAL)


def test_the_callers_span_is_the_parent_whichever_thread_steps_the_engine(telemetry):
    manager = ContinuousBatchingManager(tiny_model(), None, RolloutConfig(seed=0))
    manager.start()
    callers = {}

    def ask(name):
        with telemetry.tracer.start_as_current_span(name) as caller:
            callers[manager.add_request([5, 6, 7], sampling_params=PARAMS)] = caller

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
        thread.join()
    for _ in callers:
        manager.get_result()
    manager.stop()
    spans = telemetry.spans("request")
    parents = {span.attributes["cb_rollout.request_id"]: span.parent for span in spans}
    assert parents == {name: caller.get_span_context() for name, caller in callers.items()}


def test_a_sequence_without_a_caller_begins_a_trace(telemetry):
    manager = ContinuousBatchingManager(tiny_model(), None, RolloutConfig(seed=0))
    manager.start()
    for _ in range(2):
        manager.add_request([5, 6, 7], sampling_params=PARAMS)
        manager.get_result()
    manager.stop()
    spans = telemetry.spans("request")
    assert [span.parent for span in spans] == [None, None]
    assert len({span.context.trace_id for span in spans}) == 2


def test_a_preempted_sequence_shows_how_long_it_had_no_blocks(telemetry):
    config = RolloutConfig(seed=0, block_size=4, num_blocks=9, max_requests_per_batch=4)
    with RolloutGenerator(tiny_model(), config) as generator:
        prompts = [[i, i + 1, i + 2] for i in range(1, 5)]
        params = SamplingParams(max_new_tokens=16, ignore_eos=True, seed=0)
        generator.generate_batch(prompts, sampling_params=params)
        num = generator.manager.counters.preemptions
    assert num > 0
    assert len(telemetry.spans("request")) == 4
    spans = telemetry.spans("preempted")
    assert len(spans) == num
    by_request = {span.context.span_id: span for span in telemetry.spans("request")}
    for span in spans:
        require_within(span, by_request[span.parent.span_id])
        assert span.start_time < span.end_time
    told = [span.attributes["cb_rollout.preemptions"] for span in by_request.values()]
    assert sum(told) == num
    (point,) = telemetry.points("cb_rollout.preemptions")
    assert point.value == num


def test_a_sequence_that_is_computed_again_after_a_sync_says_so_with_both_versions(telemetry):
    manager = ContinuousBatchingManager(tiny_model(), None, RolloutConfig(seed=0))
    manager.start()
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    outputs = manager.request_id_iter(
        manager.add_request([5, 6, 7], streaming=True, sampling_params=params)
    )
    next(outputs)
    with manager.pause("recompute"):
        pass
    assert list(outputs)[-1].is_finished()
    manager.stop()
    (span,) = telemetry.spans("request")
    assert span.attributes["cb_rollout.policy_versions"] == (0, 1)
    assert span.attributes["cb_rollout.preemptions"] == 0
    (again,) = telemetry.children(span, "recomputed")
    require_within(again, span)


def test_a_cancelled_sequence_is_no_error_and_has_its_tokens(telemetry):
    manager = ContinuousBatchingManager(tiny_model(), None, RolloutConfig(seed=0))
    manager.start()
    with manager.pause():
        request_id = manager.add_request([5, 6, 7], sampling_params=PARAMS)
        manager.cancel_request(request_id)
    assert manager.get_result(request_id).finish_reason == "cancelled"
    manager.stop()
    (span,) = telemetry.spans("request")
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert span.attributes["gen_ai.usage.output_tokens"] == 0
    assert [child.name for child in telemetry.children(span)] == ["queued"]


class Raises:
    def __call__(self, input_ids, scores):
        raise ValueError("the processor is broken")


def test_a_failed_sequence_and_its_rollout_are_errors_and_its_neighbour_is_not(
    generator, telemetry
):
    broken = SamplingParams(max_new_tokens=6, seed=0, logits_processors=(Raises(),))
    with pytest.raises(IncompleteRolloutError):
        generator.generate_batch([[5, 6], [7, 8]], sampling_params=[broken, PARAMS])
    failed, fine = sorted(telemetry.spans("request"), key=lambda x: -x.status.status_code.value)
    assert failed.status.status_code is StatusCode.ERROR
    assert "the processor is broken" in failed.status.description
    assert failed.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert failed.attributes["error.type"]
    assert fine.status.status_code is StatusCode.UNSET
    (rollout,) = telemetry.spans("rollout")
    assert rollout.status.status_code is StatusCode.ERROR
    assert rollout.attributes["error.type"] == "IncompleteRolloutError"


class Dies(torch.nn.Module):
    def forward(self, *_, **__):
        raise RuntimeError("the device is gone")


def test_sequences_of_an_engine_that_dies_end_as_errors(telemetry):
    manager = ContinuousBatchingManager(tiny_model(), None, RolloutConfig(seed=0))
    manager.start()
    manager.engine.step = Dies().forward
    request_id = manager.add_request([5, 6, 7], sampling_params=PARAMS)
    with pytest.raises(EngineDeadError):
        manager.get_result(request_id)
    (span,) = telemetry.spans("request")
    assert span.status.status_code is StatusCode.ERROR
    assert "the device is gone" in span.status.description
    assert span.attributes["error.type"] == "EngineDeadError"


def test_sync_sleep_and_wake_are_spans(generator, telemetry):
    generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    generator.sync_weights("keep")
    generator.sleep()
    generator.wake()
    # Neither does anything.
    generator.sleep()
    generator.sleep()
    generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    names = [x.name for x in telemetry.spans() if x.name in ("sync", "sleep", "wake", "rollout")]
    assert names == ["rollout", "sync", "sleep", "wake", "sleep", "rollout", "wake"]
    (sync,) = telemetry.spans("sync")
    assert sync.attributes == {
        "cb_rollout.bytes_copied": 0,
        "cb_rollout.in_flight": "keep",
        "cb_rollout.policy_version": 1,
    }
    require_within(telemetry.spans("wake")[1], telemetry.spans("rollout")[1])


class Counting(observation.Observer):
    """Counts calls by their names."""

    def __init__(self, is_observing):
        self.is_observing, self.calls = is_observing, Counter()

    def submitted(self, requests):
        self.calls["submitted"] += 1

    def stepped(self, step):
        self.calls["stepped"] += 1

    def recorded(self, distribution, seconds):
        self.calls[distribution.name] += 1

    def ended(self, *_):
        self.calls["ended"] += 1


@contextmanager
def counted(is_observing):
    counting = Counting(is_observing)
    observation.observe_with(counting)
    try:
        yield counting.calls
    finally:
        observation.observe_with(observation.NOBODY)


def test_no_step_is_described_while_nobody_observes(generator):
    with counted(is_observing=False) as calls:
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    assert "stepped" not in calls
    with counted(is_observing=True) as calls:
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    assert calls["stepped"] == calls["prefill_step_seconds"] + calls["decode_step_seconds"]


@pytest.mark.parametrize("is_observing", [False, True])
def test_the_observer_is_called_for_steps_and_sequences_and_never_for_a_token(
    generator, is_observing
):
    def calls_of(prompts):
        with counted(is_observing) as calls:
            generator.generate_batch(prompts, sampling_params=PARAMS)
        return calls

    few, many = calls_of([[5, 6]]), calls_of([[5, 6]] * 8)
    # Eight sequences in as many steps have eight times the tokens.
    for name, number in few.items():
        is_of_sequences = name in ("ended", *(f"{x}_seconds" for x in PHASES))
        assert many[name] == (8 * number if is_of_sequences else number), name


def test_nothing_is_exported_once_it_is_off(generator):
    sampler = CountingSampler()
    with observed(sampler=sampler) as telemetry:
        otel.uninstrument()
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        generator.sync_weights()
        assert (sampler.names, telemetry.spans(), telemetry.units()) == ([], [], {})
    assert observation.observer() is observation.NOBODY


class CountingSampler(Sampler):
    def __init__(self):
        self.names = []

    def should_sample(self, parent_context, trace_id, name, *arguments, **named):
        self.names.append(name)
        return ALWAYS_OFF.should_sample(parent_context, trace_id, name, *arguments, **named)

    def get_description(self):
        return "counting"


def test_a_trace_that_is_not_sampled_costs_one_question_a_sequence(generator):
    sampler = CountingSampler()
    with observed(sampler=sampler) as telemetry:
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        assert telemetry.spans() == []
        assert sampler.names == ["rollout", "request", "request", "request"]
        # Metrics are of all.
        (point,) = telemetry.points("gen_ai.server.time_to_first_token")
        assert point.count == 3


class Breaks(SpanProcessor):
    def on_end(self, span):
        raise OSError("no disk")


def test_a_span_processor_that_raises_ends_the_observation_and_not_the_rollout(generator, caplog):
    with observed() as telemetry:
        telemetry.tracers.add_span_processor(Breaks())
        outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        assert all(output.is_finished() for output in outputs.values())
        assert observation.observer() is observation.NOBODY
    assert "nothing more is exported" in caplog.text


def test_other_instrumentation_keeps_its_current_span(generator, telemetry):
    with telemetry.tracer.start_as_current_span("mine") as mine:
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        assert trace.get_current_span() is mine
        broken = SamplingParams(max_new_tokens=6, logits_processors=(Raises(),))
        with pytest.raises(IncompleteRolloutError):
            generator.generate_batch([[5, 6]], sampling_params=broken)
        assert trace.get_current_span() is mine
    assert not trace.get_current_span().get_span_context().is_valid
    assert not isinstance(trace.get_tracer_provider(), type(telemetry.tracers))


@pytest.mark.parametrize("name", ["tracer_provider", "meter_provider"])
def test_what_is_no_provider_is_refused_and_the_observer_before_stays(name):
    before = observation.observer()
    method = f"get_{name.partition('_')[0]}"
    with pytest.raises(ConfigurationError, match=rf"{name} is a str, which has no {method}\(\)"):
        otel.instrument(**{name: "mine"})
    assert observation.observer() is before
