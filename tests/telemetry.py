"""An OpenTelemetry SDK that keeps spans and metrics in memory, and what it kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cb_rollout.integrations import otel


class Telemetry:
    """Providers of a test, and what was exported to them."""

    def __init__(self, **settings: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(**settings)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])
        self.tracer = self.tracers.get_tracer("test")

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Spans that ended, in the order of their beginnings; with a name, these alone."""
        spans = sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time)
        return [span for span in spans if name in (None, span.name)]

    def children(self, parent: ReadableSpan, name: str | None = None) -> list[ReadableSpan]:
        return [span for span in self.spans(name) if span.parent == parent.context]

    def points(self, name: str) -> list[Any]:
        """The data points of a metric; empty: it was not reported."""
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def units(self) -> dict[str, str]:
        data = self._reader.get_metrics_data()
        return {
            metric.name: metric.unit
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@contextmanager
def observed(**settings: Any) -> Iterator[Telemetry]:
    """Instrument the process with an SDK in memory; `settings` are a `TracerProvider`'s."""
    telemetry = Telemetry(**settings)
    otel.instrument(telemetry.tracers, telemetry.meters)
    try:
        yield telemetry
    finally:
        otel.uninstrument()
        telemetry.tracers.shutdown()
        telemetry.meters.shutdown()


def require_within(child: ReadableSpan, parent: ReadableSpan) -> None:
    """Check that a span is its parent's, in the same trace, and that its time lies inside."""
    assert child.parent == parent.context
    assert child.context.trace_id == parent.context.trace_id
    assert parent.start_time <= child.start_time <= child.end_time <= parent.end_time
