"""Rollouts of prompts with images are audited with them; faults of images are named."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

import cb_rollout
from cb_rollout import ConfigurationError
from cb_rollout.compat.multimodal import placeholder_token_ids
from cb_rollout.rollout.audit.report import Cause
from measure.audit import VISION_FAMILIES, clean_rollouts, image_faults, vision_setting

NUM_NEW, NUM_CLEAN = 12, 6
FAST = {("llava", torch.bfloat16)}
EACH = pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in product(VISION_FAMILIES, (torch.float32, torch.bfloat16))
    ],
)


@pytest.fixture(scope="module")
def settings():
    return cache(vision_setting)


@pytest.mark.slow
@EACH
def test_the_cause_of_a_fault_of_images_comes_first(settings, family, dtype):
    setting, missed = settings(family, dtype), {}
    for fault, cause, sample, arguments in image_faults(setting):
        report = cb_rollout.audit(sample(num_new=NUM_NEW), setting.model, **arguments)
        if report.cause is not cause or bool(report) is not (cause is Cause.ROUNDING):
            missed[fault] = str(report)
    assert missed == {}


@EACH
def test_rollouts_of_the_engine_with_images_are_no_alarm(settings, family, dtype):
    setting = settings(family, dtype)
    reports = [
        cb_rollout.audit(outputs, setting.model)
        for outputs in clean_rollouts(setting, "images", NUM_CLEAN, first_seed=1)
    ]
    assert [str(report) for report in reports if not report] == []
    tested = {own.cause for own in reports[0].evidence}
    assert {Cause.IMAGES_IGNORED, Cause.IMAGES_EXCHANGED, Cause.POSITIONS} <= tested
    # Other tokens would move the images.
    assert Cause.BOS_TWICE not in tested


def test_prompt_keys_of_an_older_version_include_those_of_images(settings):
    setting = settings("llava", torch.float32)
    generator = torch.Generator().manual_seed(0)
    placeholders, outputs = [*placeholder_token_ids(setting.model)], []
    for number, prompt in enumerate(setting.prompts):
        tensors = dict(setting.tensors[number // 2][number // 2])
        ids_1S = tensors.pop("input_ids")
        tensors.pop("attention_mask")
        tokens, logprobs = [], []
        with torch.no_grad():
            cache = setting.old(input_ids=ids_1S[:, :-1], **tensors).past_key_values
            new_1Q = ids_1S[:, -1:]
            for _ in range(NUM_NEW):
                logits = setting.model(input_ids=new_1Q, past_key_values=cache).logits[0, -1]
                p = logits.softmax(-1)
                drawn = p.index_fill(0, torch.tensor(placeholders), 0)
                token = int(torch.multinomial(drawn, 1, generator=generator))
                tokens.append(token)
                logprobs.append(float(p[token].log()))
                new_1Q = torch.tensor([[token]])
        outputs.append(replace(prompt, generated_tokens=tokens, logprobs=logprobs))
    versions = {"old": setting.old.state_dict()}
    report = cb_rollout.audit(outputs, setting.model, versions=versions)
    assert report.cause is Cause.STALE_PROMPT_KEYS, str(report)


def test_a_prompt_without_its_images_is_refused(settings):
    setting = settings("llava", torch.float32)
    (output, *_) = setting.sample(num_new=2)
    with pytest.raises(ConfigurationError, match="holds image tokens but no"):
        cb_rollout.audit([replace(output, images=None)], setting.model)
