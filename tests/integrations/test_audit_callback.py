"""A stock trainer's rollouts are audited, whichever engine samples them.

The engine is a plain loop over a copy of the weights that stands where TRL has vLLM's.
"""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_trainer import logged, tiny_trainer
from transformers import AutoModelForCausalLM
from trl import RLOOConfig, RLOOTrainer

import cb_rollout
from cb_rollout import ConfigurationError
from cb_rollout.integrations.audit_callback import SCORING, _outputs
from cb_rollout.rollout.audit.report import Cause
from measure.audit import Engine


class OtherEngine:
    """vLLM as TRL 1.16 sees it, with a fault: a function of the weights that TRL sent so far."""

    def __init__(self, trainer, fault):
        self.trainer, self.fault, self.sent = trainer, fault, []
        trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
        trainer.vllm_generation = self

    def sync_weights(self):
        # A copy of the trainer's would run its wrapped forward, on its weights.
        model = AutoModelForCausalLM.from_config(self.trainer.model.config)
        if isinstance(self.trainer.model, PeftModel):
            model = get_peft_model(model, self.trainer.model.peft_config["default"])
        model.load_state_dict(self.trainer.model.state_dict())
        self.sent.append(model.eval())

    def generate(self, prompts, images, num_generations, profiler=None):
        engine = self.fault(self.sent)
        outputs = engine.sample(prompts, num_new=12, seed=len(self.sent))
        numbers = [[[number] for number in output.logprobs] for output in outputs]
        return prompts, [output.generated_tokens for output in outputs], numbers, None


def by_place(completions, **_):
    """A reward that moves the weights in each step."""
    return [float(place) for place, _ in enumerate(completions)]


def first_and_last(sent):
    return replace(Engine(sent[-1]), old=sent[-2:][0], keeps=lambda num_tokens: num_tokens - 1)


# The adapter is trained, and the engine samples from the base model (unslothai/unsloth 8701).
def without_adapter(sent):
    return Engine(copy.deepcopy(sent[-1]).unload())


def audited(folder, fault, arguments=None, **settings):
    """Train three steps, with an audit of each; return trainer, callback and its warnings."""
    trainer = tiny_trainer(
        folder,
        reward=by_place,
        trainer_arguments=arguments,
        per_device_train_batch_size=8,
        **settings,
    )
    callback = cb_rollout.audit_callback(trainer, every_steps=1, keep_versions=True)
    if fault is not None:
        OtherEngine(trainer, fault)
    trainer.add_callback(callback)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(warning.message) for warning in caught]
    return trainer, callback, [line for line in said if line.startswith("audit of step")]


def test_rollouts_without_a_fault_are_no_alarm(tmp_path):
    trainer, callback, said = audited(tmp_path, lambda sent: Engine(sent[-1]))
    assert said == []
    assert logged(trainer, "audit/alarm") == [0.0] * 3
    assert logged(trainer, "audit/evidence") == [0.0] * 3
    assert callback.report.cause is Cause.ROUNDING
    assert callback.report.num_tokens == 48
    # The trainer is as it was.
    assert SCORING not in vars(trainer)


FAULTS = {
    "first weights": (lambda sent: Engine(sent[0]), Cause.OLDER_VERSION, "the first rollout"),
    "late by one": (lambda sent: Engine(sent[-2:][0]), Cause.OLDER_VERSION, "the rollout before"),
    "stale prefixes": (
        first_and_last,
        Cause.STALE_PROMPT_KEYS,
        "the rollout before, whole prompts",
    ),
}


@pytest.mark.fast_cases("first weights")
@pytest.mark.parametrize("name", FAULTS)
def test_old_weights_are_named_from_the_second_update_on(tmp_path, name):
    fault, cause, detail = FAULTS[name]
    trainer, callback, said = audited(tmp_path, fault, learning_rate=1e-2)
    sentence = f"audit of step 3: Log-probabilities differ by: {cause} ({detail}). {cause.advice}"
    assert said[1:] == [sentence]
    assert logged(trainer, "audit/alarm") == [0.0, 1.0, 1.0]
    assert logged(trainer, "audit/evidence")[-1] > 1
    assert (callback.report.cause, callback.report.evidence[0].detail) == (cause, detail)


