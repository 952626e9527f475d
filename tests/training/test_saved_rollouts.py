"""A training that saves its rollouts, and another one that trains from them without an engine."""

import os
from functools import partial

import pytest
from datasets import Dataset, load_dataset
from playback import TOOLS, double, with_tools
from tiny import tiny_model
from tiny_trainer import logged, tiny_trainer
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, SavedRollouts, attach, detach
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.strategies import OverSampling

NAMES = ("loss", "grad_norm", "reward", "sampling/sampling_logp_difference/max")
CHATS = [{"prompt": [{"role": "user", "content": f"{n} is what?"}]} for n in range(32)]
MOE = {"num_experts": 16, "num_experts_per_tok": 4}


def trained(output_dir, attached, **settings):
    trainer = tiny_trainer(output_dir, **({"max_steps": 3} | settings))
    attach(trainer, attached)
    if "eval_strategy" in settings:
        trainer.evaluate()
    trainer.train()
    detach(trainer)
    return trainer


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same(first, second):
    for name in NAMES:
        assert logged(first, name) == logged(second, name), name
    after = weights(second)
    assert all(p.equal(after[name]) for name, p in weights(first).items())


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({}, {}),
        ({}, {"num_iterations": 2, "eval_strategy": "steps", "eval_steps": 2}),
        pytest.param(
            {}, {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"sampling_mask": "replay"},
            {"generation_kwargs": {"top_k": 20}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["grpo", "iterations", "rloo", "masks"],
)
def test_saved_rollouts_give_the_same_losses_in_every_bit(tmp_path, config, settings):
    folder = str(tmp_path / "rollouts")
    first = trained(tmp_path / "first", RolloutConfig(save_rollouts=folder, **config), **settings)
    second = trained(
        tmp_path / "second", SavedRollouts(folder, RolloutConfig(**config)), **settings
    )
    assert_same(first, second)
    assert max(map(abs, logged(first, "loss"))) > 0


@pytest.mark.slow
def test_experts_are_saved_and_replayed(tmp_path):
    folder, config = str(tmp_path / "rollouts"), RolloutConfig(router_replay=True)

    def once(attached):
        model = tiny_model("qwen3_moe", vocab_size=99, **MOE)
        return trained(tmp_path, attached, model=model, num_iterations=2, learning_rate=2.0)

    first = once(RolloutConfig(router_replay=True, save_rollouts=folder))
    second = once(SavedRollouts(folder, config))
    assert_same(first, second)
    disagreement = logged(second, "rollout/router_disagreement")
    assert disagreement == logged(first, "rollout/router_disagreement")
    assert disagreement[0] == 0 < disagreement[1]


def test_turns_with_tools_are_saved_call_by_call(tmp_path, monkeypatch):
    folder = str(tmp_path / "rollouts")
    settings = TOOLS | {
        "trainer_arguments": {"tools": [double], "train_dataset": Dataset.from_list(CHATS)},
        "prepare_tokenizer": partial(with_tools, monkeypatch),
        "reward": lambda completions, **_: [float(len(str(c)) % 3) for c in completions],
    }
    first = trained(tmp_path / "first", RolloutConfig(save_rollouts=folder), **settings)
    second = trained(tmp_path / "second", SavedRollouts(folder), **settings)
    assert_same(first, second)
    assert max(row["call"] for row in rows_of(folder)) >= 1


def rows_of(folder):
    files = os.path.join(folder, "*.parquet")
    return list(load_dataset("parquet", data_files=files, split="train", cache_dir=folder))


def test_the_files_hold_each_sequence_with_its_reward(tmp_path):
    folder = str(tmp_path / "rollouts")
    trainer = trained(tmp_path, RolloutConfig(save_rollouts=folder), max_steps=2)
    rows = rows_of(folder)
    assert len(rows) == 2 * trainer.args.per_device_train_batch_size
    for step in (1, 2):
        found = [row for row in rows if row["step"] == step]
        rewards = [row["reward"] for row in found]
        assert sum(rewards) / len(rewards) == pytest.approx(logged(trainer, "reward")[step - 1])
        assert {version for row in found for version, _ in row["policy_versions"]} == {step}
    for row in rows:
        assert len(row["logprobs"]) == len(row["generated_tokens"]) > 0
        assert row["status"] == "finished"


def test_a_resumed_training_saves_on_and_trains_on(tmp_path):
    folder, settings = str(tmp_path / "rollouts"), {"save_strategy": "steps", "save_steps": 1}
    config = RolloutConfig(save_rollouts=folder)
    first = trained(tmp_path / "first", config, **settings)
    with pytest.raises(ConfigurationError, match="rollouts of another training"):
        trained(tmp_path / "other", config)
    again = tiny_trainer(tmp_path / "first", max_steps=3, **settings)
    attach(again, config)
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    detach(again)
    assert logged(again, "loss")[-1] == pytest.approx(logged(first, "loss")[-1], abs=1e-5)
    steps = [row["step"] for row in rows_of(folder)]
    size = first.args.per_device_train_batch_size
    assert [steps.count(step) for step in (1, 2, 3)] == [size] * 3
    saved = tiny_trainer(tmp_path / "first", max_steps=3, **settings)
    attach(saved, SavedRollouts(folder))
    saved.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert logged(saved, "loss")[-1] == logged(again, "loss")[-1]


def test_what_cannot_be_trained_from_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no saved rollouts"):
        SavedRollouts(str(tmp_path))
    folder = str(tmp_path / "rollouts")
    trained(tmp_path, RolloutConfig(save_rollouts=folder), max_steps=1)
    with pytest.raises(ConfigurationError, match="no more rollouts; lower max_steps"):
        trained(tmp_path, SavedRollouts(folder), max_steps=2)
    with pytest.raises(ConfigurationError, match="asks for other prompts"):
        trained(tmp_path, SavedRollouts(folder), max_steps=1, seed=5)
    trainer = tiny_trainer(tmp_path)
    attach(trainer, SavedRollouts(folder))
    with pytest.raises(ConfigurationError, match="saved rollouts were sampled"):
        use_strategy(trainer, OverSampling())
    with pytest.raises(ConfigurationError, match="save_rollouts=3 is neither a path nor None"):
        RolloutConfig(save_rollouts=3)


def test_no_file_is_left_half_written(tmp_path, monkeypatch):
    folder = tmp_path / "rollouts"
    monkeypatch.setattr(type(folder), "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        trained(tmp_path, RolloutConfig(save_rollouts=str(folder)), max_steps=1)
    with pytest.raises(ConfigurationError, match="holds no saved rollouts"):
        SavedRollouts(str(folder))
