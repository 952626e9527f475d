"""The GSM8K recipe, for two steps on a tiny local checkpoint, through its own code."""

import gsm8k_grpo as recipe
import pytest
from launching import ACCELERATE, run_recipe, write_questions
from tiny import char_tokenizer, tiny_model


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7.\n#### 7", 7),
        ("#### 1,250", 1250),
        ("first #### 3 then #### 4", 4),
        (r"so \boxed{-2.5}", -2.5),
        ("there are 12 apples", 12),
        ("none", None),
        ("", None),
    ],
)
def test_the_final_number_is_read(text, number):
    assert recipe.final_number(text) == number


def test_a_reward_compares_numbers_of_text_and_of_chats():
    chat = [{"role": "assistant", "content": "#### 8"}]
    assert recipe.reward(["#### 7", chat, "none"], ["x #### 7", "#### 9", "#### 1"]) == [1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [True, False])
def test_two_steps_on_a_local_checkpoint(tmp_path, is_chat):
    tokenizer = char_tokenizer()
    if not is_chat:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    printed = run_recipe(
        "gsm8k_grpo",
        *("--model", tmp_path / "model", "--dataset", write_questions(tmp_path / "train.jsonl")),
        *("--output-dir", tmp_path / "run", "--max-steps", 2, "--batch-size", 8),
        *("--num-generations", 4, "--max-completion-length", 16),
        launcher=(*ACCELERATE, "--cpu", "--num_processes", "1") if is_chat else None,
        HF_DATASETS_CACHE=str(tmp_path / "cache"),
    )
    assert (tmp_path / "run" / "cb_rollout" / "report.html").exists()
    assert "processes: 1\n" in printed
    assert "sampling/sampling_logp_difference/max" in printed
    assert (tmp_path / "run" / "model.safetensors").exists()
