"""Set up an SDK that exports by OTLP over HTTP, as the OTEL_* variables of the environment say.

For a process without its own OpenTelemetry set-up, such as `cb-rollout serve --otel`. If the
process already has a provider, that provider is used.
"""

import os
import warnings
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider

from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.otel.delivery import (
    CountedMetricExporter,
    CountedSpanExporter,
    CountedSpanProcessor,
    Exporter,
    shut_down,
)
from cb_rollout.integrations.otel.observer import instrument, uninstrument

# A rollout of a thousand sequences ends with several thousand spans at once; the SDK's own limit,
# 2,048, would drop some.
MAX_QUEUE_SIZE = 1 << 16

PROTOCOL = "http/protobuf"

# A collector that accepts nothing for this long, on any machine, is considered absent.
CLOSE_SECONDS = 3.0

# Providers that were shut down. OpenTelemetry takes a process's providers once, so they stay set.
_closed: list[Any] = []


class Exporters(AbstractContextManager["Exporters"]):
    """The providers that `export` made."""

    def __init__(self, providers: list[Any], exporters: list[Exporter]) -> None:
        self._providers = providers
        self._exporters = exporters

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Stop observing, and send the remaining data; a provider that was there before stays open.

        Warns about everything that the collector did not receive during the run.

        Args:
            timeout_seconds: after this time without a successful export, the remaining data is
                given up.
        """
        uninstrument()
        providers, self._providers = self._providers, []
        if not providers:
            return
        _closed.extend(providers)
        losses = shut_down(providers, self._exporters, timeout_seconds)
        if losses:
            warnings.warn(
                f"{' and '.join(losses)} were lost, because no collector accepted them. Start a "
                "collector, or set OTEL_EXPORTER_OTLP_ENDPOINT to a running one; if it is slow, "
                "close with a larger timeout_seconds.",
                stacklevel=2,
            )

    def __exit__(self, *_: object) -> None:
        self.close()


def export(service_name: str = "cb_rollout") -> Exporters:
    """Export traces and metrics by OTLP over HTTP, as the OTEL_* variables say.

    Sets the process's providers where it has none, so that spans of other instrumentations are
    exported too. OTEL_EXPORTER_OTLP_ENDPOINT (http://localhost:4318 by default),
    OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, OTEL_METRIC_EXPORT_INTERVAL, OTEL_BSP_*,
    OTEL_RESOURCE_ATTRIBUTES and OTEL_SDK_DISABLED are the SDK's.

    Args:
        service_name: of this process, where neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES
            names it.

    Returns:
        A handle, also for `with`; its `close()` sends the remaining data.

    Raises:
        ConfigurationError: a variable asks for another exporter or protocol; or an earlier handle
            of this process was closed.
    """
    exports_traces = _is_exported("TRACES")
    exports_metrics = _is_exported("METRICS")
    for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
        if provider in _closed:
            raise ConfigurationError(
                "export() was already closed in this process, and OpenTelemetry's providers can be "
                "set only once; keep the first handle open until the end."
            )
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service_name}))
    made: list[Any] = []
    exporters: list[Exporter] = []
    has_tracer = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    if exports_traces and not has_tracer:
        size = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else MAX_QUEUE_SIZE
        spans = CountedSpanExporter()
        exporters.append(spans)
        tracers = TracerProvider(resource=resource)
        tracers.add_span_processor(CountedSpanProcessor(spans, max_queue_size=size))
        trace.set_tracer_provider(tracers)
        made.append(tracers)
    # The API has no name for the provider that it uses before one is set.
    has_meter = "Proxy" not in type(metrics.get_meter_provider()).__name__
    if exports_metrics and not has_meter:
        measurements = CountedMetricExporter()
        exporters.append(measurements)
        reader = PeriodicExportingMetricReader(measurements)
        meters = MeterProvider(metric_readers=[reader], resource=resource)
        metrics.set_meter_provider(meters)
        made.append(meters)
    instrument()
    return Exporters(made, exporters)


def _is_exported(signal: str) -> bool:
    """Return whether traces or metrics are exported; refuse exporters that this set-up lacks."""
    name = f"OTEL_{signal}_EXPORTER"
    exporter = os.environ.get(name) or "otlp"
    if exporter not in ("otlp", "none"):
        raise ConfigurationError(
            f"{name}={exporter} is neither otlp nor none; set one of these, or set up "
            "OpenTelemetry's SDK yourself and call cb_rollout.integrations.otel.instrument()."
        )
    own, common = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = os.environ.get(own) or os.environ.get(common) or PROTOCOL
    if protocol != PROTOCOL and exporter == "otlp":
        raise ConfigurationError(
            f"{own if os.environ.get(own) else common}={protocol} is not {PROTOCOL}; set that (its "
            "port is 4318), or set up OpenTelemetry's SDK yourself and call "
            "cb_rollout.integrations.otel.instrument()."
        )
    return exporter == "otlp"
