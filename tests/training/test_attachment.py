"""Attached, turned on by a file, generating for a rollout_func, with tools, and detached again."""

import pytest
import torch
from datasets import Dataset
from playback import TOOLS, Counter, double, watched, with_tools
from tiny import tiny_model
from tiny_trainer import PROBLEMS, logged, share_of_sevens, tiny_trainer
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser

from cb_rollout import (
    ConfigurationError,
    RolloutArguments,
    RolloutConfig,
    SamplingParams,
    attach,
    detach,
    make_rollout_func,
)
from cb_rollout.metrics.run_records import iterate_rollouts, read_metrics

QUICK = {"per_device_train_batch_size": 8, "num_generations": 4, "optim": "sgd"}


def test_detach_puts_the_trainer_back(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, **QUICK)
    own = {name: value for name, value in vars(trainer).items() if name != "callback_handler"}
    callbacks = list(trainer.callback_handler.callbacks)
    generator = attach(trainer)
    trainer.train()
    detach(trainer)
    assert trainer.callback_handler.callbacks == callbacks
    assert vars(trainer).keys() - {"callback_handler"} >= own.keys()
    for name in ("use_vllm", "vllm_mode"):
        assert getattr(trainer, name) == own[name]
    ours = [name for name, value in vars(trainer).items() if "cb_rollout" in type(value).__module__]
    assert not ours
    hooked = [
        name
        for name, value in vars(trainer).items()
        if "cb_rollout" in getattr(value, "__module__", "")
    ]
    assert not hooked
    assert not hasattr(trainer, "vllm_generation")
    assert not generator.manager.is_running()
    trainer.train()  # through TRL's own generate
    assert len(logged(trainer, "rollout/tokens")) == 0
    attach(trainer)
    trainer.train()
    assert len(logged(trainer, "rollout/tokens")) == 1
    detach(trainer)
    with pytest.raises(ConfigurationError, match="not attached to this trainer"):
        detach(trainer)


def test_a_detached_trainer_trains_as_if_nothing_had_been_attached(tmp_path):
    losses = []
    for name in ("never", "once"):
        trainer = tiny_trainer(tmp_path / name, max_steps=2, **QUICK)
        if name == "once":
            attach(trainer)
            detach(trainer)
        record = watched(trainer)
        torch.manual_seed(0)
        trainer.train()
        losses.append((record.turns, record.losses))
    assert losses[0] == losses[1]


def test_a_rollout_func_generates_through_what_is_attached(tmp_path):
    rollout = make_rollout_func()
    seen = []

    def twice_as_loud(prompts, trainer):
        output = rollout(prompts, trainer)
        seen.append(len(prompts))
        return output | {"volume": [2] * len(prompts)}

    def reward(completions, volume, **_):
        return [v * share for v, share in zip(volume, share_of_sevens(completions), strict=True)]

    arguments = {"rollout_func": twice_as_loud}
    trainer = tiny_trainer(tmp_path, reward=reward, trainer_arguments=arguments, **QUICK)
    config = {"old_logps": "rollout", "verify_every_steps": 1, "max_logprob_drift": 1e-4}
    generator = attach(trainer, RolloutConfig(**config))
    trainer.train()
    generator.close()
    assert seen == [8] * 3
    assert logged(trainer, "rollout/policy_version") == [1, 2, 3]
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert len(list(iterate_rollouts(tmp_path))) == 12


def test_a_rollout_func_takes_texts_chats_and_token_ids_and_its_own_sampling(tmp_path):
    trainer = tiny_trainer(tmp_path, **QUICK)
    attach(trainer)
    rollout = make_rollout_func(SamplingParams(max_new_tokens=2, ignore_eos=True))
    chat = [{"role": "user", "content": "1+1="}]
    for prompts in (["1+1="] * 2, [[5, 6, 7]] * 2, [chat] * 2):
        output = rollout(prompts, trainer)
        assert [len(ids) for ids in output["completion_ids"]] == [2, 2]
        assert [len(values) for values in output["logprobs"]] == [2, 2]
    assert rollout([[5, 6, 7]], trainer)["prompt_ids"] == [[5, 6, 7]]
    detach(trainer)


