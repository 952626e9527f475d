"""The end of an export: bounded where no collector answers, and said what was lost."""

import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from otlp_receiver import receiving
from processes import IMPORTABLE, free_port

from cb_rollout.integrations.otel import exporters
from cb_rollout.integrations.otel.delivery import (
    CountedMetricExporter,
    CountedSpanExporter,
    CountedSpanProcessor,
    Delivery,
    shut_down,
)

# Far less than an export may last, and than a test may.
BRIEF = 0.05

SCRIPT = """
from cb_rollout.integrations import otel
from opentelemetry import metrics, trace
with otel.export():
    trace.get_tracer("t").start_span("lost").end()
    metrics.get_meter("m").create_counter("c").add(1)
print("closed")
"""


@pytest.fixture(autouse=True)
def patient_exporters(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100000")


@contextmanager
def silent():
    """The endpoint of a host that takes connections and answers nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def absent():
    yield f"http://127.0.0.1:{free_port()}"


def exported(endpoint, monkeypatch, num_spans=3, sampler=None):
    """An export of spans and a metric that sets no provider of the process."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    spans, measurements = CountedSpanExporter(), CountedMetricExporter()
    tracers = TracerProvider(sampler=sampler)
    tracers.add_span_processor(CountedSpanProcessor(spans))
    meters = MeterProvider(metric_readers=[PeriodicExportingMetricReader(measurements)])
    for _ in range(num_spans):
        tracers.get_tracer("t").start_span("work").end()
    meters.get_meter("m").create_counter("c").add(1)
    return exporters.Exporters([tracers, meters], [spans, measurements])


@pytest.mark.parametrize("collector", [absent, silent])
def test_a_collector_that_is_not_there_loses_what_is_named_and_does_not_hold_the_end(
    monkeypatch, collector
):
    with collector() as endpoint:
        handle = exported(endpoint, monkeypatch)
        with pytest.warns(
            UserWarning, match="were lost, because no collector accepted them"
        ) as caught:
            handle.close(timeout_seconds=BRIEF)
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"3 of 3 spans (to {endpoint}) and the last metrics (to {endpoint})")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in message
    assert "\n" not in message
    handle.close()


def test_one_signal_may_be_lost_alone(monkeypatch):
    with receiving() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{free_port()}")
        handle = exported(received.endpoint, monkeypatch)
        with pytest.warns(UserWarning, match=r"^the last metrics \(to http") as caught:
            handle.close(timeout_seconds=1.0)
        assert "spans" not in str(caught[0].message)
        assert len(received.spans("work")) == 3


def test_a_collector_that_takes_all_gets_all_and_nothing_is_said(monkeypatch):
    with receiving() as received:
        exported(received.endpoint, monkeypatch, num_spans=1500).close()
        assert len(received.spans("work")) == 1500
        assert "c" in received.metrics()


def test_spans_that_are_not_sampled_are_not_lost(monkeypatch):
    with absent() as endpoint:
        handle = exported(endpoint, monkeypatch, sampler=ALWAYS_OFF)
        with pytest.warns(UserWarning, match=r"^the last metrics") as caught:
            handle.close(timeout_seconds=BRIEF)
    assert "spans" not in str(caught[0].message)


def test_the_end_waits_as_long_as_exports_succeed():
    """The bound counts from the last success, which is long to come here."""
    order, released = [], threading.Event()

    class Provider:
        def shutdown(self):
            released.wait()
            order.append("all was sent")

    class Exporter:
        delivery = Delivery("traces")

        def shutdown(self):
            order.append("the rest is given up")

    Exporter.delivery.last_progress = time.monotonic() + 1000
    closing = threading.Thread(target=shut_down, args=([Provider()], [Exporter()], 0.0))
    closing.start()
    closing.join(BRIEF)
    released.set()
    closing.join()
    assert order == ["all was sent", "the rest is given up"]


@pytest.mark.slow
@pytest.mark.parametrize("collector", [absent, silent])
def test_a_process_without_a_collector_ends(collector):
    with collector() as endpoint:
        environ = IMPORTABLE | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environ | {"OTEL_EXPORTER_OTLP_TIMEOUT": "100000"},
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        )
    assert done.stdout == "closed\n"
    assert "1 of 1 spans" in done.stderr
