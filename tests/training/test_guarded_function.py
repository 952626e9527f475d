"""The guard and `verify` see a model that computes something else than in its rollout."""

import pytest
import torch
from peft import LoraConfig
from tiny import tiny_model
from tiny_trainer import tiny_trainer

from cb_rollout import LogprobDriftError, RolloutConfig, attach

LORA = LoraConfig(
    r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False
)
GUARDED = {"verify_every_steps": 1, "max_logprob_drift": 1e-3, "on_logprob_drift": "raise"}


def planted_wrapper(trainer):
    """The outermost forward changes the tokens that it passes on to the model inside."""
    own = trainer.model.forward

    def forward(input_ids, **named):
        return own(input_ids=(input_ids + 1) % 99, **named)

    trainer.model.forward = forward


def switched_adapter(trainer):
    trainer.model.set_adapter("second")


def disabled_adapter(trainer):
    trainer.model.base_model.disable_adapter_layers()


def changed_number(trainer):
    for layer in trainer.model.get_base_model().model.layers:
        layer.self_attn.scaling *= 3


def changed_config(trainer):
    trainer.model.get_base_model().config.final_logit_softcapping = 0.5


def trainer_with_two_adapters(folder):
    model = tiny_model("gemma2", vocab_size=99)
    trainer = tiny_trainer(folder, model=model, trainer_arguments={"peft_config": LORA})
    trainer.model.add_adapter("second", LORA)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "second" in name:
                parameter.normal_()
    return trainer


FAULTS = [planted_wrapper, switched_adapter, disabled_adapter, changed_number, changed_config]


@pytest.mark.parametrize("loss_forward", ["trainer", "packed"])
@pytest.mark.parametrize(
    "fault", [FAULTS[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FAULTS[1:])]
)
@pytest.mark.filterwarnings("ignore:loss_forward='packed' is switched off:UserWarning")
@pytest.mark.filterwarnings("ignore:loss_forward='packed'. prompts cannot be:UserWarning")
def test_the_guard_sees_a_model_that_changes_after_its_rollout(tmp_path, fault, loss_forward):
    trainer = trainer_with_two_adapters(tmp_path)
    config = RolloutConfig(seed=0, loss_forward=loss_forward, **GUARDED)
    drifts = pytest.raises(LogprobDriftError, match="from the trainer's forward")
    with attach(trainer, config), drifts:
        generate = trainer.vllm_generation.generate

        def generate_and_change(*arguments, **named):
            generated = generate(*arguments, **named)
            fault(trainer)
            return generated

        trainer.vllm_generation.generate = generate_and_change
        trainer.train()


@pytest.mark.parametrize(
    "fault", [FAULTS[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FAULTS[1:])]
)
def test_verify_sees_a_model_that_changed_since_its_rollout(tmp_path, fault):
    trainer = trainer_with_two_adapters(tmp_path)
    with attach(trainer, RolloutConfig(seed=0)) as generator:
        generator.generate_batch([[5, 6, 7, 8]], max_new_tokens=8)
        assert generator.verify(1).max <= 1e-4
        fault(trainer)
        assert generator.verify(1).max > 1e-2
