import json
import math

import pytest
from full_disk import FullDisk
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.run_records import (
    METRICS_FILE,
    ROLLOUTS_FILE,
    RunRecorder,
    SequenceRecord,
    SequenceTimes,
    Span,
    StepMetrics,
    TokenRow,
    chosen_run,
    find_run_dir,
    iterate_rollouts,
    list_runs,
    read_image,
    read_metrics,
)

numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.one_of(st.text(), st.sampled_from(["\ud800", "\udfff x", "\x00\r\n\x85\u2028", '"\\']))
modes = st.sampled_from(["train", "eval"])

step_metrics = st.builds(
    StepMetrics,
    step=st.integers(min_value=0),
    mode=modes,
    scalars=st.dictionaries(texts, numbers),
    completion_lengths=st.lists(st.integers(min_value=0)),
    spans=st.lists(st.builds(Span, texts, numbers, numbers, numbers, st.integers())),
    sequences=st.lists(
        st.builds(SequenceTimes, texts, numbers, st.none() | numbers, st.none() | numbers, numbers)
    ),
)


@st.composite
def sequence_records(draw):
    runs = draw(st.lists(st.tuples(st.integers(min_value=0), st.integers(1, 4)), max_size=3))
    num_tokens = sum(num for _, num in runs)
    lists = {"min_size": num_tokens, "max_size": num_tokens}
    return SequenceRecord(
        step=draw(st.integers(min_value=0)),
        mode=draw(modes),
        request_id=draw(texts),
        prompt=draw(texts),
        tokens=draw(st.lists(texts, **lists)),
        token_ids=draw(st.lists(st.integers(min_value=0), **lists)),
        logprobs=draw(st.one_of(st.just([]), st.lists(numbers, **lists))),
        policy_versions=draw(st.sampled_from([runs, []])),
        reward=draw(st.none() | numbers),
        finish_reason=draw(st.none() | st.sampled_from(["stop", "length"])),
        trainer_logprobs=draw(st.one_of(st.just([]), st.lists(numbers, **lists))),
        entropies=draw(st.one_of(st.just([]), st.lists(numbers, **lists))),
        advantage=draw(st.none() | numbers),
        mask=draw(st.one_of(st.just([]), st.lists(st.integers(0, 1), **lists))),
    )


def a_sequence(step=1, **changes):
    values = {
        "step": step,
        "mode": "train",
        "request_id": "r0",
        "prompt": "2+2=",
        "tokens": ["4", "!", "</s>"],
        "token_ids": [19, 0, 2],
        "logprobs": [-0.25, -3.0, -0.5],
        "policy_versions": [(6, 1), (7, 2)],
        "reward": 1.0,
        "finish_reason": "stop",
    }
    return SequenceRecord(**values | changes)


@given(records=st.lists(step_metrics))
@settings(max_examples=50, deadline=None)
def test_metrics_read_back_as_they_were_recorded(tmp_path_factory, records):
    recorder = RunRecorder(tmp_path_factory.mktemp("run"))
    for record in records:
        recorder.record_metrics(record)
    if records:
        assert read_metrics(recorder.run_dir) == records


@given(records=st.lists(sequence_records()))
@settings(max_examples=50, deadline=None)
def test_sequences_read_back_as_they_were_recorded(tmp_path_factory, records):
    recorder = RunRecorder(tmp_path_factory.mktemp("run"))
    for record in records:
        recorder.record_sequence(record)
    if records:
        assert list(iterate_rollouts(recorder.run_dir)) == records


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_scalar_that_is_not_finite_is_null_on_disk_and_absent_when_read(tmp_path, value):
    recorder = RunRecorder(tmp_path)
    recorder.record_metrics(StepMetrics(1, "train", {"a": value, "b": 2.0}, []))
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(line) == {
        "run_id": recorder.run_id,
        "step": 1,
        "mode": "train",
        "scalars": {"a": None, "b": 2.0},
        "completion_lengths": [],
        "group_rewards": [],
        "spans": [],
        "sequences": [],
    }
    assert read_metrics(tmp_path) == [StepMetrics(1, "train", {"b": 2.0}, [])]


