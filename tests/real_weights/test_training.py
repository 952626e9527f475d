"""A stock `GRPOTrainer` on a real model, SmolLM2-135M-Instruct, attaches and trains."""

import math

import pytest
import torch
from datasets import Dataset
from documented import block, run
from peft import LoraConfig
from tiny_trainer import logged
from trl import GRPOConfig, GRPOTrainer

from cb_rollout import RolloutConfig, attach, detach
from measure.agreement import QUESTIONS

pytestmark = pytest.mark.slow

# "auto" copies under autocast, and shares the module in float32. Each precision trains the whole
# model and adapters, from either place of the weights.
CASES = [
    pytest.param(True, False, "auto", id="bf16-full-auto"),
    pytest.param(True, True, "auto", id="bf16-lora-auto"),
    pytest.param(True, True, "shared", id="bf16-lora-shared"),
    pytest.param(False, True, "auto", id="float32-lora-auto"),
    pytest.param(False, False, "copy", id="float32-full-copy"),
]
# TRL's own defaults, full fine-tuning in bf16, train for longer.
LONG = (True, False, "auto")


def share_of_vowels(completions, **_):
    texts = [completion[0]["content"].lower() for completion in completions]
    return [sum(map(text.count, "aeiou")) / max(1, len(text)) for text in texts]


@pytest.mark.parametrize(("bf16", "is_lora", "weight_sync"), CASES)
def test_a_stock_trainer_trains(tmp_path, smollm2, bf16, is_lora, weight_sync):
    num_steps = 2 if (bf16, is_lora, weight_sync) == LONG else 1
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    trainer = GRPOTrainer(
        model=str(smollm2),
        reward_funcs=share_of_vowels,
        args=GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=num_steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=16,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=bf16,
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(task_type="CAUSAL_LM") if is_lora else None,
    )
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    before = [p.detach().clone() for p in trained]
    attach(trainer, RolloutConfig(weight_sync=weight_sync, verify_every_steps=1))
    trainer.train()
    detach(trainer)
    assert trainer.state.global_step == num_steps
    assert any(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
    assert len(logged(trainer, "rollout/logprob_drift_mean")) == num_steps
    # Packed: each prompt once for its group, and no padding.
    computed = logged(trainer, "rollout/loss_tokens_computed")
    assert len(computed) == num_steps
    assert computed == logged(trainer, "rollout/loss_tokens_useful")


def test_the_example_of_the_readme_trains(tmp_path, monkeypatch, smollm2):
    monkeypatch.chdir(tmp_path)
    example = block("A first run", "README.md")
    for said, here in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", str(smollm2)),
        ("max_completion_length=48", "max_completion_length=8"),
        ("max_steps=20", "max_steps=1"),
    ):
        assert said in example
        example = example.replace(said, here)
    trainer = run(example)["trainer"]
    assert trainer.state.global_step == 1
    assert list((tmp_path / "sums" / "cb_rollout").iterdir())
