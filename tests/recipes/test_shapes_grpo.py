"""The recipe with pictures: its task, and two steps on a tiny checkpoint with its processor."""

import random

import numpy as np
import pytest
import shapes_grpo as recipe
from launching import run_recipe
from tiny_vision import tiny_vision_model


def test_a_picture_holds_as_many_shapes_as_the_answer_says():
    rng = random.Random(0)
    for _ in range(50):
        row = recipe.draw_row(rng)
        (colour,) = (name for name in recipe.COLOURS if name in row["prompt"][0]["content"])
        pixels = np.asarray(row["image"])
        channel = recipe.COLOURS.index(colour)
        is_white = (pixels == 255).all(-1)
        cell = recipe.SIDE // recipe.CELLS
        is_there = (pixels[..., channel] > 100) & ~is_white
        cells = is_there.reshape(recipe.CELLS, cell, recipe.CELLS, cell).any((1, 3))
        assert 1 <= row["answer"] <= cells.sum()


def test_only_the_last_number_counts():
    texts = ["There are 3 circles.", "3 or 4", "none", "0"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert recipe.reward(completions, [3, 3, 1, 0]) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.slow
def test_two_steps_on_a_local_checkpoint(tmp_path):
    model, processor = tiny_vision_model("llava")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    printed = run_recipe(
        "shapes_grpo",
        *("--model", tmp_path / "model", "--output-dir", tmp_path / "run", "--max-steps", 2),
        *("--num-pictures", 8, "--batch-size", 8, "--num-generations", 4),
        *("--max-completion-length", 8),
        HF_DATASETS_CACHE=str(tmp_path / "cache"),
    )
    report = tmp_path / "run" / "cb_rollout" / "report.html"
    assert 'src="data:image/png;base64,' in report.read_text()
    assert "sampling/sampling_logp_difference/max" in printed
    assert (tmp_path / "run" / "model.safetensors").exists()
