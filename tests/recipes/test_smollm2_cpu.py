"""The recipe on a real model: its split, its reward, and one step from weights to a checkpoint."""

import sys
import warnings

import pytest
from accelerate.state import AcceleratorState, PartialState

pytest.importorskip("reasoning_gym", reason="needs `pip install reasoning-gym`")

import smollm2_cpu as recipe


def test_the_sides_of_the_split_never_overlap():
    train = recipe.draw_problems(50, seed=0, held_out=False)
    held_out = recipe.draw_problems(20, seed=0, held_out=True)
    questions = [problem["prompt"][0]["content"] for problem in (*train, *held_out)]
    assert len(set(questions)) == len(questions) == 70


def test_the_last_number_counts():
    texts = ["7 - 12 = -5", "It is -5, not 5", "-5.", "none"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert recipe.reward(completions, ["-5"] * 4) == [1, 0, 1, 0]


@pytest.mark.slow
def test_the_recipe_runs_a_step_from_published_weights_to_a_checkpoint(
    monkeypatch, capsys, tmp_path, smollm2
):
    settings = {"model": smollm2, "output-dir": tmp_path, "max-steps": 1}
    settings |= {"batch-size": 8, "num-held-out": 2}
    arguments = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(recipe, "MAX_COMPLETION", 16)
    monkeypatch.setattr(sys, "argv", ["smollm2_cpu", *arguments])
    try:
        # transformers and trl warn about each other, which no recipe can change.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert recipe.main() == 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("held-out accuracy ")
    assert (tmp_path / "checkpoint" / "model.safetensors").exists()
