"""The file of results holds each written sequence once, under one set of settings."""

import json
import math

import pytest
from full_disk import FullDisk

from cb_rollout import ConfigurationError
from cb_rollout.tools.dataset.results import ResultFile

SETTINGS = {"temperature": 1.0}


def result(row_id, sample, **more):
    return {"id": row_id, "sample": sample, **more}


def num_done(path):
    with ResultFile(path, SETTINGS) as results:
        return results.num_done


def test_appended_results_are_there_when_the_file_is_opened_again(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, SETTINGS) as results:
        results.append([result("a", 0), result(7, 2, error="no")])
        results.append([result("a", 1)])
    with ResultFile(path, SETTINGS) as results:
        assert [results.has("a", n) for n in range(3)] == [True, True, False]
        assert [results.has(7, n) for n in range(3)] == [False, False, True]
        assert not results.has("7", 2)
        assert (results.num_done, results.num_failed) == (3, 1)
        assert list(results) == [result("a", 0), result(7, 2, error="no"), result("a", 1)]


@pytest.mark.parametrize("torn", ["{", '{"id": "a", "sample": 1}', "\0\0\0", "x" * 100_000])
def test_a_half_line_is_cut_off_and_written_over(tmp_path, torn):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, SETTINGS) as results:
        results.append([result("a", 0)])
    with path.open("a") as file:
        file.write(torn)
    with ResultFile(path, SETTINGS) as results:
        assert results.num_done == 1
        assert not results.has("a", 1)
        results.append([result("a", 1)])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        result("a", 0),
        result("a", 1),
    ]


@pytest.mark.parametrize("line", ["x", "[]", "3", "{}", '{"id": [], "sample": 0}', "\0\0"])
def test_a_whole_line_that_is_no_result_is_named(tmp_path, line):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, SETTINGS) as results:
        results.append([result("a", 0)])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigurationError, match=f"line 2 of {path} is not a result"):
        ResultFile(path, SETTINGS)


def test_a_sequence_that_is_there_twice_is_named(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, SETTINGS) as results:
        results.append([result("a", 0)])
    path.write_text(path.read_text() * 2)
    with pytest.raises(ConfigurationError, match="has sequence 0 of row 'a' twice"):
        ResultFile(path, SETTINGS)


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, SETTINGS) as results:
        results.append([result("a", 0)])
        for overwrite in (False, True):
            with pytest.raises(ConfigurationError, match="another process writes"):
                ResultFile(path, SETTINGS, overwrite=overwrite)
    assert num_done(path) == 1


def test_a_stale_settings_file_without_results_is_no_obstacle(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, {"temperature": 0.5}):
        pass
    with ResultFile(path, SETTINGS) as results:
        results.append([result("a", 0)])
    assert num_done(path) == 1
    with pytest.raises(ConfigurationError, match=r"temperature was 1\.0 and is 0\.5"):
        ResultFile(path, {"temperature": 0.5})


def test_a_path_that_cannot_be_written_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "out.jsonl", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigurationError, match="cannot be written"):
            ResultFile(path, SETTINGS)
    (tmp_path / "out.jsonl.settings.json").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        ResultFile(tmp_path / "out.jsonl", SETTINGS)


@pytest.mark.parametrize("settings", ["", "{", "[3]", "7", "null"])
def test_unreadable_settings_are_refused(tmp_path, settings):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, SETTINGS) as results:
        results.append([result("a", 0)])
    (tmp_path / "out.jsonl.settings.json").write_text(settings)
    with pytest.raises(ConfigurationError, match=r"settings\.json, which says .* cannot be read"):
        ResultFile(path, SETTINGS)


def write_missing(path):
    """Append what the file lacks of three rows, as a run of `generate_dataset` does."""
    with ResultFile(path, SETTINGS) as results:
        for row in ("a", "b", "c"):
            missing = [result(row, n, completion="x" * 50) for n in range(2)]
            results.append([one for one in missing if not results.has(row, one["sample"])])


def test_a_disk_that_is_full_at_any_write_costs_no_written_result(tmp_path, monkeypatch):
    whole = FullDisk(tmp_path, math.inf)
    with whole.mounted(monkeypatch):
        write_missing(tmp_path / "whole.jsonl")
    assert whole.num_writes > 5
    for number in range(1, whole.num_writes + 1):
        path = tmp_path / f"{number}.jsonl"
        with (
            FullDisk(tmp_path, number).mounted(monkeypatch),
            pytest.raises(ConfigurationError, match="No space left on device") as refused,
        ):
            write_missing(path)
        lines = path.read_bytes() if path.exists() else b""
        assert lines[-1:] in (b"", b"\n")
        if lines:
            assert f"{len(lines.splitlines())} sequences are in it" in str(refused.value)
        write_missing(path)
        assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
