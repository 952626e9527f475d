"""After `sync_weights()` no token and no key of the old policy is read."""

import random

import pytest
import torch
from tiny import largest_difference, plain_logprobs, tiny_model

from cb_rollout import (
    IncompleteRolloutError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
    generate_batch,
)
from cb_rollout.engine.kv_cache.block_manager import PrefixCache, PrefixKey
from cb_rollout.rollout.kept import kept_by

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
PROMPT = [random.Random(0).randrange(3, 256) for _ in range(100)]


def change(model, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def resend_after_change(generator, model):
    (before,) = generator.generate_batch([PROMPT], sampling_params=GREEDY).values()
    assert largest_difference(model, [before]) <= 1e-5
    change(model)
    report = generator.sync_weights()
    (after,) = generator.generate_batch([PROMPT], sampling_params=GREEDY).values()
    return before, after, report


def test_a_resent_prompt_of_several_blocks_is_computed_from_the_new_weights():
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        before, after, report = resend_after_change(generator, model)
        assert generator.metrics()["rollout/prefill_tokens"] == len(PROMPT)
    assert largest_difference(model, [after]) <= 1e-5
    assert (before.policy_versions, after.policy_versions) == ([(0, 12)], [(1, 12)])
    assert (report.policy_version, report.bytes_copied) == (1, 0)


def test_without_a_sync_the_prefix_is_reused():
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        for _ in range(2):
            generator.generate_batch([PROMPT], sampling_params=GREEDY)
        assert generator.metrics()["rollout/prefill_tokens"] == len(PROMPT) - 96


def test_a_prefix_held_by_a_request_of_the_old_policy_is_not_matched(monkeypatch):
    """The version in the key is what protects, not the forgetting: both ways round."""

    def forget_nothing(self):
        return []

    monkeypatch.setattr(PrefixCache, "clear", forget_nothing)
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        _, after, _ = resend_after_change(generator, model)
    assert largest_difference(model, [after]) <= 1e-5

    class KeyWithoutVersion(PrefixKey):
        def __new__(cls, policy_version, parent, token_ids):
            return super().__new__(cls, 0, parent, token_ids)

    monkeypatch.setattr("cb_rollout.engine.kv_cache.block_manager.PrefixKey", KeyWithoutVersion)
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        _, stale, _ = resend_after_change(generator, model)
    assert largest_difference(model, [stale]) > 0.1


def test_a_sync_while_requests_run_stamps_each_token_with_its_version():
    model = tiny_model()
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        manager = generator.manager
        manager.start()
        request_id = manager.add_request(PROMPT, streaming=True, sampling_params=params)
        outputs = manager.request_id_iter(request_id)
        next(outputs)
        with manager.pause():
            change(model)
            generator.sync_weights()
        *_, last = outputs
    assert [version for version, _ in last.policy_versions] == [0, 1]
    assert sum(count for _, count in last.policy_versions) == 200
    num_old = last.policy_versions[0][1]
    # What is sampled after the change equals a forward of the new weights over everything before.
    expected = plain_logprobs(model, last.prompt_ids, last.generated_tokens)
    assert last.logprobs[num_old:] == pytest.approx(expected[num_old:], abs=1e-5)


def test_a_kept_manager_never_reads_keys_of_an_earlier_call():
    model = tiny_model()
    arguments = {
        "continuous_batching_config": RolloutConfig(block_size=16),
        "sampling_params": GREEDY,
        "progress_bar": False,
        "persistent_manager": True,
    }
    generate_batch(model, [PROMPT], **arguments)
    change(model)
    (after,) = generate_batch(model, [PROMPT], **arguments).values()
    assert largest_difference(model, [after]) <= 1e-5
    generate_batch(model, [PROMPT], **{**arguments, "persistent_manager": False})
    # The running thread refers to the model, and so to the generator kept on it.
    kept_by(model).generator.close()


@pytest.mark.fast_cases("False-dtype1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("has_sampled", [False, True])
def test_a_model_that_was_cast_since_is_sampled_as_it_is_now(dtype, has_sampled):
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        plan = generator.memory_plan()
        if has_sampled:
            generator.generate_batch([PROMPT], sampling_params=GREEDY)
        model.to(dtype)
        (output,) = generator.generate_batch([PROMPT], sampling_params=GREEDY).values()
        assert generator.metrics()["rollout/prefill_tokens"] == len(PROMPT), "no old key is read"
        size = generator.memory_plan().bytes_per_block
    assert size * torch.float32.itemsize == plan.bytes_per_block * dtype.itemsize
    # Keys or weights of before would be nats off; in bfloat16 rounding alone is hundredths.
    allowed = 1e-5 if dtype is torch.float64 else 3e-2
    assert largest_difference(model, [output]) <= allowed


def test_a_model_that_was_moved_away_is_told_of_and_serves_again_once_it_is_back():
    model, kept = tiny_model(), tiny_model()
    with RolloutGenerator(model) as generator:
        model.to("meta")
        with pytest.raises(IncompleteRolloutError, match=r"was on cpu .* is on meta now; move it"):
            generator.generate_batch([PROMPT], sampling_params=GREEDY)
        vars(model).update(vars(kept))
        (output,) = generator.generate_batch([PROMPT], sampling_params=GREEDY).values()
    assert largest_difference(model, [output]) <= 1e-5


def test_weights_that_changed_without_a_sync_begin_a_policy_version(caplog):
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        generator.generate_batch([PROMPT], sampling_params=GREEDY)
        change(model)
        (after,) = generator.generate_batch([PROMPT], sampling_params=GREEDY).values()
        assert largest_difference(model, [after]) <= 1e-5
        assert after.policy_versions == [(1, 12)]
        assert (
            "the weights, settings or active adapters changed without sync_weights()" in caplog.text
        )
        generator.sync_weights()
        assert generator.policy_version == 2


@pytest.mark.parametrize("is_own", [True, False])
def test_a_fused_optimizer_step_without_a_sync_begins_a_policy_version(is_own):
    model, other = tiny_model(), tiny_model()
    stepped = model if is_own else other
    optimizer = torch.optim.AdamW(stepped.parameters(), lr=0.05, fused=True)
    # Enough rows for the kernel of many rows.
    prompts = [[row, *PROMPT[:20]] for row in range(5, 13)]
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        generator.generate_batch(prompts, sampling_params=GREEDY)
        stepped(torch.tensor([PROMPT])).logits.square().mean().backward()
        writes = [parameter._version for parameter in stepped.parameters()]
        optimizer.step()
        assert [parameter._version for parameter in stepped.parameters()] == writes
        outputs = generator.generate_batch(prompts, sampling_params=GREEDY).values()
        assert largest_difference(model, outputs) <= 1e-5
        assert {tuple(output.policy_versions) for output in outputs} == {((int(is_own), 12),)}


def test_weights_that_were_replaced_without_a_sync_begin_a_policy_version():
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        generator.generate_batch([PROMPT], sampling_params=GREEDY)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.data * 1.1
        (after,) = generator.generate_batch([PROMPT], sampling_params=GREEDY).values()
        assert largest_difference(model, [after]) <= 1e-5
        assert after.policy_versions == [(1, 12)]


def test_sequences_in_flight_are_computed_again_where_weights_changed_without_a_sync():
    model = tiny_model()
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        manager = generator.manager
        manager.start()
        request_id = manager.add_request(PROMPT, streaming=True, sampling_params=params)
        manager.get_result(request_id)
        with manager.loop.paused():
            change(model)
        *_, last = manager.request_id_iter(request_id)
    (_, num_before), (version, num_after) = last.policy_versions
    assert (version, num_before + num_after) == (1, 60)
    expected = plain_logprobs(model, PROMPT, last.generated_tokens)[-num_after:]
    assert last.logprobs[-num_after:] == pytest.approx(expected, abs=1e-5)


def test_weights_changed_before_the_first_rollout_or_synced_begin_no_version_of_their_own():
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        change(model)
        (first,) = generator.generate_batch([PROMPT], sampling_params=GREEDY).values()
        change(model, seed=2)
        generator.sync_weights()
        change(model, seed=3)
        (second,) = generator.generate_batch([PROMPT], sampling_params=GREEDY).values()
    assert (first.policy_versions, second.policy_versions) == ([(0, 12)], [(1, 12)])
    assert largest_difference(model, [second]) <= 1e-5
