"""Each cause of a failed write of records has a sentence of its own, and names what to change."""

import errno
import math
import os
import re
import warnings

import pytest
from full_disk import FullDisk

from cb_rollout import ConfigurationError
from cb_rollout.metrics.run_records import RunRecorder, StepMetrics
from cb_rollout.metrics.write_faults import ADVICE, write_advice
from cb_rollout.rollout.saved import RolloutSaver
from cb_rollout.tools.cli.command import require_writable
from cb_rollout.tools.dataset.results import ResultFile

CAUSES = [
    (errno.ENOSPC, "The disk is full: make room, or name an output_dir on another one"),
    (errno.EDQUOT, "The disk quota of this user is used up"),
    (errno.EACCES, "This user has no permission there: give it one, or name an output_dir"),
    (errno.EROFS, "The file system is read-only: name an output_dir on one that is not"),
    (errno.EMFILE, r"Too many files are open: close some, or raise the limit \(ulimit -n\)"),
    (errno.EIO, "The disk does not answer as it should: name an output_dir on another one"),
    (errno.EFBIG, r"raise the limit \(ulimit -f\)"),
    (errno.EPROTO, "Name another output_dir"),
]


def warned_of(folder, num_records=1):
    """The warning of a recorder that cannot write; None: there was none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = RunRecorder(folder)
        for step in range(num_records):
            recorder.record_metrics(StepMetrics(step, "train", {}, []))
            recorder.record_image(b"picture")
    assert len(caught) <= 1
    return str(caught[0].message) if caught else None


@pytest.mark.parametrize(("number", "said"), CAUSES)
@pytest.mark.parametrize("first_refused", [1, 4])
def test_records_name_the_cause_at_any_write(tmp_path, monkeypatch, number, said, first_refused):
    folder = tmp_path / "out"
    with FullDisk(folder, first_refused, number).mounted(monkeypatch):
        message = warned_of(folder, num_records=2)
    assert re.search(said, message)
    assert f"({os.strerror(number)}); training continues" in message
    assert ("make room" in message) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_a_file_where_a_folder_should_be_is_named(tmp_path):
    (tmp_path / "out").write_text("not a folder")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for output_dir in ("out", "out/deeper", "dangling"):
        said = warned_of(tmp_path / output_dir / "cb_rollout")
        file = tmp_path / output_dir.split("/")[0]
        assert f"{file} is a file, not a folder: move it, or name another output_dir." in said
        assert "room" not in said


def test_a_folder_where_a_file_should_be_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    assert "A folder has the name of the file: move it" in warned_of(tmp_path)


def test_a_folder_that_is_removed_while_it_records_is_named(tmp_path):
    recorder = RunRecorder(tmp_path / "out")
    (tmp_path / "out").rmdir()
    with pytest.warns(UserWarning, match="A folder of the path was removed"):
        recorder.record_metrics(StepMetrics(1, "train", {}, []))


def test_a_name_that_is_too_long_is_to_be_shorter(tmp_path):
    said = warned_of(tmp_path / ("x" * 300))
    assert "The name is too long for the file system: name a shorter output_dir." in said


def test_a_folder_that_takes_all_gives_no_warning(tmp_path):
    assert warned_of(tmp_path / "out", num_records=3) is None


def test_saved_rollouts_name_their_own_setting_before_anything_is_sampled(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"is a file, not a folder.*another save_rollouts"):
        RolloutSaver(str(tmp_path / "file" / "saved"), 0, 1).require_own_folder()
    folder = tmp_path / "new"
    with (
        FullDisk(folder, 1, errno.EROFS).mounted(monkeypatch),
        pytest.raises(ConfigurationError, match="read-only: name a save_rollouts on one that is"),
    ):
        RolloutSaver(str(folder), 0, 1).require_own_folder()


def test_saved_rollouts_name_the_cause_of_a_write_in_the_midst(tmp_path, monkeypatch):
    saver = RolloutSaver(str(tmp_path / "saved"), 0, 1)
    saver.require_own_folder()
    with (
        FullDisk(tmp_path / "saved", 1, errno.EDQUOT).mounted(monkeypatch),
        pytest.raises(ConfigurationError, match=r"save_rollouts=.* quota of this user is used up"),
    ):
        saver.save(1, "train", [[]], {})
    assert list((tmp_path / "saved").iterdir()) == []


@pytest.mark.parametrize(("number", "said"), CAUSES)
def test_results_of_a_data_set_name_the_cause(tmp_path, monkeypatch, number, said):
    path = tmp_path / "out" / "out.jsonl"
    path.parent.mkdir()
    said = said.replace("an output_dir", "an output").replace("output_dir", "output")
    with FullDisk(path.parent, math.inf, number).mounted(monkeypatch) as whole:
        ResultFile(path, {}).__exit__()
    for first_refused in range(1, whole.num_writes + 1):
        path.unlink()
        with (
            FullDisk(path.parent, first_refused, number).mounted(monkeypatch),
            pytest.raises(ConfigurationError, match=said),
        ):
            ResultFile(path, {})
        path.touch()


def test_the_folder_of_a_command_names_the_cause(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file is a file, not a folder: move it"):
        require_writable(tmp_path / "file")


@pytest.mark.parametrize("number", [*ADVICE, 0, None])
@pytest.mark.parametrize("setting", ["output_dir", "save_rollouts"])
def test_each_sentence_is_whole(tmp_path, number, setting):
    sentence = write_advice(OSError(number, "why"), tmp_path, setting)
    assert sentence.endswith(".")
    assert not {"{", "}"} & {*sentence}
    assert f"a {setting}" not in sentence or setting == "save_rollouts"
