"""A training that saves its rollouts, and another one that trains from them without an engine."""

import io
import os
from functools import partial
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset, load_dataset
from playback import TOOLS, double, with_tools
from tiny import tiny_model
from tiny_trainer import logged, tiny_trainer
from transformers import GenerationConfig
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, SavedRollouts, attach, detach
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.rollout.sampler import TrainingRun
from cb_rollout.rollout.saved import RolloutSaver
from cb_rollout.strategies import OverSampling
from cb_rollout.types import GenerationOutput

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


@pytest.mark.fast_cases("grpo")
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_resumed_training_saves_on_and_trains_on(tmp_path):
    folder, settings = str(tmp_path / "rollouts"), {"save_strategy": "steps", "save_steps": 1}
    config = RolloutConfig(save_rollouts=folder)
    first = trained(tmp_path / "first", config, **settings)
    with pytest.raises(ConfigurationError, match="holds rollouts of another run"):
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


ANOTHER = "holds rollouts of another run, such as 0.*choose an empty folder, or resume"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def attached(output_dir, folder, **settings):
    trainer = tiny_trainer(output_dir, **({"max_steps": 1} | settings))
    attach(trainer, RolloutConfig(save_rollouts=str(folder)))
    return trainer


def test_a_run_that_evaluated_is_never_written_over(tmp_path):
    folder = tmp_path / "rollouts"
    first = attached(tmp_path / "first", folder)
    first.evaluate()
    detach(first)
    before = contents(folder)
    assert before
    second = attached(tmp_path / "second", folder, seed=5)
    for begin in (second.evaluate, second.train):
        with pytest.raises(ConfigurationError, match=ANOTHER):
            begin()
    detach(second)
    assert contents(folder) == before
    assert not hasattr(second, "vllm_generation")


@pytest.mark.slow
def test_an_evaluation_of_a_resumed_run_is_never_written_over(tmp_path):
    folder, settings = tmp_path / "rollouts", {"save_strategy": "steps", "save_steps": 1}
    checkpoint = str(tmp_path / "checkpoint-1")
    first = attached(tmp_path, folder, **settings)
    first.train()
    first.evaluate()
    detach(first)
    before = contents(folder)
    early = attached(tmp_path, folder, **settings)
    with pytest.raises(ConfigurationError, match=ANOTHER):
        early.evaluate()
    detach(early)
    again = attached(tmp_path, folder, **settings)
    again.train(resume_from_checkpoint=checkpoint)
    again.evaluate()
    detach(again)
    after = contents(folder)
    assert before.items() < after.items()
    # The new evaluation is read after the old one.
    assert max(after) not in before


def output(request_id="req_0"):
    return GenerationOutput(request_id, [5], [6], [-0.5], policy_versions=[(0, 1)])


def saved_by(saver, step, mode="train"):
    saver.save(step, mode, [[output()]], {"req_0": 0.5})


def test_two_runs_that_begin_together_do_not_share_a_folder(tmp_path):
    first, second = (RolloutSaver(str(tmp_path), 0, 1) for _ in range(2))
    for saver in (first, second):
        saver.begin_training(0)
    saved_by(first, 1)
    before = contents(tmp_path)
    with pytest.raises(ConfigurationError, match=r"00000001-000000-00000\.parquet exists already"):
        saved_by(second, 1)
    assert contents(tmp_path) == before


def test_a_run_of_fewer_processes_finds_the_files_of_all_others(tmp_path):
    saved_by(RolloutSaver(str(tmp_path), 1, 2), 1)
    saved_by(RolloutSaver(str(tmp_path), 1, 2), 2)
    alone = RolloutSaver(str(tmp_path), 0, 1)
    with pytest.raises(ConfigurationError, match=ANOTHER):
        alone.require_own_folder()
    alone.begin_training(1)
    assert list(contents(tmp_path)) == ["00000001-000000-00001.parquet"]
    alone.require_own_folder()
    # Another process of the same run may have written before.
    RolloutSaver(str(tmp_path), 2, 3).require_own_folder()


