"""Offloaded keys of preempted sequences change no token."""

import pytest
from tiny import tiny_model

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=40, ignore_eos=True, seed=3)
PROMPTS = [[20 + i, 7, 8, 9, 30 + i] for i in range(6)]
# For six sequences of eleven or twelve blocks each.
SCARCE = {"block_size": 4, "num_blocks": 24}


def rollout(model, prompts=PROMPTS, **settings):
    with RolloutGenerator(model, RolloutConfig(seed=0, **settings)) as generator:
        outputs = generator.generate_batch(prompts, sampling_params=PARAMS)
        offloader = generator.manager.engine._scheduler._offloader
        assert getattr(offloader, "num_bytes", 0) == 0
        assert generator.manager.engine.num_blocks_used == 0
        return list(outputs.values()), generator.metrics()


def largest_difference(outputs, others):
    assert [o.generated_tokens for o in outputs] == [o.generated_tokens for o in others]
    pairs = zip(outputs, others, strict=True)
    return max(abs(x - y) for o, p in pairs for x, y in zip(o.logprobs, p.logprobs, strict=True))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "deepseek_v3", "bloom"])
def test_preempted_sequences_resume_from_offloaded_keys_with_the_same_tokens(family):
    model = tiny_model(family)
    plenty, _ = rollout(model)
    _, before = rollout(model, **SCARCE)
    kept, after = rollout(model, **SCARCE, cpu_offload_gib=0.1)
    assert largest_difference(kept, plenty) <= 1e-5
    assert before["rollout/preemptions"] == after["rollout/preemptions"] > 3
    # Each resumed sequence computes one token again, the last one sampled.
    prompts = sum(map(len, PROMPTS))
    assert after["rollout/prefill_tokens"] <= prompts + 8 * after["rollout/preemptions"]
    assert after["rollout/prefill_tokens"] < 0.6 * before["rollout/prefill_tokens"]


def test_keys_beyond_cpu_offload_gib_are_computed_again():
    model = tiny_model()
    plenty, _ = rollout(model)
    kept, metrics = rollout(model, **SCARCE, cpu_offload_gib=2e-6)
    assert largest_difference(kept, plenty) <= 1e-5
    _, anew = rollout(model, **SCARCE)
    assert metrics["rollout/prefill_tokens"] == anew["rollout/prefill_tokens"]


def test_shared_prefixes_stay_shared_when_keys_are_restored():
    model = tiny_model()
    prompts = [[50 + i % 7 for i in range(13)]] * 6
    plenty, _ = rollout(model, prompts)
    kept, metrics = rollout(model, prompts, **SCARCE, cpu_offload_gib=0.1)
    assert metrics["rollout/preemptions"] > 0
    assert largest_difference(kept, plenty) <= 1e-5


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_offloaded_keys_of_an_older_policy_are_never_restored(in_flight):
    config = RolloutConfig(seed=0, **SCARCE, cpu_offload_gib=0.1)
    with RolloutGenerator(tiny_model(), config) as generator:
        manager = generator.manager
        offloader = manager.engine._scheduler._offloader
        manager.start()
        ids = manager.add_requests(PROMPTS, 40, streaming=True, sampling_params=PARAMS)
        while not offloader.num_bytes:
            assert manager.get_result(timeout=60) is not None
        with manager.pause(in_flight):
            pass
        offloader = manager.engine._scheduler._offloader
        with manager.pause("keep"):
            running = [r for r in manager.engine._scheduler.running if r.has_old_keys]
            for request in running:
                offloader.save(request)
            assert offloader.num_bytes == 0 or not running
        assert all(len(list(manager.request_id_iter(i))[-1].generated_tokens) == 40 for i in ids)


def test_a_cancelled_sequences_keys_are_dropped():
    config = RolloutConfig(seed=0, **SCARCE, cpu_offload_gib=0.1)
    with RolloutGenerator(tiny_model(), config) as generator:
        manager = generator.manager
        manager.start()
        ids = manager.add_requests(PROMPTS, 40, streaming=True, sampling_params=PARAMS)
        offloader = manager.engine._scheduler._offloader
        while not offloader.num_bytes:
            assert manager.get_result(timeout=60) is not None
        for request_id in ids:
            manager.cancel_request(request_id)
        for request_id in ids:
            list(manager.request_id_iter(request_id))
        assert offloader.num_bytes == 0


def test_recurrent_models_and_negative_sizes_are_refused_with_the_setting():
    with pytest.raises(ConfigurationError, match=r"recurrent states.*leave it at 0"):
        RolloutGenerator(tiny_model("lfm2"), RolloutConfig(cpu_offload_gib=1))
    with pytest.raises(ConfigurationError, match="cpu_offload_gib=-1"):
        RolloutConfig(cpu_offload_gib=-1)
