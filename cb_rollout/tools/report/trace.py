"""Write when the parts of a run's steps happened, in the Trace Event Format of Perfetto and Chrome.

The trainer's parts and the engine's forwards are two tracks, because both may run at once.
Sequences overlap, so they are asynchronous events. Time within a step that no record covers is the
event "rest".
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

TRAINER_TRACK = 1
ENGINE_TRACK = 2
SEQUENCES_TRACK = 3

TRACKS = {TRAINER_TRACK: "trainer", ENGINE_TRACK: "engine", SEQUENCES_TRACK: "sequences"}

# The stages of a sequence, in order.
STAGES = ("queue", "prefill", "decode")


def write_trace(run_dir: str | os.PathLike[str], path: Path, run_id: str | None = None) -> None:
    """Write the trace of a run (None: the last run), or raise `ConfigurationError`."""
    spans: list[Span] = []
    sequences: list[SequenceTimes] = []
    for record in read_metrics(run_dir, chosen_run(list_runs(run_dir), run_id)):
        spans.extend(record.spans)
        sequences.extend(record.sequences)
    if not spans:
        raise ConfigurationError(f"{run_dir} holds no times of its steps; record the run again.")
    with naming_file(path):
        write_whole(path, json_line({"traceEvents": list(trace_events(spans, sequences))}))


def trace_events(
    spans: Sequence[Span], sequences: Sequence[SequenceTimes]
) -> Iterator[dict[str, Any]]:
    """Yield the events, in microseconds from the first one."""
    began = [span.began for span in spans]
    created = [sequence.created for sequence in sequences]
    origin = min([*began, *created])

    def event(name: str, track: int, phase: str, seconds: float, **more: Any) -> dict[str, Any]:
        at = _microseconds(seconds - origin)
        return {"name": name, "ph": phase, "ts": at, "pid": 1, "tid": track, **more}

    for track, track_name in TRACKS.items():
        yield event("thread_name", track, "M", origin, args={"name": track_name})
    for span in [*spans, *_rests(spans)]:
        name = f"step {span.number}" if span.name == "step" else span.name
        if span.name in FORWARDS:
            track = ENGINE_TRACK
            args = {"seconds": span.seconds, "forwards": span.number}
        else:
            track = TRAINER_TRACK
            args = {"seconds": span.seconds, "number": span.number}
        duration = _microseconds(span.ended - origin) - _microseconds(span.began - origin)
        yield event(name, track, "X", span.began, dur=duration, args=args)
    for sequence in sequences:
        identity = {"cat": "sequence", "id": sequence.request_id}
        yield event("sequence", SEQUENCES_TRACK, "b", sequence.created, **identity)
        began = sequence.created
        # A sequence that ended early has fewer stages.
        for stage, ended in zip(STAGES, _ends_of_stages(sequence), strict=False):
            yield event(stage, SEQUENCES_TRACK, "b", began, **identity)
            yield event(stage, SEQUENCES_TRACK, "e", ended, **identity)
            began = ended
        yield event("sequence", SEQUENCES_TRACK, "e", began, **identity)


def _ends_of_stages(sequence: SequenceTimes) -> list[float]:
    """Return when each stage that the sequence reached ended, in the clock's seconds."""
    times = (sequence.admitted, sequence.first_token, sequence.ended)
    return [seconds for seconds in times if seconds is not None]


def _rests(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the gaps between the trainer's parts of each step."""
    steps: list[Span] = []
    parts: list[Span] = []
    for span in spans:
        if span.name == "step":
            steps.append(span)
        elif span.name not in FORWARDS:
            parts.append(span)
    parts.sort(key=lambda part: (part.began, part.ended))
    starts = [part.began for part in parts]
    for step in steps:
        # The time up to which records cover the step.
        covered = step.began
        first = bisect_left(starts, step.began)
        end = bisect_left(starts, step.ended)
        for part in parts[first:end]:
            if part.began > covered:
                yield _rest(covered, part.began)
            covered = max(covered, part.ended)
        if step.ended > covered:
            yield _rest(covered, step.ended)


def _rest(began: float, ended: float) -> Span:
    return Span(name="rest", began=began, ended=ended, seconds=ended - began, number=1)


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)
