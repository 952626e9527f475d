"""A stock trainer rolls out through cb_rollout, and nothing else about its run changes."""

import re

import pytest
import torch
from datasets import Dataset
from device_laws import assert_trains
from full_disk import FullDisk
from nightly import slow_after
from tiny import char_tokenizer, tiny_model
from tiny_trainer import logged, tiny_trainer
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import (
    ConfigurationError,
    InvalidRequestError,
    LogprobDriftError,
    RolloutConfig,
    SamplingParams,
    attach,
)
from cb_rollout.engine.attention import traced_forward
from cb_rollout.engine.sampling import sampler as sampling
from cb_rollout.integrations.trl.rows.loss_rows import ROWS_KEY
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.metrics.run_records import iterate_rollouts, read_metrics
from cb_rollout.rollout import sampler
from cb_rollout.strategies import DynamicSampling, Plain

EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}


def test_training_logs_agreement_with_the_trainers_forward(tmp_path):
    trainer = tiny_trainer(tmp_path, **EVALUATES)
    generator = attach(trainer, RolloutConfig(old_logps="trainer", verify_every_steps=1))
    trainer.train()
    drifts = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(drifts) == 3
    assert max(drifts) <= 1e-5
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert min(logged(trainer, "rollout/tokens_per_second")) > 0
    assert all(0 < share <= 1 for share in logged(trainer, "rollout/step_share"))
    assert logged(trainer, "rollout/prefill_tokens") == [8, 8, 8]
    assert logged(trainer, "rollout/prefill_tokens_saved") == [56, 56, 56]
    assert logged(trainer, "rollout/policy_version") == [1, 2, 3]
    assert len(logged(trainer, "eval_reward")) == 2  # at step 2 and at the end
    assert trainer.evaluate()["eval_reward"] >= 0
    assert not trainer.args.use_vllm
    generator.close()


@pytest.mark.parametrize(
    "strategy", slow_after(1, [DynamicSampling(max_dropped_groups=2), Plain()])
)
def test_each_loss_gets_the_records_of_its_rows(tmp_path, strategy):
    halves = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    trainer = tiny_trainer(tmp_path, **halves)
    compute_loss, seen = trainer.compute_loss, []

    def compute_and_keep(model, inputs, *rest, **named):
        tokens = zip(inputs["completion_ids"], inputs["completion_mask"].bool(), strict=True)
        seen.append(([ids[own].tolist() for ids, own in tokens], inputs[ROWS_KEY]))
        return compute_loss(model, inputs, *rest, **named)

    trainer.compute_loss = compute_and_keep
    with attach(trainer):
        use_strategy(trainer, strategy)
        trainer.train()
    assert len(seen) == 6
    for completions, rows in seen:
        assert [row.completion_ids for row in rows] == completions
        assert all(row.versions == [row.versions[0]] * len(row.versions) for row in rows)
    assert len({row.id for _, rows in seen for row in rows}) == 6 * 4


def test_a_row_longer_than_the_model_is_told_in_the_trainers_words(tmp_path):
    rows = Dataset.from_list([{"prompt": "1" * 510}] * 4)
    trainer = tiny_trainer(tmp_path, trainer_arguments={"train_dataset": rows})
    attach(trainer)
    with pytest.raises(InvalidRequestError, match=r"510 tokens .*out of the data set; .*max_compl"):
        trainer.train()


@pytest.mark.slow
def test_other_sampling_settings_agree_too(tmp_path):
    trainer = tiny_trainer(tmp_path, temperature=0.7)
    attach(trainer, RolloutConfig(old_logps="trainer"))
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= 1e-5


def test_records_hold_what_was_sampled_with_its_reward(tmp_path):
    trainer = tiny_trainer(tmp_path)
    generator = attach(trainer, RolloutConfig(record_num_sequences=3))
    trainer.train()
    generator.close()
    records = list(iterate_rollouts(tmp_path / "cb_rollout"))
    assert [record.step for record in records] == [1] * 3 + [2] * 3 + [3] * 3
    for record in records:
        text = "".join(record.tokens).replace("<eos>", "").replace("<pad>", "")
        text = text.replace("<unk>", "")
        assert record.reward == pytest.approx(text.count("7") / max(1, len(text)))
        assert record.policy_versions == [(record.step, len(record.token_ids))]
        assert len(record.logprobs) == len(record.tokens)
    steps = [metrics for metrics in read_metrics(tmp_path) if "reward" in metrics.scalars]
    assert [len(metrics.completion_lengths) for metrics in steps] == [16] * 3


