"""Asynchronous rollouts in a loop of one's own, stopped and resumed: nothing is lost or redrawn."""

import io

import pytest
import torch
from datasets import Dataset
from test_async_grpo import ROWS, checkpoint, settings_of, share_of_sevens  # noqa: F401
from tiny import tiny_model

from cb_rollout import InvalidRequestError, RolloutConfig, RolloutError
from cb_rollout.integrations.async_grpo import AsyncRollouts
from cb_rollout.strategies import DynamicSampling, Retrying

GROUP = 4
NUM_GROUPS = 10


def rollouts_of(model, tmp_path, strategy=None, **settings):
    args = settings_of(tmp_path, max_completion_length=60, seed=7, **settings)
    data = Dataset.from_list(ROWS)
    return AsyncRollouts(
        model, args, data, share_of_sevens, config=RolloutConfig(), strategy=strategy
    )


def take(rollouts, num_samples):
    """Take samples as a loop does, and fail where the rollouts did."""
    taken = []
    for _ in range(num_samples):
        rollouts.check_health(60)
        taken.append(rollouts.rollout_buffer.get(timeout=60))
    return taken


def reloaded(state):
    """Return a state as another process reads it from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_prompt(samples):
    """Return the whole groups among samples: ids, log-probabilities and advantages."""
    groups = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    whole = {}
    for index, members in groups.items():
        if len(members) == GROUP and index < NUM_GROUPS:
            whole[index] = sorted(members, key=lambda sample: sample.input_ids.tolist())
    return whole


def taken_until_amid_sequences(rollouts):
    """Take samples until sequences are in flight with tokens; return these samples and a state."""
    taken = []
    for _ in range(60):
        taken += take(rollouts, 1)
        state = reloaded(rollouts.state_dict())
        requests = state["groups"]["sequences"]["requests"]
        if any(5 < len(request["generated_tokens"]) < 55 for request in requests):
            return taken, state
    raise AssertionError("no sequence was in flight")


def test_a_stopped_loop_gets_each_sample_once_with_its_draws(checkpoint, tmp_path):  # noqa: F811
    whole = rollouts_of(checkpoint, tmp_path)
    whole.start()
    expected = by_prompt(take(whole, (NUM_GROUPS + 4) * GROUP))
    whole.stop()

    stopped = rollouts_of(checkpoint, tmp_path)
    stopped.start()
    taken, state = taken_until_amid_sequences(stopped)
    stopped.stop()
    resumed = rollouts_of(checkpoint, tmp_path)
    resumed.load_state_dict(state)
    resumed.start()
    num_left = (NUM_GROUPS + 4) * GROUP - len(taken)
    if num_left > 0:
        taken += take(resumed, num_left)
    resumed.stop()

    found = by_prompt(taken)
    assert len({id(sample) for sample in taken}) == len(taken)
    assert found.keys() == expected.keys() == set(range(NUM_GROUPS))
    for index, members in expected.items():
        for sample, other in zip(found[index], members, strict=True):
            assert sample.input_ids.tolist() == other.input_ids.tolist()
            assert sample.completion_mask.tolist() == other.completion_mask.tolist()
            assert sample.advantage == pytest.approx(other.advantage)
            difference = abs(sample.old_log_probs - other.old_log_probs).max()
            assert difference <= 1e-5


def test_tokens_in_flight_keep_their_versions_under_other_weights(checkpoint, tmp_path):  # noqa: F811
    stopped = rollouts_of(checkpoint, tmp_path)
    stopped.start()
    _, state = taken_until_amid_sequences(stopped)
    stopped.stop()
    partial = {}
    for request in state["groups"]["sequences"]["requests"]:
        if request["generated_tokens"]:
            partial[tuple(request["prompt_ids"] + request["generated_tokens"])] = request
    num_queued = len(state["samples"])

    resumed = rollouts_of(checkpoint, tmp_path)
    resumed.load_state_dict(state)
    resumed.start()
    resumed.pause()
    other = tiny_model(vocab_size=99)
    resumed.send_weights((name, 0.9 * p.detach()) for name, p in other.named_parameters())
    resumed.resume()
    resumed.update_model_version(1)
    taken = take(resumed, num_queued + 6 * GROUP)
    resumed.stop()

    # First the samples that waited, in their order.
    for sample, saved in zip(taken[:num_queued], state["samples"], strict=True):
        assert sample.input_ids.tolist() == saved["input_ids"].tolist()
        assert sample.token_versions == saved["token_versions"]
    num_found = 0
    for sample in taken[num_queued:]:
        ids = sample.input_ids.tolist()
        for start, request in partial.items():
            if tuple(ids[: len(start)]) == start:
                num_found += 1
                num_prompt = len(request["prompt_ids"])
                kept = sample.old_log_probs[num_prompt : len(start)].tolist()
                assert kept == pytest.approx(request["logprobs"], abs=1e-6)
                assert sample.token_versions[0][0] == 0
                assert sample.token_versions[0][1] >= len(request["generated_tokens"])
    assert num_found == len(partial)


def test_a_state_that_is_not_this_loops_is_refused(checkpoint, tmp_path):  # noqa: F811
    rollouts = rollouts_of(checkpoint, tmp_path)
    with pytest.raises(RolloutError, match=r"taken between start\(\) and stop\(\)"):
        rollouts.state_dict()
    for state in ({}, None, {"format": 0}):
        with pytest.raises(InvalidRequestError, match=r"AsyncRollouts has format .*, and 1 is"):
            rollouts.load_state_dict(state)
    rollouts.start()
    state = reloaded(rollouts.state_dict())
    with pytest.raises(RolloutError, match=r"loaded before start\(\)"):
        rollouts.load_state_dict(state)
    rollouts.pause()
    with pytest.raises(RolloutError, match=r"call resume\(\) first"):
        rollouts.state_dict()
    rollouts.resume()
    rollouts.stop()
    for strategy in (DynamicSampling(), Retrying()):
        other = rollouts_of(checkpoint, tmp_path, strategy)
        with pytest.raises(InvalidRequestError, match=r"the state is of .* the strategy now is"):
            other.load_state_dict(state)
        other.start()
        assert len(take(other, GROUP)) == GROUP
        other.stop()
