"""The GSM8K recipe, for two steps on a tiny local checkpoint, through its own code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gsm8k_grpo as recipe
import pytest
from tiny import char_tokenizer, tiny_model

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 240
# A run that hangs is killed and fails the test.


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


@pytest.mark.parametrize("is_chat", [True, False])
def test_two_steps_on_a_local_checkpoint(tmp_path, is_chat):
    tokenizer = char_tokenizer()
    if not is_chat:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"),
        *(str(ROOT / "recipes" / "gsm8k_grpo.py"), "--model", str(tmp_path / "model")),
        *("--dataset", str(tmp_path / "train.jsonl"), "--output-dir", str(tmp_path / "run")),
        *("--max-steps", "2", "--batch-size", "8", "--num-generations", "4"),
        *("--max-completion-length", "16"),
    ]
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "run" / "cb_rollout" / "report.html").exists()
    assert "sampling/sampling_logp_difference/max" in result.stdout
    assert (tmp_path / "run" / "model.safetensors").exists()