@pytest.mark.parametrize("first_refused", slow_after(1, [1, 5]))
def test_a_full_disk_does_not_end_training(tmp_path, monkeypatch, first_refused):
    trainer = tiny_trainer(tmp_path)
    disk = FullDisk(tmp_path / "cb_rollout", first_refused)
    with (
        disk.mounted(monkeypatch),
        pytest.warns(UserWarning, match="training continues"),
        attach(trainer, RolloutConfig(record_num_sequences=3)),
    ):
        trainer.train()
    assert trainer.state.global_step == 3


def test_rloo_rolls_out_too(tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=RLOOTrainer, config_class=RLOOConfig)
    generator = attach(trainer, RolloutConfig(verify_every_steps=1))
    trainer.train()
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    generator.close()


class Recorded:
    """Replays completions that were recorded once; may roll out as well and drop the result."""

    def __init__(self):
        self.completions, self.also = {}, None

    def __call__(self, prompts, trainer):
        step = trainer.state.global_step
        if self.also is not None:
            self.also()
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        draws = torch.Generator().manual_seed(step)
        completions = torch.randint(3, 99, (len(prompts), 10), generator=draws).tolist()
        logprobs = [[0.0] * 10] * len(prompts)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}


def train_on_recorded(output_dir, with_engine: bool):
    recorded = Recorded()
    trainer = tiny_trainer(
        output_dir,
        trainer_arguments={"rollout_func": recorded},
        vllm_importance_sampling_correction=False,
    )
    if with_engine:
        config = RolloutConfig(old_logps="trainer", loss_forward="trainer")
        generator = attach(trainer, config)
        params = SamplingParams(max_new_tokens=12)
        recorded.also = lambda: generator.generate_batch([[5, 6, 7]] * 4, sampling_params=params)
    torch.manual_seed(0)
    trainer.train()
    if with_engine:
        assert generator.policy_version == 3
        generator.close()
    optimizer = trainer.optimizer.state_dict()["state"]
    return trainer.model.state_dict(), optimizer, torch.get_rng_state()


def test_an_idle_passenger_changes_no_bit_of_the_training(tmp_path):
    weights, states, rng = train_on_recorded(tmp_path / "without", with_engine=False)
    weights_2, states_2, rng_2 = train_on_recorded(tmp_path / "with", with_engine=True)
    assert all(torch.equal(weights[name], weights_2[name]) for name in weights)
    assert torch.equal(rng, rng_2)
    assert states.keys() == states_2.keys()
    for index, state in states.items():
        assert all(torch.equal(state[name], states_2[index][name]) for name in state)


def test_drift_beyond_the_allowed_stops_the_run_and_says_where(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path)
    generator = attach(trainer, RolloutConfig(max_logprob_drift=0.01))
    sample = sampling.sample

    def lying_sample(*arguments):
        sampled = sample(*arguments)
        return sampled._replace(logprobs_B=sampled.logprobs_B + 0.5)

    monkeypatch.setattr(sampling, "sample", lying_sample)
    with pytest.raises(LogprobDriftError, match=r"req_\d+, generated token \d+.*0\.5 nats"):
        trainer.train()
    generator.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        (
            {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
            "vllm_importance_sampling_mode",
        ),
        ({"generation_kwargs": {"eta_cutoff": 0.1}}, "eta_cutoff=0.1"),
        ({"generation_kwargs": {"num_beams": 3}}, "num_beams=3"),
        ({"generation_kwargs": {"do_sample": False}}, "{'do_sample': False}: decoding is greedy"),
        ({"generation_kwargs": {"temperature": 0.0}}, "{'temperature': 0.0}: decoding is greedy"),
        (
            {"generation_kwargs": {"num_return_sequences": 3}},
            "{'num_return_sequences': 3}: the trainer itself repeats each prompt",
        ),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(tmp_path, settings, said):
    trainer = tiny_trainer(tmp_path, **settings)
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        attach(trainer)
    assert not trainer.use_vllm


def test_a_data_set_with_images_is_refused_without_a_processor(tmp_path):
    trainer = tiny_trainer(tmp_path)
    plain = trainer.train_dataset
    trainer.train_dataset = Dataset.from_list([{"prompt": "1+2=", "image": 1}])
    said = "train_dataset has a column 'image', and processing_class is a TokenizersBackend"
    with pytest.raises(ConfigurationError, match=said):
        attach(trainer)
    trainer.train_dataset = plain
    trainer.eval_dataset = {"none": None, "hard": Dataset.from_list([{"prompt": "", "images": []}])}
    with pytest.raises(ConfigurationError, match="hard has a column 'images'"):
        attach(trainer)
    trainer.eval_dataset = {"none": None, "hard": plain}
    attach(trainer).close()


def test_what_is_not_a_fresh_stock_trainer_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="not a int"):
        attach(3)
    trainer = tiny_trainer(tmp_path)
    monkeypatch.setattr("trl.__version__", "1.15.2")
    with pytest.raises(ConfigurationError, match=r"trl 1\.15\.2.*install trl>=1\.16,<2"):
        attach(trainer)
    monkeypatch.undo()
    attach(trainer)
    with pytest.raises(ConfigurationError, match="already attached to this trainer"):
        attach(trainer)


