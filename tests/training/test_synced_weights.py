"""Every rollout of a trainer samples from what its model computes at that moment."""

import pytest
import torch
from peft import LoraConfig
from tiny_trainer import logged, tiny_trainer
from transformers import TrainerCallback

from cb_rollout import RolloutConfig, attach
from cb_rollout.integrations.trl import use_strategy
from cb_rollout.strategies import OverSampling

CHECKED = {"old_logps": "trainer", "verify_every_steps": 1}
LORA = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
COPY = RolloutConfig(weight_sync="copy", release_cache="never")
SHARED = RolloutConfig(weight_sync="shared", release_cache="never")


def by_copy(parameter, values):
    with torch.no_grad():
        parameter.copy_(values)


def by_data(parameter, values):
    parameter.data.copy_(values)


def by_pointer(parameter, values):
    parameter.data = values.clone()


class SwapsForEvaluation(TrainerCallback):
    """Evaluates with other weights, as an exponential moving average does."""

    def __init__(self, write):
        self._write, self._own = write, []

    def on_step_end(self, args, state, control, model=None, **_):
        self._own = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            self._write(parameter, -parameter.detach())

    def on_evaluate(self, args, state, control, model=None, **_):
        for parameter, values in zip(model.parameters(), self._own, strict=True):
            self._write(parameter, values)


@pytest.mark.parametrize("weight_sync", ["copy", pytest.param("shared", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "write",
    [
        by_data,
        pytest.param(by_copy, marks=pytest.mark.slow),
        pytest.param(by_pointer, marks=pytest.mark.slow),
    ],
)
def test_training_rolls_out_from_its_own_weights_after_an_evaluation_with_others(
    tmp_path, write, weight_sync
):
    trainer = tiny_trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.add_callback(SwapsForEvaluation(write))
    config = RolloutConfig(weight_sync=weight_sync, release_cache="never", **CHECKED)
    with attach(trainer, config):
        trainer.train()
    assert len(logged(trainer, "eval_reward")) == 3
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= 1e-5


@pytest.mark.slow
def test_a_strategy_samples_ahead_from_the_trainers_own_weights_after_an_evaluation(tmp_path):
    trainer = tiny_trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.add_callback(SwapsForEvaluation(by_data))
    with attach(trainer, RolloutConfig(weight_sync="copy", **CHECKED)):
        use_strategy(trainer, OverSampling(num_extra_groups=1))
        trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= 1e-5


@pytest.mark.parametrize("config", [COPY, pytest.param(SHARED, marks=pytest.mark.slow)])
def test_each_evaluation_samples_from_the_weights_that_were_loaded_for_it(tmp_path, config):
    trainer = tiny_trainer(tmp_path)
    first = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with attach(trainer, config) as generator:
        for checkpoint in (first, {name: -tensor for name, tensor in first.items()}, first):
            trainer.model.load_state_dict(checkpoint)
            trainer.evaluate()
            assert generator.verify(4).max <= 1e-5


def disabled(model):
    with model.disable_adapter():
        yield


def second_adapter(model):
    model.set_adapter("second")
    yield
    model.set_adapter("default")


def scaled(model):
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.scaling["default"] *= 8
    yield
    layer.scaling["default"] /= 8


@pytest.mark.parametrize("config", [COPY, SHARED], ids=["copy", "shared"])
@pytest.mark.parametrize(
    "switched",
    [
        disabled,
        pytest.param(second_adapter, marks=pytest.mark.slow),
        pytest.param(scaled, marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_samples_by_the_adapters_that_are_active_around_it(
    tmp_path, switched, config
):
    trainer = tiny_trainer(tmp_path, trainer_arguments={"peft_config": LORA})
    model = trainer.model
    model.add_adapter("second", LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    with attach(trainer, config) as generator:
        trainer.evaluate()
        during = switched(model)
        next(during)
        trainer.evaluate()
        assert generator.verify(4).max <= 1e-4
        next(during, None)
        trainer.evaluate()
        assert generator.verify(4).max <= 1e-4


def test_an_evaluation_of_several_batches_syncs_once(tmp_path):
    trainer = tiny_trainer(tmp_path, per_device_eval_batch_size=8)
    with attach(trainer, COPY) as generator:
        trainer.evaluate()
        assert generator.policy_version == 1
        trainer.evaluate()
        assert generator.policy_version == 1
