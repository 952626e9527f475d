"""Traces and metrics with OpenTelemetry: `instrument()`, and `export()` where no SDK is set up.

The only folder that imports opentelemetry (extra `otel`). `instrument` sets no provider and changes
no other instrumentation. Any thread may call. `observer` makes spans, `instruments` the metrics,
and `exporters` sets up an SDK from the OTEL_* variables.
"""

from cb_rollout.errors import ConfigurationError

try:
    from cb_rollout.integrations.otel.exporters import Exporters, export
    from cb_rollout.integrations.otel.observer import instrument, uninstrument
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("opentelemetry"):
        raise
    raise ConfigurationError(
        f"traces need {error.name}: pip install 'cb_rollout[otel]'."
    ) from error

__all__ = ["Exporters", "export", "instrument", "uninstrument"]
