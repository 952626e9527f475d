"""An engine's figures as Prometheus reads them: its text format, version 0.0.4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cb_rollout.metrics.instruments import BUCKETS, DISTRIBUTIONS, INSTRUMENTS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cb_rollout.engine.service.manager import ContinuousBatchingManager
    from cb_rollout.metrics.recorder import Recorder

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PREFIX = "cb_rollout_"


def exposition(manager: ContinuousBatchingManager, recorder: Recorder) -> str:
    """Every metric now. No metric has labels of a caller's making, so nothing needs escaping."""
    return "".join(f"{line}\n" for line in _lines(manager, recorder))


def _lines(manager: ContinuousBatchingManager, recorder: Recorder) -> Iterator[str]:
    for instrument in INSTRUMENTS:
        suffix = "_total" if instrument.kind is Kind.COUNTER else ""
        name = f"{PREFIX}{instrument.name}{suffix}"
        yield from _heading(name, instrument.help, instrument.kind)
        yield f"{name} {instrument.read(manager)}"
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
