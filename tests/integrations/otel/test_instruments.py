"""The metrics: names of the conventions and of transformers, values, and what they count."""

import pytest
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from telemetry import observed
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.integrations.otel import instruments
from cb_rollout.metrics import observer as observation
from cb_rollout.metrics.live_metrics import exposition

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=0)
PROMPTS = [[5, 6, 7], [8, 9], [8, 9]]

# Of ContinuousBatchProcessorMetrics (transformers 5.0, utils/metrics.py), with its units.
REFERENCE = {
    "ttft_milliseconds": "ms",
    "request_latency_milliseconds": "ms",
    "active_requests_count": "requests",
    "waiting_requests_count": "requests",
    "prefill_tokens_processed": "tokens",
    "decode_tokens_processed": "tokens",
    "batch_fill_percentage": "percent",
    "kv_cache_memory_bytes": "bytes",
    "kv_cache_free_memory_bytes": "bytes",
}


@pytest.fixture
def telemetry():
    with observed() as telemetry:
        yield telemetry


@pytest.fixture
def generator():
    config = RolloutConfig(seed=0, block_size=8, max_batch_tokens=64)
    with RolloutGenerator(tiny_model(), config) as generator:
        yield generator


def value(telemetry, name):
    (point,) = telemetry.points(name)
    return point.value


def test_the_names_are_those_of_the_conventions_and_of_transformers(generator, telemetry):
    generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    units = telemetry.units()
    named = vars(gen_ai_metrics)
    assert named["GEN_AI_SERVER_TIME_TO_FIRST_TOKEN"] == instruments.TIME_TO_FIRST_TOKEN
    assert named["GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN"] == instruments.TIME_PER_OUTPUT_TOKEN
    assert named["GEN_AI_SERVER_REQUEST_DURATION"] == instruments.REQUEST_DURATION
    assert named["GEN_AI_CLIENT_TOKEN_USAGE"] == instruments.TOKEN_USAGE
    assert {name: units.get(name) for name in REFERENCE} == REFERENCE
    of_requests = (instruments.TIME_TO_FIRST_TOKEN, instruments.TIME_PER_OUTPUT_TOKEN)
    assert {units[name] for name in (*of_requests, instruments.REQUEST_DURATION)} == {"s"}
    assert units[instruments.TOKEN_USAGE] == "{token}"


def test_prometheus_names_the_figures_as_metrics_does(generator, telemetry):
    generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    generator.sync_weights()
    generator.sleep()
    manager = generator.manager
    text = exposition(manager.counters, manager.status(), manager.durations)
    named = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    ours = set()
    for name, unit in telemetry.units().items():
        if name.startswith("cb_rollout."):
            flat = name.replace(".", "_")
            ours.add(f"{flat}_seconds" if unit == "s" else flat)
    flat_names = {name.removesuffix("_total") for name in named}
    unused = {
        f"cb_rollout_{name}"
        for name in ("preemptions", "images_encoded", "offloaded_sequences", "restored_sequences")
    }
    assert flat_names - ours == unused
    assert ours - flat_names == {"cb_rollout_batch_size", "cb_rollout_batch_kv_blocks"}


def test_counters_are_the_engines(generator, telemetry):
    for _ in range(2):
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    counters = generator.manager.counters
    for name in ("tokens_generated", "prefill_tokens", "prefill_forwards", "decode_forwards"):
        assert value(telemetry, f"cb_rollout.{name}") == getattr(counters, name)
    assert value(telemetry, "cb_rollout.requests_finished") == 6
    assert value(telemetry, "prefill_tokens_processed") == counters.prefill_tokens
    # The first token of each is of its prefill.
    assert value(telemetry, "decode_tokens_processed") == counters.tokens_generated - 6


def test_histograms_have_a_value_for_each_sequence_or_step(generator, telemetry):
    generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    counters = generator.manager.counters
    for name in (
        *("gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"),
        *("gen_ai.server.request.duration", "ttft_milliseconds", "request_latency_milliseconds"),
        *("cb_rollout.queue", "cb_rollout.prefill", "cb_rollout.decode"),
    ):
        (point,) = telemetry.points(name)
        assert point.count == 3, name
    (seconds,) = telemetry.points("gen_ai.server.time_to_first_token")
    (milliseconds,) = telemetry.points("ttft_milliseconds")
    assert milliseconds.sum == pytest.approx(1000 * seconds.sum)
    usage = {
        point.attributes["gen_ai.token.type"]: (point.count, point.sum)
        for point in telemetry.points("gen_ai.client.token.usage")
    }
    assert usage == {"input": (3, 7), "output": (3, 18)}
    sizes = {x.attributes["cb_rollout.step"]: x for x in telemetry.points("cb_rollout.batch_size")}
    assert sizes["prefill"].sum == 2
    assert sizes["decode"].count == counters.decode_forwards
    assert sizes["decode"].sum == counters.tokens_generated - 3
    blocks = telemetry.points("cb_rollout.batch_kv_blocks")
    assert max(point.max for point in blocks) == counters.kv_blocks_peak
    (fill,) = telemetry.points("batch_fill_percentage")
    assert fill.count == counters.num_forwards
    assert fill.sum == pytest.approx(100 * (5 + 15) / 64)


def test_gauges_are_the_sums_of_the_engines_now(generator, telemetry):
    manager = generator.manager
    manager.start()
    others = {engine for engine in observation.engines() if engine is not manager.engine}
    assert all(not engine.status().requests_running for engine in others)
    with manager.pause():
        request_id = manager.add_request([5, 6, 7], sampling_params=PARAMS)
        manager.engine.add(manager.loop._inbox.popleft())
        assert value(telemetry, "waiting_requests_count") == 1
        assert value(telemetry, "active_requests_count") == 0
    assert manager.get_result(request_id).is_finished()
    assert value(telemetry, "waiting_requests_count") == 0
    assert value(telemetry, "kv_cache_memory_bytes") == 0
    free = sum(e.status().kv_blocks * e.bytes_per_block for e in observation.engines())
    assert value(telemetry, "kv_cache_free_memory_bytes") == free
    plan = generator.memory_plan()
    assert manager.engine.bytes_per_block == plan.bytes_per_block


def test_an_engine_that_is_gone_is_read_no_more():
    generator = RolloutGenerator(tiny_model(), RolloutConfig(seed=0))
    engine = generator.manager.engine
    assert engine in observation.engines()
    number = id(engine)
    generator.close()
    del generator, engine
    import gc

    gc.collect()
    assert number not in {id(engine) for engine in observation.engines()}


def test_a_failed_sequence_has_its_error_and_counts_no_latency(generator, telemetry):
    def broken(input_ids, scores):
        raise ValueError("broken")

    params = SamplingParams(max_new_tokens=6, logits_processors=(broken,))
    generator.generate_batch([[5, 6]], sampling_params=params, on_error="return")
    (point,) = telemetry.points("gen_ai.server.request.duration")
    assert point.attributes["error.type"]
    assert telemetry.points("request_latency_milliseconds") == []
    assert telemetry.points("gen_ai.server.time_per_output_token") == []


def test_a_value_of_a_sequence_leads_to_its_trace(generator, telemetry):
    generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    (rollout,) = telemetry.spans("rollout")
    spans = {span.context.span_id for span in telemetry.spans("request")}
    (point,) = telemetry.points("gen_ai.server.request.duration")
    assert point.exemplars
    for exemplar in point.exemplars:
        assert exemplar.trace_id == rollout.context.trace_id
        assert exemplar.span_id in spans
