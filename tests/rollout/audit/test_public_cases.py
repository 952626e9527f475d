"""Two faults that others trained with for weeks are named, on the engines that had them."""

import copy

import pytest
import torch

import cb_rollout
from benchmarks.peers.audited import transformers_manager
from cb_rollout.rollout.audit.report import Cause
from measure.audit import NUM_NEW, tiny_setting


@pytest.fixture(scope="module")
def setting():
    return tiny_setting("llama", torch.float32)


def test_an_adapter_that_was_never_loaded_is_named_on_transformers_manager(setting):
    """As unslothai/unsloth 8701: the engine ran the base model, and training went on."""
    with transformers_manager(setting.base, setting.prompts, NUM_NEW) as sample:
        outputs = sample()
    report = cb_rollout.audit(outputs, setting.model)
    assert report.cause is Cause.NO_ADAPTER, str(report)
    assert "Load the adapter in the engine" in report.sentence


def test_prefixes_that_survive_an_update_in_transformers_manager_are_named(setting):
    model, versions = copy.deepcopy(setting.old), {"before": setting.old.state_dict()}
    with transformers_manager(model, setting.prompts, NUM_NEW) as sample:
        before = sample(seed=0)
        model.load_state_dict(setting.model.state_dict())
        after = sample(seed=1)
    assert cb_rollout.audit(before, setting.old), "the rollout before the update was wrong too"
    report = cb_rollout.audit(after, setting.model, versions=versions)
    assert report.cause is Cause.STALE_PROMPT_KEYS, str(report)
    assert report.evidence[0].detail == "before, blocks of 32"
    assert "Reset its prefix cache at each update." in report.sentence


def test_a_fresh_manager_after_the_update_is_no_alarm(setting):
    versions = {"before": setting.old.state_dict()}
    with transformers_manager(setting.model, setting.prompts, NUM_NEW) as sample:
        outputs = sample()
    report = cb_rollout.audit(outputs, setting.model, versions=versions)
    assert report, str(report)