def test_a_logprob_that_is_not_finite_keeps_its_place(tmp_path):
    sequence = a_sequence(logprobs=[-0.25, -math.inf, math.nan], reward=math.nan)
    RunRecorder(tmp_path).record_sequence(sequence)
    assert json.loads((tmp_path / ROLLOUTS_FILE).read_text())["logprobs"] == [-0.25, None, None]
    (read,) = list(iterate_rollouts(tmp_path))
    assert [row.logprob for row in read.token_rows()] == [-0.25, None, None]
    assert [row.logprob for row in sequence.token_rows()] == [-0.25, None, None]
    assert read.reward is None


def test_token_rows_say_which_policy_sampled_each_token():
    assert list(a_sequence().token_rows()) == [
        TokenRow("2+2=", 0, "4", 19, -0.25, 6, 1.0),
        TokenRow("2+2=", 1, "!", 0, -3.0, 7, 1.0),
        TokenRow("2+2=", 2, "</s>", 2, -0.5, 7, 1.0),
    ]


def test_token_rows_leave_out_what_was_not_recorded():
    rows = a_sequence(logprobs=[], policy_versions=[], reward=None).token_rows()
    assert {(row.logprob, row.policy_version, row.reward) for row in rows} == {(None, None, None)}


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": [19]}, {"logprobs": [-0.25]}, {"policy_versions": [(6, 2)]}],
)
def test_a_sequence_whose_lengths_disagree_is_refused(changes):
    with pytest.raises(AssertionError):
        a_sequence(**changes)


def test_a_half_written_last_line_is_not_read_and_is_removed_when_recording_goes_on(tmp_path):
    whole = [StepMetrics(step, "train", {"reward": step / 2}, [step]) for step in range(3)]
    recorder = RunRecorder(tmp_path)
    for record in whole:
        recorder.record_metrics(record)
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes() + b'{"step":3,"mode":"tr')
    assert read_metrics(tmp_path) == whole
    recorder = RunRecorder(tmp_path)
    recorder.record_metrics(whole[0])
    first, second = list_runs(tmp_path)
    assert read_metrics(tmp_path, first) == whole
    assert read_metrics(tmp_path, second) == read_metrics(tmp_path) == whole[:1]


def test_a_file_that_is_one_long_half_line_is_emptied(tmp_path):
    path = tmp_path / ROLLOUTS_FILE
    path.write_bytes(b"x" * 200_000)
    RunRecorder(tmp_path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"step":1}',
        '{"run_id":"a"}',
        "[]",
        '{"run_id":"a","step":1,"mode":"train","scalars":3}',
    ],
)
def test_a_whole_line_that_is_no_record_is_named(tmp_path, line):
    whole = '{"run_id":"a","step":0,"mode":"train","scalars":{},"completion_lengths":[]}'
    (tmp_path / METRICS_FILE).write_text(f"{whole}\n{line}\n")
    with pytest.raises(ConfigurationError, match=r"line 2 of .*metrics\.jsonl is not a record"):
        read_metrics(tmp_path)


def test_rollouts_are_counted_and_kept_by_step(tmp_path):
    recorder = RunRecorder(tmp_path)
    for step in (2, 2, 1, 9):
        recorder.record_sequence(a_sequence(step))
    (run,) = list_runs(tmp_path)
    assert list(run.num_sequences.items()) == [(1, 1), (2, 2), (9, 1)]
    assert [record.step for record in list(iterate_rollouts(tmp_path, steps=[1, 2]))] == [2, 2, 1]
    assert read_metrics(tmp_path) == []


def test_a_run_is_found_in_a_trainers_output_dir_and_in_its_own(tmp_path):
    own = tmp_path / "cb_rollout"
    RunRecorder(own).record_metrics(StepMetrics(0, "train", {}, []))
    assert find_run_dir(tmp_path) == find_run_dir(str(own)) == own


def test_a_place_without_records_is_refused_with_what_was_looked_for(tmp_path):
    with pytest.raises(ConfigurationError) as raised:
        find_run_dir(tmp_path)
    for expected in (str(tmp_path), METRICS_FILE, ROLLOUTS_FILE, "output_dir"):
        assert expected in str(raised.value)


def test_a_run_recorded_before_the_trainers_figures_were_is_still_read(tmp_path):
    recorder = RunRecorder(tmp_path)
    recorder.record_sequence(a_sequence())
    path = tmp_path / ROLLOUTS_FILE
    row = json.loads(path.read_text())
    for name in ("trainer_logprobs", "entropies", "advantage", "mask"):
        del row[name]
    path.write_text(json.dumps(row) + "\n")
    assert list(iterate_rollouts(tmp_path)) == [a_sequence()]
    (token, *_) = next(iterate_rollouts(tmp_path)).token_rows()
    assert (token.trainer_logprob, token.entropy, token.advantage, token.mask) == (None,) * 4


