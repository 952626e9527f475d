"""Write when the parts of a run's steps happened, in the Trace Event Format of Perfetto and Chrome.

The trainer's parts and the engine's forwards are two tracks, for both may run at once. Sequences
overlap, so they are asynchronous events. What no record names within a step is the event "rest".
"""

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.jsonl import json_line, write_whole
from cb_rollout.metrics.live_metrics import FORWARDS
from cb_rollout.metrics.run_records import SequenceTimes, Span, chosen_run, list_runs, read_metrics
from cb_rollout.tools.report.page import naming_file

TRACKS = {1: "trainer", 2: "engine", 3: "sequences"}


def write_trace(run_dir: str | os.PathLike[str], path: Path, run_id: str | None = None) -> None:
    """Write the trace of a run, None: of the last, or raise `ConfigurationError`."""
    metrics = read_metrics(run_dir, chosen_run(list_runs(run_dir), run_id))
    spans = [span for record in metrics for span in record.spans]
    if not spans:
        raise ConfigurationError(f"{run_dir} holds no times of its steps; record the run again.")
    sequences = [times for record in metrics for times in record.sequences]
    with naming_file(path):
        write_whole(path, json_line({"traceEvents": list(trace_events(spans, sequences))}))


def trace_events(
    spans: Sequence[Span], sequences: Sequence[SequenceTimes]
) -> Iterator[dict[str, Any]]:
    """Yield the events, in microseconds from the first one."""
    origin = min([x.began for x in spans] + [x.created for x in sequences])

    def event(name: str, track: int, phase: str, seconds: float, **more: Any) -> dict[str, Any]:
        at = _microseconds(seconds - origin)
        return {"name": name, "ph": phase, "ts": at, "pid": 1, "tid": track, **more}

    for track, name in TRACKS.items():
        yield event("thread_name", track, "M", origin, args={"name": name})
    for span in [*spans, *_rests(spans)]:
        name = f"step {span.number}" if span.name == "step" else span.name
        track, noun = (2, "forwards") if span.name in FORWARDS else (1, "number")
        args = {"seconds": span.seconds, noun: span.number}
        began, ended = (_microseconds(x - origin) for x in (span.began, span.ended))
        yield event(name, track, "X", span.began, dur=ended - began, args=args)
    for request_id, *times in sequences:
        named = {"cat": "sequence", "id": request_id}
        began, *ends = [x for x in times if x is not None]
        yield event("sequence", 3, "b", began, **named)
        # A sequence that ended early has fewer parts.
        for name, ended in zip(("queue", "prefill", "decode"), ends, strict=False):
            yield event(name, 3, "b", began, **named)
            yield event(name, 3, "e", ended, **named)
            began = ended
        yield event("sequence", 3, "e", began, **named)


def _rests(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield what lies between the trainer's parts of each step."""
    parts = sorted((x.began, x.ended) for x in spans if x.name not in ("step", *FORWARDS))
    starts = [began for began, _ in parts]
    for step in (x for x in spans if x.name == "step"):
        began = step.began
        first, end = (bisect_left(starts, at) for at in (began, step.ended))
        for at, ended in [*parts[first:end], (step.ended, step.ended)]:
            if at > began:
                yield Span("rest", began, at, at - began, 1)
            began = max(began, ended)


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)
