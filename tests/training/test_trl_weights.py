"""Stock trainers roll out from a copy of their weights, whole or with adapters."""

import pytest
import torch
from peft import LoraConfig
from tiny_trainer import logged, tiny_trainer

from cb_rollout import RolloutConfig, attach

CHECKED = {"verify_every_steps": 1, "verify_weight_sync": True}
LORA = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["whole", "lora"])
def test_a_trainer_rolls_out_from_a_copy_that_follows_every_step(tmp_path, peft_config):
    arguments = {"peft_config": peft_config} if peft_config else {}
    trainer = tiny_trainer(tmp_path, trainer_arguments=arguments, learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    generator = attach(trainer, RolloutConfig(weight_sync="copy", **CHECKED))
    trainer.train()
    after = dict(trainer.model.named_parameters())
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert changed
    if peft_config:
        assert all("lora_" in name for name in changed)
    assert generator.policy_version == 3
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= 1e-5
    assert generator.manager.model is not generator.manager._engine.trained
    generator.close()


def test_bf16_training_of_float32_weights_takes_a_copy_by_itself(tmp_path):
    trainer = tiny_trainer(tmp_path, bf16=True, eval_strategy="steps", eval_steps=2)
    generator = attach(trainer, RolloutConfig(**CHECKED))
    trainer.train()
    assert len(logged(trainer, "eval_reward")) == 2
    assert generator.manager._engine.layout.layers[0].values.dtype == torch.bfloat16
    copy = generator.manager.model
    assert copy is not generator.manager._engine.trained
    assert copy.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    # bf16 rounds the padded batch of the trainer's forward otherwise than the row of a decode step.
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.05
    generator.close()


def test_bf16_training_with_adapters_runs_them_unmerged(tmp_path):
    trainer = tiny_trainer(tmp_path, bf16=True, trainer_arguments={"peft_config": LORA})
    generator = attach(trainer, RolloutConfig(**CHECKED))
    trainer.train()
    assert generator.manager.model is trainer.model.get_base_model()
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.05
    generator.close()