def record_steps(recorder, steps, reward=0.5):
    for step in steps:
        recorder.record_metrics(StepMetrics(step, "train", {"reward": reward}, []))
        recorder.record_sequence(a_sequence(step, reward=reward))


def test_of_several_runs_in_one_directory_the_last_is_read_unless_another_is_asked_for(tmp_path):
    for reward in (0.1, 0.2):
        record_steps(RunRecorder(tmp_path), range(1, 4), reward)
    first, second = list_runs(tmp_path)
    assert {sequence.reward for sequence in list(iterate_rollouts(tmp_path))} == {0.2}
    assert [m.scalars["reward"] for m in read_metrics(tmp_path, first)] == [0.1] * 3
    assert (first.steps, first.num_sequences) == ([1, 2, 3], {1: 1, 2: 1, 3: 1})
    assert chosen_run([first, second], first.run_id) == first
    with pytest.raises(ConfigurationError, match=f"no run is called 'x'; there is {first.run_id},"):
        chosen_run([first, second], "x")


def test_a_resumed_run_holds_the_one_before_up_to_its_checkpoint(tmp_path):
    recorder = RunRecorder(tmp_path)
    record_steps(recorder, range(1, 8), reward=0.1)
    (first_id,) = (run.run_id for run in list_runs(tmp_path))
    record_steps(RunRecorder(tmp_path), [1, 2], reward=0.2)
    for from_step, steps in ((5, [6, 7, 8]), (3, [4])):
        recorder.begin_run(from_step)
        record_steps(recorder, steps, reward=from_step / 10)
    *_, longer, last = list_runs(tmp_path)
    assert longer.continues == {first_id: 5}
    assert longer.steps == [*range(1, 9)]
    assert last.continues == {first_id: 3, longer.run_id: 3}
    assert [(s.step, s.reward) for s in list(iterate_rollouts(tmp_path))] == [
        *((1, 0.1), (2, 0.1), (3, 0.1)),
        (4, 0.3),
    ]
    assert last.num_sequences == dict.fromkeys(range(1, 5), 1)


def test_a_picture_is_written_once_and_read_by_its_name(tmp_path):
    recorder = RunRecorder(tmp_path)
    names = [recorder.record_image(png) for png in (b"one", b"two", b"one")]
    assert names[0] == names[2] != names[1]
    assert sorted(file.name for file in (tmp_path / "images").iterdir()) == sorted({*names})
    assert read_image(tmp_path, names[1]) == b"two"
    (tmp_path / "a.png").write_bytes(b"another's")
    assert read_image(tmp_path, "../a.png") is None
    assert read_image(tmp_path, "f" * 32 + ".png") is None
    recorder.record_sequence(a_sequence(images=names[:1]))
    assert next(iterate_rollouts(tmp_path)).images == names[:1]


def record_everything(folder):
    recorder = RunRecorder(folder)
    for step in (1, 2):
        name = recorder.record_image(b"picture %d" % step)
        recorder.record_sequence(a_sequence(step, images=[name]))
        recorder.record_metrics(StepMetrics(step, "train", {"reward": 0.5}, [3]))


def test_a_full_disk_stops_the_records_at_any_write_and_nothing_else(tmp_path, monkeypatch):
    with FullDisk(tmp_path, math.inf).mounted(monkeypatch) as disk:
        record_everything(tmp_path / "whole")
    assert disk.num_writes > 8
    for number in range(1, disk.num_writes + 1):
        folder = tmp_path / str(number)
        with (
            FullDisk(tmp_path, number).mounted(monkeypatch),
            pytest.warns(UserWarning, match="No space left on device") as warned,
        ):
            record_everything(folder)
        assert len(warned) == 1
        assert not list(folder.rglob("*.partial"))
        for name in (METRICS_FILE, ROLLOUTS_FILE):
            if (folder / name).exists():
                assert (folder / name).read_bytes()[-1:] in (b"", b"\n")
        record_everything(folder)
        assert [record.step for record in list(iterate_rollouts(folder))] == [1, 2]
        assert [read_image(folder, *r.images) for r in list(iterate_rollouts(folder))] == [
            b"picture 1",
            b"picture 2",
        ]
