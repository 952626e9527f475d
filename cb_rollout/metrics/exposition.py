"""Render an engine's present metrics as Prometheus text (format 0.0.4).

Computes no metric: `metrics.registry` defines them. Any thread may call it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cb_rollout.metrics.registry import BUCKETS, DISTRIBUTIONS, LIVE_METRICS, MetricKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cb_rollout.engine.service.manager import ContinuousBatchingManager
    from cb_rollout.metrics.observers import Recorder

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PREFIX = "cb_rollout_"


def exposition(manager: ContinuousBatchingManager, recorder: Recorder) -> str:
    """Return every metric in Prometheus' text format; no label comes from a caller."""
    return "".join(f"{line}\n" for line in _lines(manager, recorder))


def _lines(manager: ContinuousBatchingManager, recorder: Recorder) -> Iterator[str]:
    counters, status = manager.counters, manager.status()
    for metric in LIVE_METRICS:
        suffix = "_total" if metric.kind is MetricKind.COUNTER else ""
        name = f"{PREFIX}{metric.name}{suffix}"
        yield from _heading(name, metric.help, metric.kind)
        yield f"{name} {metric.read(counters, status)}"
    for distribution in DISTRIBUTIONS:
        name = f"{PREFIX}{distribution.name}"
        yield from _heading(name, distribution.help, "histogram")
        counts, total = recorder.histograms[distribution.name].read()
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {total}"
        yield f"{name}_count {counts[-1]}"


def _heading(name: str, help_text: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
