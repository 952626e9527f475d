"""The cause of each fault that `scripts/measure/audit.py` injects is named first."""

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict

import cb_rollout
from cb_rollout import (
    ConfigurationError,
    InvalidRequestError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
)
from cb_rollout.rollout.audit.report import Cause
from measure.audit import NUM_NEW, Engine, engines, tiny_setting

FAULTS = [name for name, *_ in engines(tiny_setting("llama", torch.float32))]


@pytest.fixture(scope="module")
def settings():
    return cache(tiny_setting)


def audited(setting, fault):
    cause, engine, arguments = next(rest for name, *rest in engines(setting) if name == fault)
    report = cb_rollout.audit(engine.sample(setting.prompts, NUM_NEW), setting.model, **arguments)
    return cause, report


# Every eleventh is tested often.
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[] if number % 11 == 0 else pytest.mark.slow)
        for number, fault in enumerate(FAULTS)
    ],
)
def test_the_cause_of_a_fault_comes_first(settings, fault):
    cause, report = audited(settings("llama", torch.float32), fault)
    assert report.cause is cause, str(report)
    assert bool(report) is (cause is Cause.ROUNDING)


# Each takes every other fault, half a minute.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "first"), [("gpt2", torch.float32, 0), ("qwen3_moe", torch.bfloat16, 1)]
)
def test_causes_come_first_in_other_families_and_in_bfloat16(settings, family, dtype, first):
    setting = settings(family, dtype)
    missed = {}
    for fault, cause, engine, arguments in list(engines(setting))[first::2]:
        outputs = engine.sample(setting.prompts, NUM_NEW)
        report = cb_rollout.audit(outputs, setting.model, **arguments)
        if report.cause is not cause:
            missed[fault] = report.sentence
    assert missed == {}


@pytest.fixture(scope="module")
def clean(settings):
    setting = settings("llama", torch.float32)
    _, _, engine, arguments = next(iter(engines(setting)))
    return setting, engine.sample(setting.prompts, NUM_NEW), arguments


def test_rollouts_of_the_engine_are_no_alarm(settings):
    setting = settings("llama", torch.float32)
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.8, top_p=0.9)
    with RolloutGenerator(setting.model, RolloutConfig(seed=0)) as generator:
        outputs = generator.generate_batch(
            setting.prompts, sampling_params=params, num_return_sequences=2
        )
    report = cb_rollout.audit(outputs.values(), setting.model, sampling_params=params)
    assert report, str(report)
    # Top-p that the audit is not told of is seen in the tokens, as the numbers are right.
    report = cb_rollout.audit(outputs.values(), setting.model)
    assert report.cause is Cause.ROUNDING
    assert report.draw_z_score < 0


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "is_clean"), [(torch.bfloat16, True), (torch.float32, False)])
def test_one_number_of_another_expert_is_rounding_in_16_bits_alone(settings, dtype, is_clean):
    setting = settings("qwen3_moe", dtype)
    outputs = Engine(setting.model).sample(setting.prompts[:3], 16)
    outputs[1].logprobs[5] -= 1.0
    assert bool(cb_rollout.audit(outputs, setting.model)) is is_clean


@pytest.mark.slow
def test_experts_that_the_rollout_chose_otherwise_are_the_cause(settings):
    setting = settings("qwen3_moe", torch.float32)
    outputs = Engine(setting.base).sample(setting.prompts)
    draw = np.random.default_rng(0)
    for output in outputs:
        num_tokens = len(output.prompt_ids) + len(output.generated_tokens) - 1
        scores = draw.random((num_tokens, 3, 4))
        output.routed_experts = scores.argsort(-1)[..., :2].astype(np.uint8)
    with torch.no_grad():
        replayed = cb_rollout.packed_logprobs(setting.base, outputs)
    for output, logprobs in zip(outputs, replayed, strict=True):
        output.logprobs = logprobs.tolist()
    assert cb_rollout.audit(outputs, setting.base).cause is Cause.ROUTES
    # A sequence that is cut keeps the routes of its tokens.
    assert cb_rollout.audit(outputs[:1], setting.base, max_tokens=20).cause is Cause.ROUTES


@pytest.mark.slow
def test_an_older_adapter_is_a_version_as_peft_saves_it(settings):
    setting = settings("llama", torch.float32)
    older = copy.deepcopy(setting.model)
    for name, p in older.named_parameters():
        if ".lora_B.default" in name:
            p.data *= 0.9
    outputs = Engine(older).sample(setting.prompts)
    versions = {3: lambda: get_peft_model_state_dict(older)}
    report = cb_rollout.audit(outputs, setting.model, versions=versions)
    assert report.cause is Cause.OLDER_VERSION
    assert report.evidence[0].detail == "3"


@pytest.mark.slow
def test_settings_and_tokenizer_of_the_engine_count(settings):
    setting = settings("llama", torch.float32)
    params = SamplingParams(max_new_tokens=NUM_NEW, top_p=0.9)
    config = RolloutConfig(seed=0, logprobs_mode="processed")
    with RolloutGenerator(setting.model, config, tokenizer=setting.tokenizer) as generator:
        outputs = list(generator.generate_batch(setting.prompts, sampling_params=params).values())
        report = cb_rollout.audit(outputs, setting.model, engine=generator, sampling_params=params)
        assert report, str(report)
        # This cause needs a tokenizer.
        assert Cause.RETOKENISED in {own.cause for own in report.evidence}
        # What the caller says comes first.
        report = cb_rollout.audit(
            *(outputs, setting.model),
            engine=generator,
            sampling_params=params,
            logprobs_mode="policy",
        )
        assert report.cause is Cause.TOP_P
    report = cb_rollout.audit(outputs, setting.model, sampling_params=params)
    assert report.cause is Cause.TOP_P
    assert Cause.RETOKENISED not in {own.cause for own in report.evidence}


