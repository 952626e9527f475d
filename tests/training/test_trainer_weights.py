"""The weights that a stock trainer rolls out from, and the memory that its training will take."""

import pytest
import torch
from peft import LoraConfig
from tiny_trainer import logged, tiny_trainer

from cb_rollout import ConfigurationError, RolloutConfig, attach
from cb_rollout.integrations.trl import use_strategy
from cb_rollout.strategies import OverSampling, PartialRollouts

CHECKED = {"old_logps": "trainer", "verify_every_steps": 1, "verify_weight_sync": True}
LORA = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


@pytest.mark.fast_cases("whole")
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
    assert generator.manager.engine.training_model.is_copied
    generator.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "peft_config",
    [pytest.param(None, id="whole"), pytest.param(LORA, id="lora", marks=pytest.mark.slow)],
)
def test_a_trainer_whose_rollouts_release_the_copys_weights_trains_as_one_that_keeps_them(
    tmp_path, monkeypatch, peft_config
):
    """Several rollouts of one optimizer step, and an evaluation, each need a sync of their own."""
    sizes, weights = {}, {}
    arguments = {"peft_config": peft_config} if peft_config else {}
    for release_cache in ("never", "with_weights"):
        # Where TRL generates before each micro-batch, most rollouts follow no optimizer step.
        trainer = tiny_trainer(
            tmp_path,
            trainer_arguments=arguments,
            gradient_accumulation_steps=2,
            steps_per_generation=1,
            eval_strategy="steps",
            eval_steps=2,
        )
        config = RolloutConfig(weight_sync="copy", release_cache=release_cache, **CHECKED)
        generator = attach(trainer, config)
        during = sizes[release_cache] = []
        step = trainer.training_step

        def noted(*arguments, generator=generator, during=during, step=step, **named):
            loss = step(*arguments, **named)
            storages = {p.untyped_storage() for p in generator.manager.model.parameters()}
            during.append(sum(storage.nbytes() for storage in storages))
            return loss

        trainer.training_step = noted
        trainer.train()
        assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
        assert len(logged(trainer, "eval_reward")) == 2
        weights[release_cache] = [p.detach().clone() for p in trainer.model.parameters()]
        is_away = release_cache == "with_weights"
        assert bool(generator.manager.pauses.reasons) == is_away
        generator.sync_weights()
        assert generator.generate_batch([[5, 6, 7]])
        generator.close()
    assert min(sizes["never"]) > 0
    assert set(sizes["with_weights"]) == {0}
    assert all(map(torch.equal, *weights.values()))


def test_a_strategy_that_carries_sequences_does_not_release_their_weights(tmp_path):
    trainer = tiny_trainer(tmp_path)
    generator = attach(trainer, RolloutConfig(weight_sync="copy", release_cache="with_weights"))
    with pytest.raises(ConfigurationError, match="no carried sequence could be cancelled"):
        use_strategy(trainer, PartialRollouts())
    use_strategy(trainer, OverSampling(num_extra_groups=1))
    trainer.train()
    generator.close()


@pytest.mark.slow
def test_bf16_training_of_float32_weights_takes_a_copy_by_itself(tmp_path):
    trainer = tiny_trainer(tmp_path, bf16=True, eval_strategy="steps", eval_steps=2)
    generator = attach(trainer, RolloutConfig(**CHECKED))
    trainer.train()
    assert len(logged(trainer, "eval_reward")) == 2
    assert generator.manager.engine.paged_model.layout.layers[0].values.dtype == torch.bfloat16
    copy = generator.manager.model
    assert generator.manager.engine.training_model.is_copied
    assert copy.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    # bf16 rounds the padded batch of the trainer's forward otherwise than the row of a decode step.
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.05
    generator.close()


def test_bf16_training_with_adapters_runs_them_unmerged_over_the_models_own_weights(
    tmp_path,
):
    trainer = tiny_trainer(tmp_path, bf16=True, trainer_arguments={"peft_config": LORA})
    generator = attach(trainer, RolloutConfig(release_cache="never", **CHECKED))
    trainer.train()
    base = trainer.model.get_base_model()
    assert generator.manager.model is base
    generator.generate_batch([[5, 6, 7, 8, 9]], max_new_tokens=2)
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.05
    generator.close()


def size_of(trainer):
    return sum(p.nbytes for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("settings", "num_states"),
    [({}, 2), ({"optim": "sgd"}, 0), ({"optim": "adafactor"}, 0)],
)
def test_the_reserve_follows_the_trainers_own_optimizer(tmp_path, settings, num_states):
    trainer = tiny_trainer(tmp_path, **settings)
    generator = attach(trainer)
    assert generator.memory_plan().training.reserve == (1 + num_states) * size_of(trainer)
    generator.close()


def test_an_optimizer_that_the_trainer_was_given_is_taken_at_its_word(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1e-3, momentum=0.9)
    generator = attach(trainer)
    assert generator.memory_plan().training.reserve == 2 * size_of(trainer)
    generator.close()


@pytest.mark.fast_cases("between_steps")
@pytest.mark.parametrize("release_cache", ["between_steps", "never"])
def test_a_trainers_first_step_is_measured_and_the_plan_made_anew(tmp_path, release_cache):
    trainer = tiny_trainer(tmp_path)
    generator = attach(trainer, RolloutConfig(release_cache=release_cache))
    plan = generator.memory_plan()
    trainer.train()
    measured = generator.memory_plan()
    assert measured is not plan
    training = measured.training
    assert training.is_measured
    assert training.optimizer_states >= 2 * size_of(trainer)
    assert training.gradients_to_come == training.optimizer_states_to_come == 0
    if release_cache == "between_steps":
        assert training.activations == 0, "the cache was away while training took its peak"
    generator.close()
