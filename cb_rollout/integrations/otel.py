"""Traces and metrics for an OpenTelemetry collector. The only file that imports opentelemetry.

Owns the spans: `rollout`, `sync_weights` and `sleep` on the thread that calls them; for each
sequence `request`, with `queue`, `prefill` and `decode` in it, under the span in which it was
submitted, or the span that a server's client names. Needs the extra `otel`: pip install
'cb_rollout[otel]'.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from cb_rollout import __version__
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.observers import Recorder
from cb_rollout.metrics.registry import (
    BUCKETS,
    DISTRIBUTIONS,
    LIVE_METRICS,
    Distribution,
    LiveMetric,
    MetricKind,
)
from cb_rollout.rollout.generator import RolloutGenerator

try:
    from opentelemetry import context, trace
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.metrics import Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"telemetry needs {error.name}: pip install 'cb_rollout[otel]'."
    ) from error

PREFIX = "cb_rollout."
MILLISECONDS = 1000


def export(
    generator: RolloutGenerator,
    endpoint: str,
    *,
    service_name: str = "cb_rollout",
    interval_seconds: float = 10.0,
) -> "Telemetry":
    """Send a generator's traces and metrics to a collector, until `close()`.

    Args:
        generator: may be attached to a trainer, or served.
        endpoint: URL of OTLP over HTTP, such as http://localhost:4318.
        service_name: name of this process at the collector.
        interval_seconds: time between two readings of the metrics.
    """
    resource = Resource.create({"service.name": service_name})
    base = endpoint.rstrip("/")
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces")))
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(f"{base}/v1/metrics"),
        export_interval_millis=interval_seconds * MILLISECONDS,
    )
    meters = MeterProvider(metric_readers=[reader], resource=resource)
    return Telemetry(generator.manager, tracers, meters)


class Telemetry(Recorder):
    """Observer of an engine that reports spans and metrics; thread-safe."""

    def __init__(
        self, manager: ContinuousBatchingManager, tracers: TracerProvider, meters: MeterProvider
    ) -> None:
        super().__init__()
        self._manager, self._tracers, self._meters = manager, tracers, meters
        self._tracer = tracers.get_tracer("cb_rollout", __version__)
        self._wall_clock_ns = time.time_ns() - time.perf_counter_ns()
        self._lock = threading.Lock()
        self._asked_in: dict[str, context.Context] = {}
        meter = meters.get_meter("cb_rollout", __version__)
        for instrument in LIVE_METRICS:
            kind = "counter" if instrument.kind is MetricKind.COUNTER else "gauge"
            create: Any = getattr(meter, f"create_observable_{kind}")
            observe = partial(_observed, instrument, manager)
            create(f"{PREFIX}{instrument.name}", [observe], description=instrument.help)
        self._histograms = {
            distribution.name: meter.create_histogram(
                f"{PREFIX}{distribution.name.removesuffix('_seconds')}",
                unit="s",
                description=distribution.help,
                explicit_bucket_boundaries_advisory=BUCKETS,
            )
            for distribution in DISTRIBUTIONS
        }
        manager.observers.add(self)

    def close(self) -> None:
        """Stop observing, and send the remaining spans and metrics."""
        self._manager.observers.remove(self)
        self._tracers.shutdown()
        self._meters.shutdown()

    def record(self, distribution: Distribution, seconds: float) -> None:
        self._histograms[distribution.name].record(seconds)

    def submitted(self, requests: Sequence[Request]) -> None:
        with self._lock:
            ids = (request.request_id for request in requests)
            self._asked_in |= dict.fromkeys(ids, context.get_current())

    def ended(self, request: Request) -> None:
        super().ended(request)
        with self._lock:
            parent = self._asked_in.pop(request.request_id, None)
        now = time.perf_counter()
        span = self._tracer.start_span(
            "request",
            parent,
            start_time=self._ns(request.created_time),
            attributes={
                "request_id": request.request_id,
                "prompt_tokens": len(request.prompt_ids),
                "generated_tokens": request.num_generated,
                "preemptions": request.num_preemptions,
                "policy_version": request.policy_versions[-1][0] if request.policy_versions else -1,
                "finish_reason": str(request.finish_reason),
            },
        )
        inside = trace.set_span_in_context(span, parent)
        times = (request.created_time, request.admitted_time, request.first_token_time, now)
        phases = zip(("queue", "prefill", "decode"), times, times[1:], strict=False)
        for name, started, ended in phases:
            if started is None:
                break
            phase = self._tracer.start_span(name, inside, start_time=self._ns(started))
            phase.end(self._ns(now if ended is None else ended))
        span.end(self._ns(now))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Report the time spent inside as a span."""
        version = self._manager.policy_version
        with (
            super().span(name),
            self._tracer.start_as_current_span(name, attributes={"policy_version": version}),
        ):
            yield

    @contextmanager
    def joined(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Put sequences submitted inside under the trace that `traceparent` names (W3C)."""
        client = TraceContextTextMapPropagator().extract(headers, context.get_current())
        token = context.attach(client)
        try:
            yield
        finally:
            context.detach(token)

    def _ns(self, seconds: float) -> int:
        """Convert `time.perf_counter()` seconds to the collector's clock."""
        return self._wall_clock_ns + int(seconds * 1e9)


def _observed(
    instrument: LiveMetric, manager: ContinuousBatchingManager, _: Any
) -> list[Observation]:
    return [Observation(instrument.read(manager.counters, manager.status()))]
