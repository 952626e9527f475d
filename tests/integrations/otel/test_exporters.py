"""What arrives over OTLP on this machine, from a training and from a server; and the variables.

The receiver parses the messages of opentelemetry-proto. Where there is a collector, the same runs
go through it too.
"""

import importlib.util
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from otlp_receiver import attribute, receiving
from processes import IMPORTABLE, free_port
from tiny import byte_tokenizer, tiny_model
from waiting import wait_until

from cb_rollout import ConfigurationError
from cb_rollout.integrations.otel import exporters

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECONDS = 300

# Of `otelcol`, the OpenTelemetry collector.
CONFIG = """
receivers: {{otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{port}"}}}}}}}}
exporters: {{otlphttp: {{endpoint: "{endpoint}"}}}}
service:
  pipelines:
    traces: {{receivers: [otlp], exporters: [otlphttp]}}
    metrics: {{receivers: [otlp], exporters: [otlphttp]}}
"""


def collector_command(port, endpoint, folder):
    """The command of a collector that takes OTLP at a port and passes it on; None: there is none.

    CB_ROLLOUT_OTELCOL names an `otelcol`; else the package rotel has one.
    """
    if (otelcol := os.environ.get("CB_ROLLOUT_OTELCOL")) is not None:
        config = folder / "otelcol.yaml"
        config.write_text(CONFIG.format(port=port, endpoint=endpoint))
        return [otelcol, "--config", str(config)]
    found = importlib.util.find_spec("rotel")
    if found is None:
        return None
    agent = str(Path(found.origin).with_name("rotel-agent"))
    takes = ["--otlp-http-endpoint", f"127.0.0.1:{port}"]
    takes += ["--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}"]
    passes = ["--exporter", "otlp", "--otlp-exporter-endpoint", endpoint]
    return [agent, "start", *takes, *passes, "--otlp-exporter-protocol", "http"]


HAS_COLLECTOR = "CB_ROLLOUT_OTELCOL" in os.environ or importlib.util.find_spec("rotel") is not None
WHY = "no collector: pip install --no-deps rotel==0.0.1a15, or set CB_ROLLOUT_OTELCOL"
WAYS = [
    "receiver",
    pytest.param("collector", marks=pytest.mark.skipif(not HAS_COLLECTOR, reason=WHY)),
]


def accepts(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def collecting(way, folder):
    """Yield what is received, and the endpoint to export to."""
    with receiving() as received:
        if way == "receiver":
            yield received, received.endpoint
            return
        port = free_port()
        process = subprocess.Popen(collector_command(port, received.endpoint, folder))
        try:
            wait_until(lambda: accepts(port))
            yield received, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(SECONDS)


PATHS = os.environ | IMPORTABLE


def environment(endpoint, **more):
    return PATHS | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} | more


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_collector_gets_the_tree_of_a_grpo_step_with_tools(tmp_path, way):
    script = Path(__file__).with_name("traced_training.py")
    with collecting(way, tmp_path) as (received, endpoint):
        command = [sys.executable, str(script), str(tmp_path / "run")]
        done = subprocess.run(
            command, env=environment(endpoint), capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stderr
        wait_until(lambda: received.spans("step") and received.spans("request"), SECONDS)
        wait_until(lambda: "gen_ai.server.time_to_first_token" in received.metrics(), SECONDS)
    assert received.faults == []
    assert received.services() == {"cb_rollout"}
    (step,) = received.spans("step")
    rollouts = received.spans("rollout")
    assert len(rollouts) > 1
    parts = (*rollouts, *received.spans("sync"), *received.spans("loss"), *received.spans("guard"))
    assert {span.parent_span_id for span in parts} == {step.span_id}
    calls = received.spans("execute_tool double")
    assert calls
    assert {call.parent_span_id for call in calls} == {step.span_id}
    assert max(call.end_time_unix_nano for call in calls) <= min(
        loss.start_time_unix_nano for loss in received.spans("loss")
    )
    ids = {rollout.span_id for rollout in rollouts}
    requests = received.spans("request")
    assert {request.parent_span_id for request in requests} == ids
    assert {span.trace_id for span in received.spans()} == {step.trace_id}
    assert len({attribute(span, "cb_rollout.request_id") for span in requests}) == len(requests)
    expected = {"ttft_milliseconds", "cb_rollout.queue", "cb_rollout.tokens_generated"}
    assert expected <= received.metrics()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_server_exports_what_its_callers_trace(tmp_path, way):
    checkpoint = tmp_path / "tiny"
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(checkpoint)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(checkpoint)
    serve = [sys.executable, "-m", "cb_rollout", "serve", str(checkpoint), "--port", "0", "--otel"]
    with collecting(way, tmp_path) as (received, endpoint):
        environ = environment(endpoint, OTEL_SERVICE_NAME="mine")
        with subprocess.Popen(serve, env=environ, stdout=subprocess.PIPE, text=True) as process:
            try:
                base_url = process.stdout.readline().split()[-1]
                with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
                    client.completions.create(
                        model="tiny",
                        prompt="hello",
                        max_tokens=4,
                        extra_headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"},
                    )
                process.terminate()
                assert process.wait(SECONDS) == 0
            finally:
                process.kill()
        wait_until(lambda: received.spans("request"), SECONDS)
    (request,) = received.spans("request")
    assert request.trace_id.hex() == TRACE_ID
    # FastAPI 0.165 makes spans of its own between the two, where there is a provider.
    parents = {span.span_id: span.parent_span_id for span in received.spans()}
    parent = request.parent_span_id
    while parent in parents:
        parent = parents[parent]
    assert parent.hex() == SPAN_ID
    assert attribute(request, "gen_ai.request.model") == str(checkpoint)
    assert received.services() == {"mine"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER=zipkin is neither otlp nor none"),
        ("OTEL_METRICS_EXPORTER", "prometheus", "OTEL_METRICS_EXPORTER=prometheus is neither"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc"),
    ],
)
def test_what_the_set_up_cannot_do_is_refused(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=said):
        exporters.export()


def test_the_protocol_of_a_signal_is_asked_before_the_common_one(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf")
    assert exporters._is_exported("METRICS")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not exporters._is_exported("TRACES")


def test_without_the_extra_the_error_names_it():
    code = "import sys; sys.modules['opentelemetry'] = None; import cb_rollout.integrations.otel"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=PATHS
    )
    assert "ConfigurationError: traces need opentelemetry" in done.stderr
    assert "pip install 'cb_rollout[otel]'" in done.stderr
