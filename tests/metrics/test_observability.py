import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from served import client, served
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.integrations.otel import export
from cb_rollout.metrics.exposition import exposition
from cb_rollout.metrics.observers import Histogram, Observer, Recorder
from cb_rollout.metrics.registry import DISTRIBUTIONS, LIVE_METRICS, MetricKind

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"
DASHBOARD = DOCUMENT.with_name("grafana-dashboard.json")
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=0)
PROMPTS = [[5, 6, 7], [8, 9], [8, 9]]


@pytest.fixture
def generator():
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0, block_size=8)) as generator:
        yield generator


@contextmanager
def collector():
    """A receiver of OTLP over HTTP; yields what it received, by path."""
    received = {"/v1/traces": [], "/v1/metrics": []}

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received[self.path].append(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def spans_of(received):
    return [
        span
        for body in received["/v1/traces"]
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def test_a_collector_sees_a_rollout_step(generator):
    with collector() as (url, received):
        telemetry = export(generator, url, service_name="a-test")
        outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        generator.sync_weights()
        generator.sleep()
        telemetry.close()
        generator.generate_batch([[5]], sampling_params=PARAMS)
    spans = spans_of(received)
    named = {name: [s for s in spans if s.name == name] for name in {s.name for s in spans}}
    assert {name: len(found) for name, found in named.items()} == {
        "rollout": 1, "request": 3, "queue": 3, "prefill": 3, "decode": 3, "sync_weights": 1,
        "sleep": 1,
    }  # fmt: skip
    (rollout,) = named["rollout"]
    ids = set()
    for request in named["request"]:
        assert request.parent_span_id == rollout.span_id
        told = {a.key: a.value for a in request.attributes}
        ids.add(told["request_id"].string_value)
        assert told["generated_tokens"].int_value == 12
        parts = {
            s.name: s
            for s in spans
            if s.parent_span_id == request.span_id and s.trace_id == rollout.trace_id
        }
        assert set(parts) == {"queue", "prefill", "decode"}
        times = [
            request.start_time_unix_nano,
            parts["queue"].start_time_unix_nano,
            parts["queue"].end_time_unix_nano,
            parts["prefill"].end_time_unix_nano,
            parts["decode"].end_time_unix_nano,
            request.end_time_unix_nano,
        ]
        assert times == sorted(times)
        assert rollout.start_time_unix_nano <= times[0]
    assert ids == set(outputs)
    metrics = {
        metric.name: metric
        for body in received["/v1/metrics"]
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert metrics["cb_rollout.tokens_generated"].sum.data_points[0].as_int == 36
    assert metrics["cb_rollout.policy_version"].gauge.data_points[0].as_int == 1
    assert metrics["cb_rollout.queue"].histogram.data_points[0].count == 3
    assert metrics["cb_rollout.sync"].histogram.data_points[0].count == 1
    known = {f"cb_rollout.{i.name}" for i in LIVE_METRICS}
    known |= {f"cb_rollout.{d.name.removesuffix('_seconds')}" for d in DISTRIBUTIONS}
    assert set(metrics) <= known


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_served_request_joins_its_clients_trace():
    with served() as (generator, server), collector() as (url, received):
        telemetry = export(generator, url)
        openai_client = client(server)

        def ask(traceparent, **settings):
            return openai_client.completions.create(
                model="policy", prompt="a", max_tokens=2, extra_headers=traceparent, **settings
            )

        ask({"traceparent": f"00-{TRACE}-{PARENT}-01"}, n=2)
        openai_client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "a"}], max_tokens=2,
            extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}, stream=True,
        ).close()  # fmt: skip
        # Not sampled by its client; malformed; none.
        ask({"traceparent": f"00-{TRACE}-{PARENT}-00"})
        ask({"traceparent": "00-nonsense"})
        ask({})
        generator.manager.stop(timeout=60)
        telemetry.close()
    requests = [span for span in spans_of(received) if span.name == "request"]
    joined = [span for span in requests if span.trace_id.hex() == TRACE]
    assert {span.parent_span_id.hex() for span in joined} == {PARENT}
    assert len(joined) == 3
    others = [span for span in requests if span.trace_id.hex() != TRACE]
    assert [span.parent_span_id for span in others] == [b"", b""]
    assert len({span.trace_id for span in others}) == 2


