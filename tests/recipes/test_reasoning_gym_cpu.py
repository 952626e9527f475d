"""The recipe on reasoning-gym: its score, its split, and two steps through its own code."""

import sys
import warnings

import pytest
from accelerate.state import AcceleratorState, PartialState

pytest.importorskip("reasoning_gym", reason="needs `pip install reasoning-gym`")

import reasoning_gym_cpu as recipe


def test_problems_are_scored_by_their_own_verifier():
    problems = recipe.draw_problems(3, seed=0, held_out=False)
    rows = recipe.as_rows(problems)
    answers = [entry["answer"] for entry in problems]
    assert recipe.score(answers, rows["entry"]) == [1] * 3
    assert recipe.is_right(answers, rows["entry"]) == [1] * 3
    wrong = [answer[:-1] for answer in answers]
    assert max(recipe.score(wrong, rows["entry"])) < 1
    assert recipe.is_right(wrong, rows["entry"]) == [0] * 3


def test_the_sides_of_the_split_never_overlap():
    train = recipe.draw_problems(50, seed=0, held_out=False)
    held_out = recipe.draw_problems(20, seed=0, held_out=True)
    questions = [entry["question"] for entry in (*train, *held_out)]
    assert len(set(questions)) == len(questions) == 70


@pytest.mark.slow
def test_the_recipe_runs_two_steps_and_ends_with_its_figure(monkeypatch, capsys, tmp_path):
    settings = {"warmup-steps": 2, "max-steps": 2, "num-held-out": 8, "output-dir": tmp_path}
    arguments = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["reasoning_gym_cpu", *arguments])
    try:
        # transformers and trl warn about each other, which no recipe can change.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert recipe.main() == 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("held-out accuracy ")
