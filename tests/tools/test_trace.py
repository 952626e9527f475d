"""A trace of a run's steps: valid events, which nest, and whose times add up to the step's."""

import json
from itertools import groupby, pairwise

import pytest
from report_page import a_sequence
from tiny_trainer import logged, tiny_trainer

from cb_rollout import RolloutConfig, attach
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.registry import DECODE_STEP, DISTRIBUTIONS, PREFILL_STEP
from cb_rollout.metrics.run_records import RunRecorder, SequenceTimes, Span, StepMetrics
from cb_rollout.tools.cli import main

# The Trace Event Format: fields of each phase, beside those of every event, and their types.
EVERY = {"name": str, "ph": str, "ts": int, "pid": int, "tid": int}
OF_PHASE = {
    "M": {"args": dict},
    "X": {"dur": int, "args": dict},
    "b": {"cat": str, "id": str},
    "e": {"cat": str, "id": str},
}


def events_of(run_dir, capsys):
    path = run_dir / "trace.json"
    capsys.readouterr()
    assert main(["report", str(run_dir), "--trace", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    trace = json.loads(path.read_text())
    for event in trace["traceEvents"]:
        kinds = EVERY | OF_PHASE[event["ph"]]
        assert {name: type(value) for name, value in event.items()} == kinds
        assert min(event["ts"], event.get("dur", 0)) >= 0
    return trace["traceEvents"]


def require_nested(events):
    """Whole events of a track hold each other or are apart; a sequence's begin and end in turn."""
    whole = [event for event in events if event["ph"] == "X"]
    for _, track in groupby(sorted(whole, key=lambda x: x["tid"]), lambda x: x["tid"]):
        open_until = []
        for event in sorted(track, key=lambda x: (x["ts"], -x["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1]
            open_until.append(event["ts"] + event["dur"])
    for _, marks in groupby([x for x in events if x["ph"] in "be"], lambda x: x["id"]):
        marks = list(marks)
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(marks))
        begun = []
        for mark in marks:
            if mark["ph"] == "b":
                begun.append(mark["name"])
            else:
                assert begun.pop() == mark["name"]
        assert begun == []


def whole_of(events, name):
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_a_trainers_trace_nests_and_adds_up_to_its_steps(tmp_path, capsys, logging_steps):
    trainer = tiny_trainer(tmp_path, logging_steps=logging_steps, gradient_accumulation_steps=2)
    generator = attach(trainer, RolloutConfig(seed=0))
    trainer.train()
    events = events_of(tmp_path, capsys)
    require_nested(events)
    for number in (1, 2, 3):
        (step,) = whole_of(events, f"step {number}")
        inside = [
            x
            for x in events
            if x["ph"] == "X"
            and x["tid"] == step["tid"]
            and step["ts"] <= x["ts"] < step["ts"] + step["dur"]
            and x is not step
        ]
        assert {x["name"] for x in inside} == {"rollout", "sync", "sleep", "loss", "rest"}
        assert sum(x["dur"] for x in inside) == step["dur"]
        assert step["args"]["seconds"] == pytest.approx(step["dur"] / 1e6, abs=2e-6)
    seconds = [x["args"]["seconds"] for x in whole_of(events, "loss")]
    assert len(seconds) == 6
    if logging_steps == 1:
        assert sum(seconds) == pytest.approx(sum(logged(trainer, "rollout/loss_seconds")))
    histograms, counters = generator.manager.durations.histograms, generator.manager.counters
    forwards = {PREFILL_STEP: counters.prefill_forwards, DECODE_STEP: counters.decode_forwards}
    for kind, num in forwards.items():
        found = whole_of(events, kind.name.removesuffix("_step_seconds"))
        assert sum(x["args"]["forwards"] for x in found) == num
        total = histograms[kind].read()[1]
        assert sum(x["args"]["seconds"] for x in found) == pytest.approx(total)
    sequences = [x for x in events if x["ph"] == "b" and x["name"] == "sequence"]
    assert len(sequences) == counters.requests_finished
    generator.close()


def test_forwards_are_one_span_until_another_kind_or_a_pause(tmp_path, capsys):
    spans = [
        Span("decode", 10.0, 12.0, 1.5, 3),
        Span("rollout", 9.0, 12.5, 3.5, 1),
        Span("step", 8.0, 20.0, 12.0, 7),
    ]
    queued, whole = SequenceTimes("a", 9.0, None, None, 9.5), SequenceTimes("b", 9, 10, 11, 12)
    metrics = StepMetrics(7, "train", {}, [], spans=spans, sequences=[queued, whole])
    RunRecorder(tmp_path).record_metrics(metrics)
    events = events_of(tmp_path, capsys)
    require_nested(events)
    rest = [(x["ts"], x["dur"]) for x in whole_of(events, "rest")]
    assert rest == [(0, 1_000_000), (4_500_000, 7_500_000)]
    marks = [(x["id"], x["name"], x["ts"]) for x in events if x["ph"] == "b"]
    assert marks == [
        ("a", "sequence", 1_000_000),
        ("a", "queue", 1_000_000),
        ("b", "sequence", 1_000_000),
        ("b", "queue", 1_000_000),
        ("b", "prefill", 2_000_000),
        ("b", "decode", 3_000_000),
    ]


def test_a_timeline_joins_forwards_of_one_kind_and_is_taken_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: now[0] + 1000)
    durations = Durations()
    for kind, began, ended in (
        (PREFILL_STEP, 0.0, 1.0),
        (DECODE_STEP, 1.0, 2.0),
        (DECODE_STEP, 2.001, 3.0),
        (DECODE_STEP, 4.0, 5.0),
    ):
        now[0] = ended
        durations.record_since(kind, began)
    spans, sequences = durations.take_timeline()
    assert [(x.name, x.began, x.ended, x.number) for x in spans] == [
        ("prefill", 1000.0, 1001.0, 1),
        ("decode", 1001.0, 1003.0, 2),
        ("decode", 1004.0, 1005.0, 1),
    ]
    assert [x.seconds for x in spans] == pytest.approx([1.0, 1.999, 1.0])
    assert (sequences, durations.take_timeline()) == ([], ([], []))
    assert durations.histograms[DECODE_STEP].read()[0][-1] == 3
    assert set(DISTRIBUTIONS) == set(durations.histograms)


def test_what_has_no_times_or_is_two_runs_is_refused(tmp_path, capsys):
    RunRecorder(tmp_path).record_sequence(a_sequence())
    assert main(["report", str(tmp_path), "--trace", str(tmp_path / "t")]) == 2
    assert "holds no times of its steps" in capsys.readouterr().err
    assert main(["report", str(tmp_path), str(tmp_path), "--trace", str(tmp_path / "t")]) == 2
    assert "--trace is of one RUN_DIR" in capsys.readouterr().err
    span = Span("step", 0.0, 1.0, 1.0, 1)
    RunRecorder(tmp_path).record_metrics(StepMetrics(1, "train", {}, [], spans=[span]))
    (tmp_path / "t").mkdir()
    assert main(["report", str(tmp_path), "--trace", str(tmp_path / "t")]) == 2
    assert "cannot be read or written (Is a directory)" in capsys.readouterr().err
