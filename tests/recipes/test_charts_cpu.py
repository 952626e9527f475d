"""The recipe that reads charts: its task, its split, and two GRPO steps through its own main."""

import random
import re

import charts_cpu as recipe
import numpy as np
import pytest
from launching import run_recipe


def charts(count, held_out=False):
    rng = random.Random(0)
    return [recipe.draw_chart(rng, held_out) for _ in range(count)]


def heights_of(picture):
    """The heights of the bars, from left to right, read from the pixels."""
    is_bar = (np.asarray(picture) != 255).any(-1)
    heights = is_bar.sum(0)
    starts = np.flatnonzero(np.diff(np.concatenate([[0], heights > 0])) == 1)
    return [round(heights[start] / recipe.UNIT) for start in starts]


def test_a_working_adds_up_the_bars_of_its_picture():
    for chart in charts(100):
        heights = heights_of(chart.picture)
        assert 2 <= len(heights) <= recipe.MAX_BARS
        assert sum(heights) == chart.answer
        assert [int(term) for term in re.findall(r"(?:^|\+)(\d)", chart.worked)] == heights
        assert chart.worked.endswith(f"+{heights[-1]}={chart.answer}")
        assert chart.worked.startswith(f"{chart.short}+")
        assert len(chart.worked) < recipe.MAX_COMPLETION


def test_only_the_final_number_counts():
    texts = ["5+2=7+4=11", "11", "5+2=7", "5+2=7+4=", ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert recipe.reward(completions, [11] * len(texts)) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_sides_of_the_split_never_overlap():
    train, held_out = ({chart.worked for chart in charts(300, side)} for side in (False, True))
    assert len(held_out) > 50
    assert not train & held_out


def test_the_warm_start_learns_workings_and_their_ends_alone():
    processor, drawn = recipe.create_processor(), charts(20)
    batch = recipe.create_batch(processor, drawn, [chart.short for chart in drawn])
    num_patches = (recipe.SIDE // recipe.PATCH) ** 2
    for row, labels, chart in zip(batch["input_ids"], batch["labels"], drawn, strict=True):
        assert (row == recipe.IMAGE).sum() == num_patches
        learned = "".join(recipe.WORDS[label] for label in labels.tolist() if label >= 0)
        assert learned == f"{chart.short}<eos>"


@pytest.mark.slow
def test_two_steps_end_with_the_figures(tmp_path):
    printed = run_recipe(
        "charts_cpu",
        *("--warmup-steps", 2, "--max-steps", 2, "--num-held-out", 16),
        *("--output-dir", tmp_path / "run"),
        HF_DATASETS_CACHE=str(tmp_path / "cache"),
    )
    for phrase in ("held-out accuracy", "the same by model.generate", "report"):
        assert phrase in printed
    report = tmp_path / "run" / "cb_rollout" / "report.html"
    assert 'src="data:image/png;base64,' in report.read_text()