YAML = """
use_cb_rollout: true
old_logps: rollout
verify_every_steps: 1
max_logprob_drift: 0.001
max_memory_percent: 0.5
training_reserve_gib: 0.25
allow_block_sharing: true
loss_tokens_per_forward: 4096
learning_rate: 0.001
seed: 5
"""


def test_a_yaml_file_turns_it_on(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(YAML + f"output_dir: {tmp_path}\ndataset_name: none\n")
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, RolloutArguments))
    arguments = ["--config", str(path), "--verify_num_sequences", "3", "--use_cpu", "--bf16", "no"]
    _, training, _, rollout = parser.parse_args_and_config(arguments)
    assert rollout.use_cb_rollout
    assert training.seed == 5
    config = rollout.rollout_config()
    assert config == RolloutConfig(
        old_logps="rollout",
        verify_every_steps=1,
        verify_num_sequences=3,
        max_logprob_drift=0.001,
        max_memory_percent=0.5,
        training_reserve_gib=0.25,
        loss_tokens_per_forward=4096,
    )
    trainer = tiny_trainer(tmp_path, max_steps=1, **QUICK)
    attach(trainer, config)
    trainer.train()
    detach(trainer)


def test_a_bad_word_in_a_file_is_refused():
    assert RolloutArguments().rollout_config() == RolloutConfig()
    assert not RolloutArguments().use_cb_rollout
    with pytest.raises(ConfigurationError, match="old_logps='none' is not one of"):
        RolloutArguments(old_logps="none").rollout_config()
    with pytest.raises(ConfigurationError, match="training_reserve_gib='much' is neither 'auto'"):
        RolloutArguments(training_reserve_gib="much").rollout_config()
    assert RolloutArguments(training_reserve_gib="2").rollout_config().training_reserve_gib == 2


@pytest.mark.parametrize("value", [" 5", "+5", "\u0665", "1_000", 5.5])
def test_a_number_beside_a_word_is_written_in_plain_digits(value):
    with pytest.raises(ConfigurationError, match="loss_tokens_per_forward="):
        RolloutArguments(loss_tokens_per_forward=value).rollout_config()
    if isinstance(value, str):
        with pytest.raises(ConfigurationError, match="training_reserve_gib="):
            RolloutArguments(training_reserve_gib=value).rollout_config()
    for taken in ("64", 64):
        assert RolloutArguments(loss_tokens_per_forward=taken).rollout_config() == RolloutConfig(
            loss_tokens_per_forward=64
        )


@pytest.mark.fast_cases("tools")
@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_each_turn_reuses_the_keys_of_the_turns_before(tmp_path, monkeypatch, kind):
    rows = [
        {"prompt": [{"role": "user", "content": f"{row['prompt']} is what? " * 4}]}
        for row in PROBLEMS[:8]
    ]
    arguments = {"train_dataset": Dataset.from_list(rows)}
    given = {"tools": [double]} if kind == "tools" else {"environment_factory": Counter}
    trainer = tiny_trainer(
        tmp_path,
        reward=lambda completions, **_: [float(len(str(c)) % 3) for c in completions],
        prepare_tokenizer=lambda tokenizer: with_tools(monkeypatch, tokenizer),
        trainer_arguments=arguments | given,
        **(QUICK | TOOLS | {"max_steps": 1}),
    )
    config = {"block_size": 8, "old_logps": "rollout", "verify_every_steps": 1}
    generator = attach(trainer, RolloutConfig(**config, max_logprob_drift=1e-4))
    turns, generate = [], trainer._generate_single_turn

    def keep(prompt_ids, *rest, **named):
        before = generator.manager.counters.copy()
        result = generate(prompt_ids, *rest, **named)
        added = generator.manager.counters.since(before)
        turns.append(([len(ids) for ids in prompt_ids], added.prefill_tokens))
        return result

    trainer._generate_single_turn = keep
    trainer.train()
    generator.close()
    assert len(turns) == 3
    for lengths, prefilled in turns[1:]:
        assert min(lengths) > 80
        # What is new: the tool's words, the last token sampled, and what does not fill a block.
        assert prefilled <= 40 * len(lengths)
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    (metrics,) = [m for m in read_metrics(tmp_path) if "reward" in m.scalars]
    assert metrics.scalars["rollout/tokens"] == sum(metrics.completion_lengths)
    assert metrics.scalars["rollout/prefill_tokens"] == sum(prefilled for _, prefilled in turns)
    records = list(iterate_rollouts(tmp_path))
    assert any(0 in record.mask and 1 in record.mask for record in records)
    for record in records:
        assert record.policy_versions == [(1, len(record.tokens))]
        values = zip(record.mask, record.logprobs, record.trainer_logprobs, strict=True)
        for counts, sampled, trained in values:
            assert sampled == pytest.approx(trained, abs=1e-5) if counts else sampled == 0


