"""Trainers whose loss takes the experts of the rollout, however its rows are ordered and padded."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from playback import TOOLS, double, with_tools
from tiny import tiny_model
from tiny_trainer import PROBLEMS, logged, tiny_trainer
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, attach

EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}
DISAGREEMENT = "rollout/router_disagreement"
DIFFERENCE = "sampling/sampling_logp_difference/max"
SETTINGS = {"per_device_train_batch_size": 8, "num_generations": 4, "optim": "sgd", "max_steps": 2}


def trained(output_dir, *, dtype=torch.float32, config=None, **settings):
    model = tiny_model("qwen3_moe", vocab_size=99, **EXPERTS).to(dtype)
    trainer = tiny_trainer(output_dir, model=model, **(SETTINGS | settings))
    defaults = {"router_replay": True, "verify_every_steps": 1, "old_logps": "trainer"}
    generator = attach(trainer, RolloutConfig(**(defaults | (config or {}))))
    trainer.train()
    generator.close()
    return trainer


LORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({}, {"steps_per_generation": 2}),
        pytest.param(
            {"loss_forward": "trainer"}, {"steps_per_generation": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            {},
            {"trainer_class": RLOOTrainer, "config_class": RLOOConfig},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {},
            {"beta": 0.1, "trainer_arguments": {"peft_config": LORA}},
            marks=pytest.mark.slow,
        ),
        ({"sampling_mask": "replay"}, {"top_k": 20}),
    ],
    ids=["packed", "padded", "rloo", "adapters", "masks"],
)
def test_on_its_own_policy_every_router_agrees_with_the_record(tmp_path, config, settings):
    trainer = trained(tmp_path, config=config, learning_rate=1e-5, **settings)
    found = logged(trainer, DISAGREEMENT)
    assert len(found) == 2
    # A record of another row or token would differ nearly everywhere. Weights may have moved a bit.
    assert found[0] == 0
    assert max(found) < 0.01
    assert max(logged(trainer, "rollout/logprob_drift_max")) < 1e-4


@pytest.mark.parametrize("loss_forward", ["packed", "trainer"])
def test_a_stale_batch_is_trained_on_with_the_experts_of_its_rollout(tmp_path, loss_forward):
    stale = {"num_iterations": 2, "learning_rate": 2.0, "activation_checkpointing": True}
    trainer = trained(tmp_path, config={"loss_forward": loss_forward}, **stale)
    first, second = logged(trainer, DISAGREEMENT)
    assert first == 0
    assert second > 0


@pytest.mark.slow
def test_in_bfloat16_sampled_and_trained_log_probabilities_differ_by_rounding_alone(tmp_path):
    differences = {}
    for router_replay in (True, False):
        trainer = trained(
            tmp_path / str(router_replay),
            dtype=torch.bfloat16,
            config={"router_replay": router_replay, "loss_forward": "trainer"},
            max_completion_length=60,
        )
        differences[router_replay] = max(logged(trainer, DIFFERENCE))
        assert bool(logged(trainer, DISAGREEMENT)) == router_replay
    assert differences[True] < 0.05
    assert differences[False] > 2 * differences[True]


def test_each_turn_of_a_tool_loop_keeps_the_experts_of_its_tokens(tmp_path, monkeypatch):
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROBLEMS[:8]]
    trainer = trained(
        tmp_path,
        reward=lambda completions, **_: [float(len(str(c)) % 3) for c in completions],
        prepare_tokenizer=lambda tokenizer: with_tools(monkeypatch, tokenizer),
        trainer_arguments={"train_dataset": Dataset.from_list(rows), "tools": [double]},
        **(TOOLS | {"max_steps": 1}),
    )
    assert logged(trainer, DISAGREEMENT) == [0]


def test_completions_of_somebody_else_have_no_experts(tmp_path):
    def other(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": [[0.0] * len(i) for i in ids]}

    with pytest.raises(ConfigurationError, match="router_replay=True needs completions"):
        trained(tmp_path, trainer_arguments={"rollout_func": other})
