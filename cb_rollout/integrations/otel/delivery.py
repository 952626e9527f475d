"""Count delivered data in exporters, and shut down providers within a bounded time.

Called by any thread of the SDK; `shut_down` by the thread that closes an export.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

# The SDK's default.
ENDPOINT = "http://localhost:4318"

# Longest wait for the SDK's threads, once their exporters are told to end.
LAST_SECONDS = 0.5


class Delivery:
    """The counts of one signal's items that a process handed over and delivered."""

    def __init__(self, signal: str) -> None:
        self.signal = signal
        self.num_ended = 0
        """Spans to deliver; metrics are not counted."""
        self.num_delivered = 0
        self.is_last_delivered = True
        """False: the collector did not take what was sent last."""
        self.last_progress = time.monotonic()
        """When an export succeeded last."""
        self._lock = threading.Lock()

    def add_span(self) -> None:
        """Count a span that will be delivered."""
        with self._lock:
            self.num_ended += 1

    def add_export(self, num: int, *, is_delivered: bool) -> None:
        """Note the end of an export of `num` spans, or of metrics."""
        with self._lock:
            self.is_last_delivered = is_delivered
            if is_delivered:
                self.num_delivered += num
                self.last_progress = time.monotonic()

    def loss(self) -> str | None:
        """Describe what the collector did not receive; None if it received everything."""
        num_lost = self.num_ended - self.num_delivered
        if num_lost > 0:
            return f"{num_lost:,} of {self.num_ended:,} spans (to {self._endpoint()})"
        if not self.is_last_delivered:
            return f"the last metrics (to {self._endpoint()})"
        return None

    def _endpoint(self) -> str:
        own = os.environ.get(f"OTEL_EXPORTER_OTLP_{self.signal.upper()}_ENDPOINT")
        return own or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ENDPOINT


class CountedSpanProcessor(BatchSpanProcessor):
    """A processor that counts the spans it will export."""

    def __init__(self, exporter: "CountedSpanExporter", **settings: Any) -> None:
        super().__init__(exporter, **settings)
        self._delivery = exporter.delivery

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._delivery.add_span()
        super().on_end(span)


class CountedSpanExporter(OTLPSpanExporter):
    """An exporter that counts delivered spans and may be shut down twice."""

    def __init__(self) -> None:
        super().__init__()
        self.delivery = Delivery("traces")
        self._has_ended = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._has_ended:
            return SpanExportResult.FAILURE
        result = super().export(spans)
        self.delivery.add_export(len(spans), is_delivered=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            super().shutdown()


class CountedMetricExporter(OTLPMetricExporter):
    """An exporter that knows whether its last metrics were delivered; may be shut down twice."""

    def __init__(self) -> None:
        super().__init__()
        self.delivery = Delivery("metrics")
        self._has_ended = False

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        # Stays False if `shut_down` gives up waiting for this export.
        self.delivery.is_last_delivered = False
        if self._has_ended:
            return MetricExportResult.FAILURE
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self.delivery.add_export(0, is_delivered=result is MetricExportResult.SUCCESS)
        return result

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        if not self._has_ended:
            self._has_ended = True
            super().shutdown(timeout_millis, **kwargs)


Exporter = CountedSpanExporter | CountedMetricExporter


def shut_down(providers: Sequence[Any], exporters: Sequence[Exporter], seconds: float) -> list[str]:
    """Send the remaining data, and end the providers; return the losses, a phrase per signal.

    Args:
        providers: of the SDK; each ends its processors and its readers.
        exporters: those of the providers.
        seconds: after this time without a successful export, the remaining data is given up.
    """
    began = time.monotonic()
    # An exporter that waits for a collector does not keep to its own timeouts.
    threads = [threading.Thread(target=x.shutdown, daemon=True) for x in providers]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            progress = max([began, *(x.delivery.last_progress for x in exporters)])
            left = progress + seconds - time.monotonic()
            if left <= 0:
                break
            thread.join(left)
    for exporter in exporters:
        exporter.shutdown()
    end = time.monotonic() + LAST_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    losses = [exporter.delivery.loss() for exporter in exporters]
    return [loss for loss in losses if loss is not None]