def test_a_second_training_never_reads_keys_of_the_first(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    generator = attach(trainer, RolloutConfig(release_cache="never", verify_every_steps=1))
    trainer.train()
    trainer.train()
    assert generator.policy_version == 2
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    generator.close()


@pytest.mark.slow
@pytest.mark.parametrize(("steps_worth_trace", "traced"), [(37, []), (36, [1, 1, 1])])
def test_a_long_training_is_traced_in_its_first_rollout(
    tmp_path, monkeypatch, steps_worth_trace, traced
):
    # Three rollouts of at most twelve tokens.
    monkeypatch.setattr(sampler, "STEPS_WORTH_TRACE", steps_worth_trace)
    traces, made, make = [], [], traced_forward.trace

    def make_trace(*args):
        made.append(args)
        return make(*args)

    def reward(completions, **_):
        if made:
            traces.append(len(made))
        return [float(len(completion)) for completion in completions]

    monkeypatch.setattr(traced_forward, "trace", make_trace)
    trainer = tiny_trainer(tmp_path, reward=reward)
    with attach(trainer):
        trainer.train()
    assert traces == traced


@pytest.mark.parametrize("is_attached", [False, True])
def test_what_the_trainer_leaves_open_the_models_own_generation_config_says(tmp_path, is_attached):
    model = tiny_model(vocab_size=len(char_tokenizer()))
    model.generation_config.update(min_new_tokens=10, suppress_tokens=[20], top_k=3, top_p=0.5)
    lengths, tokens = [], set()

    def reward(completion_ids, **_):
        lengths.extend(map(len, completion_ids))
        tokens.update(*completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    # Without a floor a quarter ends earlier.
    model.lm_head.weight.data[char_tokenizer().eos_token_id] *= 3
    trainer = tiny_trainer(tmp_path, model=model, reward=reward, max_steps=1)
    if is_attached:
        with pytest.warns(UserWarning, match=r"min_new_tokens.*and model\.generation_config"):
            attach(trainer)
    trainer.train()
    assert min(lengths) >= 10
    assert 20 not in tokens
    # The trainer says top_k and top_p itself.
    assert len(tokens) > 20


@pytest.mark.slow
def test_a_transformers_config_attaches_with_logprobs(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    generator = attach(trainer, ContinuousBatchingConfig(max_memory_percent=0.5))
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= 1e-5
    generator.close()


def test_dropout_that_the_correction_would_take_for_a_new_policy_is_warned_of(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.model.model.layers[0].self_attn.attention_dropout = 0.3
    with pytest.warns(UserWarning, match=r"dropout \(rate 0.3\).*disable_dropout=True"):
        attach(trainer).close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_completion_length": 512}, "max_completion_length=512 leaves no room for a prompt"),
        ({"max_completion_length": None}, "max_completion_length=None leaves completions"),
        ({"temperature": 0.0}, "temperature=0.0, generation_kwargs=None: decoding is greedy"),
    ],
)
def test_settings_that_no_rollout_could_serve_are_refused_before_training(
    tmp_path, settings, message
):
    with pytest.raises(ConfigurationError, match=message):
        attach(tiny_trainer(tmp_path, **settings))


def test_a_trainer_in_its_default_precision_learns(tmp_path):
    """On a card: `tests/gpu/test_precisions_on_gpu.py`."""
    assert_trains(tmp_path, torch.device("cpu"))