def test_the_records_hold_what_the_loss_saw_of_every_rollout(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    trainer = tiny_trainer(tmp_path, max_steps=2, num_generations_eval=2, **(QUICK | settings))
    generator = attach(trainer, RolloutConfig(record_num_sequences=3))
    trainer.train()
    generator.close()
    records = list(iterate_rollouts(tmp_path))
    steps = [(r.step, r.mode) for r in records]
    assert steps == [(1, "train")] * 3 + [(1, "eval")] * 3 + [(2, "train")] * 3 + [(2, "eval")] * 3
    for record in records:
        assert record.advantage is not None
        assert record.mask == [1] * len(record.tokens)
        assert record.trainer_logprobs == pytest.approx(record.logprobs, abs=1e-5)
        assert len(record.entropies) == len(record.tokens)
        assert all(0 < entropy < 4.6 for entropy in record.entropies)  # log(99) = 4.595
        (row, *_) = record.token_rows()
        assert (row.trainer_logprob, row.entropy) == (
            record.trainer_logprobs[0],
            record.entropies[0],
        )


def test_a_reference_model_is_left_alone(tmp_path):
    tiny_model(vocab_size=99).save_pretrained(tmp_path / "saved")
    for name in ("rollout", "trainer"):
        model = str(tmp_path / "saved")
        trainer = tiny_trainer(tmp_path / name, model=model, beta=0.5, max_steps=2, **QUICK)
        assert trainer.ref_model is not None
        config = {"old_logps": name, "verify_every_steps": 0, "loss_forward": "trainer"}
        generator = attach(trainer, RolloutConfig(**config))
        record = watched(trainer)
        trainer.train()
        generator.close()
        assert logged(trainer, "kl")[0] == pytest.approx(0, abs=1e-6)
        assert logged(trainer, "kl")[1] > 0
        assert record.num_scoring_forwards == (0 if name == "rollout" else 2)


def test_settings_of_the_engine_in_generation_kwargs_are_taken_and_kept(tmp_path):
    asked = {"max_batch_tokens": 64, "use_cuda_graph": False}
    trainer = tiny_trainer(tmp_path, max_steps=1, generation_kwargs=asked, **QUICK)
    generator = attach(trainer, RolloutConfig(num_blocks=64))
    assert generator.config.max_batch_tokens == 64
    assert generator.config.num_blocks == 64
    trainer.generation_config.max_batch_tokens = 32
    with pytest.raises(ConfigurationError, match="asks for max_batch_tokens=32, but the engine"):
        generator.set_generation_config(trainer.generation_config)


def test_what_generation_kwargs_ask_in_vain_is_refused(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, generation_kwargs={"use_mtp": True}, **QUICK)
    with pytest.raises(ConfigurationError, match=r"use_mtp=True .* without drafts; set"):
        attach(trainer)
