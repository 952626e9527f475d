"""A rollout_func that generates by itself, under a trainer that nothing is attached to."""

import pytest
import torch
from playback import assert_learned_alike, double, play_back, watched, with_tools
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
from cb_rollout.integrations.trl.rollout_func import OWN

QUICK = {"per_device_train_batch_size": 8, "num_generations": 4, "optim": "sgd"}


def with_rollout_func(output_dir, rollout, **settings):
    arguments = {"trainer_arguments": {"rollout_func": rollout}}
    return tiny_trainer(output_dir, **(QUICK | arguments | settings))


def engine_of(trainer):
    return vars(trainer)[OWN].backend.generator


class LastWeights(TrainerCallback):
    """Each step's weights before it."""

    def __init__(self):
        self.policies = []

    def on_step_begin(self, args, state, control, model=None, **_):
        policy = tiny_model(vocab_size=99)
        policy.load_state_dict(model.state_dict())
        self.policies.append(policy)


@pytest.mark.parametrize("num_iterations", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_it_samples_is_learned_as_trl_learns_what_it_generates(tmp_path, num_iterations):
    settings = {"num_iterations": num_iterations, "max_steps": 4}
    sampled, rollout = [], make_rollout_func()

    def rollout_and_keep(prompts, trainer):
        output = rollout(prompts, trainer)
        sampled.append(output)
        return output

    trainer = with_rollout_func(tmp_path / "ours", rollout_and_keep, **settings)
    ours, weights = watched(trainer), LastWeights()
    trainer.add_callback(weights)
    trainer.train()
    generator = engine_of(trainer)
    num_rollouts = 4 // num_iterations
    assert len(sampled) == num_rollouts
    assert logged(trainer, "rollout/policy_version") == list(range(1, num_rollouts + 1))
    assert not generator.manager.loop.is_live()
    assert generator.manager.engine.cache_bytes == 0
    assert len(logged(trainer, "rollout/step_share")) == 4
    assert not trainer.use_vllm
    for policy, output in zip(weights.policies[::num_iterations], sampled, strict=True):
        for prompt, tokens, values in zip(*output.values(), strict=True):
            assert values == pytest.approx(plain_logprobs(policy, prompt, tokens), abs=1e-5)
    ours.turns = [output["completion_ids"] for output in sampled]
    theirs = tiny_trainer(tmp_path / "theirs", **(QUICK | settings))
    record = play_back(theirs, ours.turns)
    theirs.train()
    assert_learned_alike(ours, record)


def test_weights_are_synced_once_a_step_whatever_asks(tmp_path):
    rollout, seen = make_rollout_func(config=RolloutConfig(release_cache="never")), []

    def twice(prompts, trainer):
        first = rollout(prompts, trainer)
        output = rollout(first["prompt_ids"], trainer)
        seen.append((trainer.model.training, engine_of(trainer).policy_version))
        return output

    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    trainer = with_rollout_func(tmp_path, twice, **evaluated)
    trainer.train()
    assert seen == [(True, 1), (True, 2), (False, 3)]
    assert logged(trainer, "eval_rollout/policy_version") == [3]
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.1)
    trainer.train()  # starts at a step that was there before
    assert [version for is_training, version in seen[3:] if is_training] == [4, 5]
    assert engine_of(trainer).manager.engine.cache_bytes > 0


def test_functions_of_one_trainer_share_an_engine_and_attach_takes_over(tmp_path):
    first = make_rollout_func(config=RolloutConfig(block_size=8))
    second = make_rollout_func(SamplingParams(max_new_tokens=2, ignore_eos=True), RolloutConfig())
    third = make_rollout_func(SamplingParams(max_new_tokens=2), RolloutConfig(block_size=8))
    trainer = with_rollout_func(tmp_path, first)
    callbacks = list(trainer.callback_handler.callbacks)
    prompts = [row["prompt"] for row in PROBLEMS[:2]]
    trainer.train()
    generator = engine_of(trainer)
    third(prompts, trainer)
    assert engine_of(trainer) is generator
    with pytest.raises(ConfigurationError, match="have two configs; give both the same"):
        second(prompts, trainer)
    attached = attach(trainer)
    assert not generator.manager.is_running()
    assert OWN not in vars(trainer)
    with pytest.raises(ConfigurationError, match=r"give it to attach\(\) alone"):
        first(prompts, trainer)
    trainer.rollout_func = make_rollout_func()
    trainer.train()
    assert attached.policy_version == 3
    detach(trainer)
    assert not [name for name in vars(trainer) if "cb_rollout" in name]
    assert trainer.callback_handler.callbacks == callbacks
    assert [len(ids) for ids in second(prompts, trainer)["completion_ids"]] == [2, 2]
    assert engine_of(trainer).policy_version == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"old_logps": "rollout"},
        {"sampling_mask": "replay"},
        {"verify_every_steps": 1},
        {"max_logprob_drift": 0.1},
        {"record_num_sequences": 8},
    ],
    ids=str,
)
def test_what_concerns_the_loss_needs_attach(setting):
    (name,) = setting
    with pytest.raises(ConfigurationError, match=rf"{name}=.*call cb_rollout\.attach\(trainer"):
        make_rollout_func(config=RolloutConfig(**setting))
    make_rollout_func(config=RolloutConfig(verify_every_steps=0, record_num_sequences=0))


def test_what_it_cannot_tell_the_trainer_is_refused(tmp_path, monkeypatch):
    stopped = make_rollout_func(SamplingParams(stop=("7",), max_new_tokens=4))
    trainer = with_rollout_func(tmp_path, stopped, mask_truncated_completions=True)
    with pytest.raises(ConfigurationError, match="a stop string ended, which only an attached"):
        trainer.train()
    trainer = tiny_trainer(
        tmp_path,
        prepare_tokenizer=lambda tokenizer: with_tools(monkeypatch, tokenizer),
        trainer_arguments={"tools": [double], "rollout_func": make_rollout_func()},
    )
    with pytest.raises(ConfigurationError, match="generates each later turn itself; call"):
        trainer.train()
    trainer = with_rollout_func(tmp_path, make_rollout_func(), top_p=0.8, max_steps=1)
    with pytest.warns(UserWarning, match="completions are sampled from part of the distribution"):
        trainer.train()