def test_an_adapter_that_the_engine_never_loaded_is_named(tmp_path):
    lora = {"peft_config": LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"])}
    trainer, callback, said = audited(tmp_path, without_adapter, lora, learning_rate=1e-2)
    assert "adapter missing (base model). Load the adapter in the engine" in said[-1]
    # An adapter that was not trained yet changes nothing.
    assert logged(trainer, "audit/alarm")[0] == 0
    assert callback.report.cause is Cause.NO_ADAPTER


def test_numbers_of_another_distribution_are_named(tmp_path):
    def raw(sent):
        return Engine(sent[-1], temperature=0.5)

    _, callback, (line,) = audited(tmp_path, raw, temperature=0.5, max_steps=1)
    assert "temperature (not applied)" in line
    assert callback.report.cause is Cause.TEMPERATURE


@pytest.mark.slow
def test_a_second_training_is_audited_from_its_first_rollout(tmp_path):
    trainer, callback, _ = audited(tmp_path, lambda sent: Engine(sent[-1]), max_steps=2)
    report, versions = callback.report, {**callback.versions}
    trainer.train()
    assert callback.report is not report
    assert set(callback.versions) == set(versions)
    pairs = zip(callback.versions.values(), versions.values(), strict=True)
    assert all(new is not old for new, old in pairs)


def test_a_setting_that_cannot_be_read_is_refused_before_the_training(tmp_path):
    trainer = tiny_trainer(tmp_path, generation_kwargs={"top_k": "many"})
    with pytest.raises(cb_rollout.RolloutError, match="top_k"):
        cb_rollout.audit_callback(trainer)


def test_tokens_of_generate_are_tested_as_draws(tmp_path):
    trainer, callback, _ = audited(tmp_path, None, max_steps=1)
    assert logged(trainer, "audit/alarm") == [0.0]
    assert callback.report.sentence.endswith(" tokens has a reported log-probability; all fit.")


@pytest.mark.parametrize("sharpness", [1.0, 20.0])
def test_rloo_which_drops_the_numbers_is_audited_by_its_draws(tmp_path, sharpness):
    def sharp(sent):
        return Engine(sent[-1], draws=lambda logits, _: logits * sharpness)

    rloo = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig, "max_steps": 1}
    _, callback, said = audited(tmp_path, sharp, **rloo)
    assert bool(callback.report) is (sharpness == 1)
    assert len(said) == (sharpness != 1)
    assert all("None was reported, but tokens do not fit" in line for line in said)


@pytest.mark.slow
def test_audits_are_as_far_apart_as_asked_and_leave_evaluation_alone(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=1)
    OtherEngine(trainer, lambda sent: Engine(sent[-1]))
    trainer.add_callback(cb_rollout.audit_callback(trainer, every_steps=2))
    trainer.train()
    audits = [row["step"] for row in trainer.state.log_history if "audit/alarm" in row]
    assert audits == [1, 3]


def test_a_sequence_ends_before_what_no_model_sampled():
    ones_23 = torch.ones(2, 3, dtype=torch.int64)
    batch = {
        "prompt_ids": torch.tensor([[0, 5], [6, 7]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[8, 9, 10], [11, 12, 13]]),
        "completion_mask": ones_23,
        "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, 0, -2], [-1, -2, torch.nan]]),
    }
    first, second = _outputs(batch, temperature=0.5)
    assert (first.prompt_ids, first.generated_tokens, first.logprobs) == ([5], [8], [-1.0])
    assert (second.prompt_ids, second.generated_tokens) == ([6, 7], [11, 12])
    assert (second.logprobs, second.temperature) == ([-1.0, -2.0], 0.5)
    # A completion that the loss leaves out is none.
    assert _outputs({**batch, "completion_mask": 0 * ones_23}, 1.0) == []


def test_what_is_no_scoring_trainer_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="which this object is not"):
        cb_rollout.audit_callback(object())
    with pytest.raises(ConfigurationError, match="every_steps=0"):
        cb_rollout.audit_callback(tiny_trainer(tmp_path), every_steps=0)
