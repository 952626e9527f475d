"""What becomes of unfinished sequences when the weights change."""

import copy

import pytest
import torch
from tiny import plain_logprobs, tiny_model

from cb_rollout import ConfigurationError, RequestStatus, RolloutConfig, SamplingParams
from cb_rollout.engine.service.manager import ContinuousBatchingManager

PROMPT = list(range(5, 45))
PARAMS = SamplingParams(max_new_tokens=60, ignore_eos=True)


@pytest.fixture
def manager():
    config = RolloutConfig(seed=0, block_size=16)
    manager = ContinuousBatchingManager(tiny_model(), continuous_batching_config=config)
    manager.start()
    yield manager
    manager.stop(timeout=0)
    assert manager.engine.num_blocks_used == 0


@torch.no_grad()
def change(model):
    for parameter in model.parameters():
        parameter.mul_(1.2)


def outputs_after_a_change(manager, in_flight):
    """Change the weights under one sequence after its first token; its outputs from then on."""
    request_id = manager.add_request(PROMPT, streaming=True, sampling_params=PARAMS)
    stream = manager.request_id_iter(request_id)
    next(stream)
    with manager.pause(in_flight):
        change(manager.model)
    return list(stream)


def test_leaving_a_pause_begins_a_version_and_recomputes_what_is_in_flight(manager):
    old = copy.deepcopy(manager.model)
    *_, last = outputs_after_a_change(manager, "recompute")
    (first, num_old), (second, num_new) = last.policy_versions
    assert (first, second, num_old + num_new) == (0, 1, 60)
    by_version = [
        plain_logprobs(model, last.prompt_ids, last.generated_tokens)
        for model in (old, manager.model)
    ]
    expected = by_version[0][:num_old] + by_version[1][num_old:]
    assert last.logprobs == pytest.approx(expected, abs=1e-5)


def test_kept_keys_go_on_and_are_shared_with_nobody(manager):
    *_, last = outputs_after_a_change(manager, "keep")
    assert [version for version, _ in last.policy_versions] == [0, 1]
    num_old = last.policy_versions[0][1]
    recomputed = plain_logprobs(manager.model, last.prompt_ids, last.generated_tokens)
    assert last.logprobs[num_old:] != pytest.approx(recomputed[num_old:], abs=1e-3)
    again = manager.get_result(
        manager.add_request(PROMPT + last.generated_tokens, sampling_params=PARAMS)
    )
    expected = plain_logprobs(manager.model, again.prompt_ids, again.generated_tokens)
    assert again.logprobs == pytest.approx(expected, abs=1e-5)


def test_aborted_sequences_deliver_what_they_have_under_the_version_they_had(manager):
    *_, last = outputs_after_a_change(manager, "abort")
    assert last.status is RequestStatus.CANCELLED
    assert last.policy_versions == [(0, len(last.generated_tokens))]
    assert 0 < len(last.logprobs) == len(last.generated_tokens) < 60


def test_an_unknown_fate_is_refused_before_the_engine_is_held(manager):
    with (
        pytest.raises(ConfigurationError, match="in_flight='drop' is not one of keep, recompute"),
        manager.pause("drop"),
    ):
        pytest.fail("paused")
    assert manager.engine.policy_version == 0
