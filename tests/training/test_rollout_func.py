"""A rollout_func that samples by the engine of an attached trainer."""

import pytest
import torch
from tiny import plain_logprobs, tiny_model
from tiny_trainer import PROBLEMS, logged, tiny_trainer
from transformers import TrainerCallback

from cb_rollout import (
    ConfigurationError,
    RolloutConfig,
    SamplingParams,
    attach,
    detach,
    make_rollout_func,
)

QUICK = {"per_device_train_batch_size": 8, "num_generations": 4, "optim": "sgd"}


def with_rollout_func(output_dir, rollout, **settings):
    arguments = {"trainer_arguments": {"rollout_func": rollout}}
    return tiny_trainer(output_dir, **(QUICK | arguments | settings))


class LastWeights(TrainerCallback):
    """Each step's weights before it."""

    def __init__(self):
        self.policies = []

    def on_step_begin(self, args, state, control, model=None, **_):
        policy = tiny_model(vocab_size=99)
        policy.load_state_dict(model.state_dict())
        self.policies.append(policy)


def test_what_it_samples_has_the_log_probabilities_of_the_steps_weights(tmp_path):
    sampled, rollout = [], make_rollout_func()

    def rollout_and_keep(prompts, trainer):
        output = rollout(prompts, trainer)
        sampled.append(output)
        return output

    trainer, weights = with_rollout_func(tmp_path, rollout_and_keep, max_steps=3), LastWeights()
    trainer.add_callback(weights)
    attach(trainer, RolloutConfig(verify_every_steps=1, max_logprob_drift=1e-4))
    trainer.train()
    assert logged(trainer, "rollout/policy_version") == [1, 2, 3]
    for policy, output in zip(weights.policies, sampled, strict=True):
        for prompt, tokens, values in zip(*output.values(), strict=True):
            assert values == pytest.approx(plain_logprobs(policy, prompt, tokens), abs=1e-5)
    detach(trainer)


def test_weights_are_synced_once_a_step_whatever_asks(tmp_path):
    rollout, seen = make_rollout_func(), []

    def twice(prompts, trainer):
        first = rollout(prompts, trainer)
        output = rollout(first["prompt_ids"], trainer)
        seen.append((trainer.model.training, generator.policy_version))
        return output

    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    trainer = with_rollout_func(tmp_path, twice, **evaluated)
    generator = attach(trainer, RolloutConfig(release_cache="never"))
    trainer.train()
    assert seen == [(True, 1), (True, 2), (False, 3)]
    assert logged(trainer, "eval_rollout/policy_version") == [3]
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.1)
    trainer.train()  # starts at a step that was there before
    assert [version for is_training, version in seen[3:] if is_training] == [4, 5]
    detach(trainer)


def test_it_needs_attach_and_has_parameters_of_its_own(tmp_path):
    rollout = make_rollout_func(SamplingParams(max_new_tokens=2, ignore_eos=True))
    trainer = with_rollout_func(tmp_path, rollout, max_steps=1)
    with pytest.raises(ConfigurationError, match=r"call cb_rollout\.attach\(trainer\) first"):
        trainer.train()
    attach(trainer)
    prompts = [row["prompt"] for row in PROBLEMS[:2]]
    assert [len(ids) for ids in rollout(prompts, trainer)["completion_ids"]] == [2, 2]
    detach(trainer)
    assert not [name for name in vars(trainer) if "cb_rollout" in name]