@pytest.mark.slow
def test_the_copy_of_the_engine_is_a_version(settings):
    """A copy has its adapters merged."""
    setting = settings("llama", torch.float32)
    model = copy.deepcopy(setting.model)
    params = SamplingParams(max_new_tokens=NUM_NEW)
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="copy")) as generator:
        assert generator.stale_weights() == {}
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".lora_B.default" in name:
                    p *= 0.7
        outputs = list(generator.generate_batch(setting.prompts, sampling_params=params).values())
        report = cb_rollout.audit(outputs, model, engine=generator)
        assert report.cause is Cause.OLDER_VERSION, str(report)
        assert report.evidence[0].detail == "the engine's copy"
        generator.sync_weights()
        assert generator.stale_weights() == {}
    assert cb_rollout.audit(outputs, model).cause is None


def test_nothing_of_the_model_is_changed(clean):
    setting, outputs, arguments = clean
    setting.model.train()
    before = {name: p.clone() for name, p in setting.model.state_dict().items()}
    state = torch.get_rng_state()
    cb_rollout.audit(outputs, setting.model, tokenizer=setting.tokenizer, **arguments)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in setting.model.modules())
    assert all(torch.equal(p, before[name]) for name, p in setting.model.state_dict().items())
    setting.model.eval()


@pytest.mark.slow
def test_a_cause_that_was_not_passed_leaves_the_numbers_unexplained(settings):
    setting = settings("llama", torch.float32)
    engine = next(rest[1] for name, *rest in engines(setting) if name == "older version")
    report = cb_rollout.audit(engine.sample(setting.prompts, NUM_NEW), setting.model)
    assert report.cause is None
    assert not report
    assert report.sentence.startswith("No tested cause explains")


@pytest.mark.slow
def test_the_difference_begins_where_the_weights_changed(settings):
    _, report = audited(settings("llama", torch.float32), "update in flight, old keys")
    # The sampled tokens before the update are those of the old weights.
    assert set(report.starts.values()) <= {0, 1}
    setting = settings("llama", torch.float32)
    _, _, engine, arguments = next(iter(engines(setting)))
    late = [
        replace(output, logprobs=[*output.logprobs[:16], *(x - 0.5 for x in output.logprobs[16:])])
        for output in engine.sample(setting.prompts, NUM_NEW)
    ]
    report = cb_rollout.audit(late, setting.model, **arguments)
    assert set(report.starts.values()) == {16}
    assert "at generated token 16" in str(report)


@pytest.mark.slow
def test_tokens_that_were_drawn_otherwise_than_claimed_are_an_alarm(settings):
    setting = settings("llama", torch.float32)
    _, _, engine, _ = next(iter(engines(setting)))
    sharp = replace(engine, draws=lambda logits, _: logits / 0.5)
    report = cb_rollout.audit(sharp.sample(setting.prompts * 4, NUM_NEW), setting.model)
    assert report.cause is Cause.ROUNDING
    assert not report
    assert report.draw_z_score < -5
    assert "tokens do not fit the claimed distribution" in report.sentence


def test_what_cannot_be_audited_is_refused(clean):
    setting, outputs, _ = clean
    short = replace(outputs[0], logprobs=outputs[0].logprobs[:-1])
    with pytest.raises(InvalidRequestError, match="24 generated tokens and 23 log-probabilities"):
        cb_rollout.audit([short], setting.model)
    with pytest.raises(InvalidRequestError, match="no output holds a generated token"):
        cb_rollout.audit([], setting.model)
    strange = replace(outputs[0], prompt_ids=[256])
    with pytest.raises(InvalidRequestError, match="outside the model's vocabulary of 256"):
        cb_rollout.audit([strange], setting.model)
    with pytest.raises(ConfigurationError, match=r"has tensors that .* does not have: nothing"):
        cb_rollout.audit(outputs, setting.model, versions={1: {"nothing": torch.zeros(1)}})
    with pytest.raises(ConfigurationError, match="num_sequences=0"):
        cb_rollout.audit(outputs, setting.model, num_sequences=0)


@pytest.mark.slow
def test_another_tokenizer_is_tested_where_the_model_knows_its_ids(clean):
    setting, outputs, _ = clean
    with pytest.raises(ConfigurationError, match="pass tokenizer too"):
        cb_rollout.audit(outputs, setting.model, tokenizers={"other": setting.other_tokenizer})

    def larger(text, **_):
        ids = setting.other_tokenizer(text=text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [[own + 100 for own in row] for row in ids]}

    report = cb_rollout.audit(
        *(outputs, setting.model),
        tokenizer=setting.tokenizer,
        tokenizers={"other": setting.other_tokenizer, "larger": larger},
    )
    assert report, str(report)
    details = {own.detail for own in report.evidence if own.cause is Cause.OTHER_TOKENIZER}
    assert details == {
        f"other{added}{said}"
        for added in ("", ", special tokens added")
        for said in ("", ", completions too")
    }
