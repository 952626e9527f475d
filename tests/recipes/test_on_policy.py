"""The recipes of trainers beside GRPO: two steps on tiny checkpoints."""

import pytest
from launching import run_recipe, write_questions
from tiny import save_checkpoint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "has_teacher", "printed"),
    [("distillation", True, "loss 0."), ("online_dpo", False, "tokens a completion ")],
)
def test_two_steps_on_a_local_checkpoint(name, has_teacher, printed, tmp_path):
    folder = save_checkpoint(tmp_path / "model")
    questions = write_questions(tmp_path / "train.jsonl")
    sizes = ("--max-new-tokens",) if name == "online_dpo" else ("--max-completion-length",)
    output = run_recipe(
        name,
        *("--model", folder, "--dataset", questions, "--output-dir", tmp_path / "run"),
        *("--max-steps", 2, "--batch-size", 4, *sizes, 8),
        *(("--teacher", folder) if has_teacher else ()),
    )
    assert printed in output.splitlines()[-1]