def test_a_run_that_was_resumed_twice_goes_on_with_its_numbers(tmp_path):
    for step in (1, 2, 3):
        saver = RolloutSaver(str(tmp_path), 0, 1)
        saver.begin_training(step - 1)
        saved_by(saver, step)
        saved_by(saver, step, "eval")
    assert sorted(contents(tmp_path)) == [
        f"0000000{step}-00000{number}-00000.parquet"
        for step, number in ((1, 0), (1, 1), (2, 2), (2, 3), (3, 4), (3, 5))
    ]


def test_the_folder_that_is_trained_from_is_not_saved_into(tmp_path):
    saved_by(RolloutSaver(str(tmp_path), 0, 1), 1)
    for folder in (tmp_path, tmp_path / ".." / tmp_path.name):
        with pytest.raises(ConfigurationError, match="trains from; choose another folder"):
            SavedRollouts(str(tmp_path), RolloutConfig(save_rollouts=str(folder)))
    SavedRollouts(str(tmp_path), RolloutConfig(save_rollouts=str(tmp_path / "more")))


def test_what_cannot_be_trained_from_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no saved rollouts"):
        SavedRollouts(str(tmp_path))
    folder = str(tmp_path / "rollouts")
    trained(tmp_path, RolloutConfig(save_rollouts=folder), max_steps=1)
    with pytest.raises(ConfigurationError, match="no more rollouts; lower max_steps"):
        trained(tmp_path, SavedRollouts(folder), max_steps=2)
    with pytest.raises(ConfigurationError, match="asks for different prompts"):
        trained(tmp_path, SavedRollouts(folder), max_steps=1, seed=5)
    trainer = tiny_trainer(tmp_path)
    attach(trainer, SavedRollouts(folder))
    with pytest.raises(ConfigurationError, match="saved rollouts are sampled already"):
        use_strategy(trainer, OverSampling())
    with pytest.raises(ConfigurationError, match="save_rollouts=3 is neither a path nor None"):
        RolloutConfig(save_rollouts=3)


def test_no_file_is_left_half_written(tmp_path, monkeypatch):
    folder = tmp_path / "rollouts"
    monkeypatch.setattr(type(folder), "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(ConfigurationError, match=r"cannot be written \(full\)"):
        trained(tmp_path, RolloutConfig(save_rollouts=str(folder)), max_steps=1)
    with pytest.raises(ConfigurationError, match="holds no saved rollouts"):
        SavedRollouts(str(folder))


def spoilt(content):
    """What a file may become: cut off, emptied, changed in its middle or its end, of others."""
    other, table = io.BytesIO(), pyarrow.table({"call": [0], "step": [1]})
    parquet.write_table(table, other)
    middle = len(content) // 3
    return {
        "truncated": content[: len(content) // 2],
        "one byte short": content[:-1],
        "empty": b"",
        "no Parquet": b"[]",
        "a hole": content[:8] + bytes(middle) + content[8 + middle :],
        "another table": other.getvalue(),
    }


@pytest.mark.parametrize("how", spoilt(bytes(12)))
def test_a_file_that_cannot_be_read_is_named(tmp_path, how):
    saver = RolloutSaver(str(tmp_path), 0, 1)
    for step in (1, 2):
        saver.save(step, "train", [[output(f"req_{number}") for number in range(40)]], {})
    path = max(tmp_path.iterdir())
    path.write_bytes(spoilt(path.read_bytes())[how])
    rollouts = SavedRollouts(str(tmp_path))
    run = TrainingRun(
        model=tiny_model(),
        tokenizer=None,
        generation_config=GenerationConfig(),
        accelerator=SimpleNamespace(process_index=0),
        seed=0,
    )
    rollouts.sampler_for(run)
    assert len(rollouts.generate_batch([[5]] * 40)) == 40
    said = rf"{path} is not a complete file of saved rollouts \(.*checkpoint before step 2, which"
    with pytest.raises(ConfigurationError, match=said):
        rollouts.generate_batch([[5]] * 40)
