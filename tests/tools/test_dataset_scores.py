"""Scorers are found by name, and their scores averaged over rows."""

import math

import pytest

from cb_rollout import ConfigurationError
from cb_rollout.tools.dataset.scores import load_scorer, name_of, summaries, table


def test_a_scorer_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_scorers.py").write_text("def one(row):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    scorer = load_scorer("my_scorers:one")
    assert scorer({}) == 1
    assert name_of(scorer) == "my_scorers:one"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("json", "not of the form module:function"),
        (":loads", "not of the form"),
        ("json:", "not of the form"),
        ("no_such_module:f", "no_such_module does not load .ModuleNotFoundError"),
        ("broken_scorers:f", "broken_scorers does not load .ZeroDivisionError"),
        ("json:no_such_function", "json has no such function"),
        ("math:pi", "math has no such function"),
    ],
)
def test_a_scorer_that_is_not_there_is_a_typed_error(tmp_path, monkeypatch, name, said):
    (tmp_path / "broken_scorers.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=said):
        load_scorer(name)


def test_rows_count_alike_however_many_sequences_they_have():
    results = [
        {"id": "a", "scores": {"right": 1.0}},
        {"id": "a", "scores": {"right": 0.0}},
        {"id": "a", "scores": {"right": 0.0}},
        {"id": "a", "scores": {"right": 1.0}},
        {"id": "b", "scores": {"right": 0.0, "length": 3.0}},
        {"id": "c", "error": "no"},
    ]
    right, length = summaries(results)
    assert (right.num_rows, right.num_sequences) == (2, 5)
    assert (right.mean, right.best) == (0.25, 0.5)
    assert right.mean_error == pytest.approx(0.25)
    assert right.best_error == pytest.approx(0.5)
    assert (length.name, length.mean, length.num_rows) == ("length", 3.0, 1)
    assert math.isnan(length.mean_error)


def test_the_table_has_the_best_of_several_only_where_there_are_several():
    scores = summaries([{"id": n, "scores": {"right": float(n % 2)}} for n in range(4)])
    assert table(scores, 1).splitlines() == [
        "score  rows  sequences    mean      +-",
        "right     4          4  0.5000  0.2887",
    ]
    assert "best of 8" in table(scores, 8)
