"""A fault stays with the requests that cannot be served."""

import dataclasses

import pytest
import torch
from tiny import plain_logprobs, tiny_model

from cb_rollout import (
    EngineDeadError,
    IncompleteRolloutError,
    OutOfCacheMemoryError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
)
from cb_rollout.engine.kv_cache.paged import PagedCache

PARAMS = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


class FaultyModel:
    """Raises from the model's forward, once armed, while `should_fail(input_ids)` says so."""

    def __init__(self, should_fail, error):
        self.model = tiny_model()
        self.num_calls = 0
        embed = self.model.get_input_embeddings()
        forward = embed.forward

        def faulty(input_ids):
            self.num_calls += 1
            if should_fail(input_ids):
                raise error
            return forward(input_ids)

        self.arm = lambda: setattr(embed, "forward", faulty)
        self.heal = lambda: setattr(embed, "forward", forward)

    def assert_right(self, output):
        self.heal()
        expected = plain_logprobs(self.model, output.prompt_ids, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)
        assert len(output.generated_tokens) == 8


def failing_on(token):
    return lambda input_ids: bool((input_ids == token).any())


@pytest.mark.parametrize("num_good", [0, 1, 6])
def test_a_forward_that_raises_fails_the_request_it_raises_for_alone(num_good):
    cause = ValueError("no such token")
    faulty = FaultyModel(failing_on(17), cause)
    inputs = [[5, 17, 7], *([5 + i, 6] for i in range(num_good))]
    with RolloutGenerator(faulty.model) as generator:
        faulty.arm()
        with pytest.raises(
            IncompleteRolloutError, match=r"1 of .*req_0: ValueError: no such token"
        ) as caught:
            generator.generate_batch(inputs, sampling_params=PARAMS)
        assert caught.value.__cause__ is cause
        bad, *good = caught.value.outputs.values()
        assert (bad.status, bad.generated_tokens) == ("failed", [])
        assert generator.metrics()["rollout/kv_blocks_used"] == 0
        for output in good:
            faulty.assert_right(output)


def test_members_of_a_group_fail_one_by_one_and_each_is_delivered():
    faulty = FaultyModel(failing_on(17), ValueError("no such token"))
    with RolloutGenerator(faulty.model) as generator:
        faulty.arm()
        sampled = dataclasses.replace(PARAMS, temperature=1.0, logit_bias={17: -1e4})
        outputs = generator.generate_batch(
            [[5, 17], [5, 6]], num_return_sequences=3, sampling_params=sampled, on_error="return"
        )
    assert [o.status for o in outputs.values()] == ["failed"] * 3 + ["finished"] * 3


def test_a_passing_fault_harms_nobody():
    calls = []

    def third_call(input_ids):
        calls.append(input_ids.shape)
        return len(calls) in (3, 6)

    faulty = FaultyModel(third_call, RuntimeError("a hiccup"))
    with RolloutGenerator(faulty.model) as generator:
        faulty.arm()
        outputs = generator.generate_batch([[5, 6], [7, 8, 9], [10]], sampling_params=PARAMS)
    for output in outputs.values():
        faulty.assert_right(output)


def test_a_model_that_runs_nothing_any_more_is_the_engines_death():
    cause = ValueError("gone")
    faulty = FaultyModel(lambda input_ids: faulty.num_calls > 3, cause)
    with RolloutGenerator(faulty.model) as generator:
        faulty.arm()
        with pytest.raises(EngineDeadError, match="ValueError: gone") as caught:
            generator.generate_batch([[5, 6], [7, 8, 9]], sampling_params=PARAMS)
        assert caught.value.__cause__ is cause
        faulty.heal()
        assert len(generator.generate_batch([[5, 6]], sampling_params=PARAMS)) == 1


def test_a_prefill_without_memory_is_done_in_smaller_parts():
    faulty = FaultyModel(lambda input_ids: input_ids.numel() > 64, torch.OutOfMemoryError("full"))
    prompts = [[5 + i] * 50 for i in range(5)]
    with RolloutGenerator(faulty.model) as generator:
        faulty.arm()
        outputs = generator.generate_batch(prompts, sampling_params=PARAMS)
    assert len(outputs) == 5
    for output in outputs.values():
        faulty.assert_right(output)


def test_a_decode_without_memory_is_done_with_fewer_rows():
    faulty = FaultyModel(
        lambda input_ids: input_ids.shape[1] == 1 and len(input_ids) > 3,
        torch.OutOfMemoryError("full"),
    )
    with RolloutGenerator(faulty.model) as generator:
        faulty.arm()
        outputs = generator.generate_batch([[5 + i, 6] for i in range(9)], sampling_params=PARAMS)
        assert generator.metrics()["rollout/preemptions"] == 9 + 4
    for output in outputs.values():
        faulty.assert_right(output)


def test_a_sequence_that_has_no_memory_alone_fails_with_the_knob_to_turn():
    faulty = FaultyModel(
        lambda input_ids: bool((input_ids == 17).any()), torch.OutOfMemoryError("full")
    )
    with RolloutGenerator(faulty.model) as generator:
        faulty.arm()
        with pytest.raises(
            IncompleteRolloutError, match=r"1 of 2 .*\(full\); lower max_memory_percent"
        ) as caught:
            generator.generate_batch([[5, 17], [5, 6]], sampling_params=PARAMS)
        assert isinstance(caught.value.__cause__, OutOfCacheMemoryError)
        _, good = caught.value.outputs.values()
    faulty.assert_right(good)


def test_a_cache_that_the_device_refuses_fails_requests_and_not_the_engine(monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("full")

    with RolloutGenerator(tiny_model(), RolloutConfig(num_blocks=64)) as generator:
        monkeypatch.setattr("cb_rollout.engine.kv_cache.storage.PagedCache", refuse)
        with pytest.raises(IncompleteRolloutError, match="no memory for 1 KV cache blocks"):
            generator.generate_batch([[5, 6]], sampling_params=PARAMS)
        monkeypatch.undo()
        assert len(generator.generate_batch([[5, 6]], sampling_params=PARAMS)) == 1


def test_a_cache_that_cannot_grow_serves_fewer_at_a_time(monkeypatch):
    refused = []

    def refuse(self, num_blocks):
        refused.append(num_blocks)
        raise torch.OutOfMemoryError("full")

    model = tiny_model()
    config = RolloutConfig(block_size=16, seed=0)
    prompts = [[5 + i] * 30 for i in range(4)]
    with RolloutGenerator(model, config) as generator:
        generator.generate_batch(prompts[:1], sampling_params=PARAMS)
        monkeypatch.setattr(PagedCache, "grow", refuse)
        outputs = generator.generate_batch(prompts, max_new_tokens=15, sampling_params=PARAMS)
    assert refused
    for output in outputs.values():
        expected = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)


def test_prompts_first_and_in_turns_give_the_same_tokens():
    model = tiny_model()
    prompts = [[5 + i] * (3 + 7 * i) for i in range(6)]
    tokens = []
    for scheduler_type in ("fifo", "prefill_first"):
        config = RolloutConfig(scheduler_type=scheduler_type, max_batch_tokens=16, block_size=16)
        with RolloutGenerator(model, config) as generator:
            outputs = generator.generate_batch(prompts, sampling_params=PARAMS)
            counters = generator.manager.counters
        tokens.append(([o.generated_tokens for o in outputs.values()], counters.decode_forwards))
    assert tokens[0][0] == tokens[1][0]
    # Waiting for every prompt, all rows decode together: as many forwards as one sequence needs.
    assert tokens[1][1] == 7 < tokens[0][1]