def test_a_preemption_is_in_its_requests_span():
    config = RolloutConfig(seed=0, block_size=4, num_blocks=8)
    with RolloutGenerator(tiny_model(), config) as generator, collector() as (url, received):
        telemetry = export(generator, url)
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        generator.generate_batch([[5], [6], [7]], sampling_params=params)
        preemptions = generator.manager.counters.preemptions
        telemetry.close()
    assert preemptions > 0
    told = [
        a.value.int_value
        for span in spans_of(received)
        for a in span.attributes
        if a.key == "preemptions"
    ]
    assert sum(told) == preemptions


def test_prometheus_reads_every_figure(generator):
    recorder = Recorder()
    generator.manager.observers.add(recorder)
    generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    generator.sync_weights()
    text = exposition(generator.manager, recorder)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = {f"cb_rollout_{i.name}": i.kind.value for i in LIVE_METRICS}
    kinds |= {f"cb_rollout_{d.name}": "histogram" for d in DISTRIBUTIONS}
    assert {name: family.type for name, family in families.items()} == kinds
    tokens = families["cb_rollout_tokens_generated"].samples[0]
    assert (tokens.name, tokens.value) == ("cb_rollout_tokens_generated_total", 36)
    queue = {
        (s.name, s.labels.get("le")): s.value for s in families["cb_rollout_queue_seconds"].samples
    }
    assert queue["cb_rollout_queue_seconds_count", None] == 3
    assert queue["cb_rollout_queue_seconds_bucket", "+Inf"] == 3
    assert queue["cb_rollout_queue_seconds_sum", None] > 0
    buckets = [v for (name, _), v in queue.items() if name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert families["cb_rollout_policy_version"].samples[0].value == 1
    steps = families["cb_rollout_decode_step_seconds"].samples
    (count,) = [s.value for s in steps if s.name.endswith("_count")]
    assert count == generator.manager.counters.decode_forwards


def test_a_histogram_counts_up_to_and_at_its_bounds():
    histogram = Histogram()
    for value in (0.001, 0.0011, 1e9):
        histogram.record(value)
    counts, total = histogram.read()
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (1, 2, 2, 3)
    assert total == pytest.approx(1e9)


def test_an_observer_that_raises_is_dropped_and_harms_nothing(generator, caplog):
    seen = []

    class Broken(Observer):
        def submitted(self, requests):
            seen.append(len(requests))
            raise ValueError("broken")

    generator.manager.observers.add(Broken())
    for _ in range(2):
        outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        assert len(outputs) == 3
    assert seen == [3]
    assert "was removed" in caplog.text


def test_the_dashboard_draws_every_metric_and_no_other(generator):
    board = json.loads(DASHBOARD.read_text())
    drawn = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"cb_rollout_\w+", target["expr"])
    }
    text = exposition(generator.manager, Recorder())
    told = set(re.findall(r"^(cb_rollout_\w+)", text, re.MULTILINE))
    assert drawn <= told
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in told}
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in drawn} == families


def test_the_document_lists_every_name():
    text = DOCUMENT.read_text()
    assert [i.name for i in LIVE_METRICS if f"`{i.name}`" not in text] == []
    assert [d.name for d in DISTRIBUTIONS if f"`{d.name}`" not in text] == []


def test_every_name_is_one_of_a_kind():
    names = [i.name for i in LIVE_METRICS] + [d.name for d in DISTRIBUTIONS]
    assert len(names) == len(set(names))
    assert all(d.name.endswith("_seconds") for d in DISTRIBUTIONS)
    assert {i.kind for i in LIVE_METRICS} == set(MetricKind)
