"""Keys and states that come back from the host change no token and no log-probability.

A CPU's keys are in host memory already, so nothing is offloaded there; these tests let it copy as a
GPU does.
"""

import logging

import pytest
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.kv_cache import offloading

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=24, ignore_eos=True, seed=3)
PROMPTS = [[20 + i, 7, 8, 9, 30 + i] for i in range(4)]

# For four sequences of seven or eight blocks each.
SCARCE = {"block_size": 4, "num_blocks": 14}
OFFLOADED = {**SCARCE, "cpu_offload_space": 0.01}


class KnownSpeeds(offloading.OffloadSpeeds):
    """Speeds that no measurement changes."""

    def record_prefill(self, num_tokens, seconds):
        pass


COPIES = KnownSpeeds(bus_bytes_per_second=1e30, prefill_tokens_per_second=1.0)
COMPUTES = KnownSpeeds(bus_bytes_per_second=1.0, prefill_tokens_per_second=1e30)


@pytest.fixture(autouse=True)
def _copying_cpu(monkeypatch):
    monkeypatch.setattr(offloading, "OFFLOADED_DEVICES", {"cpu", "cuda"})


def generator_of(model, speeds=COPIES, **settings):
    generator = RolloutGenerator(model, RolloutConfig(seed=0, **settings))
    offloader = offloader_of(generator)
    if offloader is not None:
        offloader.speeds = speeds
    return generator


def offloader_of(generator):
    return generator.manager.engine._offloader


def rollout(model, prompts=PROMPTS, speeds=COPIES, num=1, **settings):
    """Outputs and metrics; whatever was kept is forgotten, and released with the generator."""
    with generator_of(model, speeds, **settings) as generator:
        outputs = generator.generate_batch(
            prompts, sampling_params=PARAMS, num_return_sequences=num
        )
        assert generator.manager.engine.num_blocks_used == 0
        offloader = offloader_of(generator)
        assert offloader is None or not offloader._kept
        metrics = generator.metrics()
    assert generator.manager.status().host_kv_bytes == 0
    return list(outputs.values()), metrics


def require_equal(outputs, others, within=0.0):
    assert [o.generated_tokens for o in outputs] == [o.generated_tokens for o in others]
    for ours, theirs in zip(outputs, others, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=within, rel=0)


# Full attention; a window; latent attention; a bias of positions; convolutions; linear attention;
# state spaces without keys.
FAMILIES = {
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "deepseek_v3": {},
    "bloom": {},
    "lfm2": {},
    "qwen3_5_text": {},
    "mamba2": {"num_heads": 8, "head_dim": 16},
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f == "qwen3" else pytest.mark.slow) for f in FAMILIES],
)
def test_a_sequence_goes_on_from_its_kept_keys_as_if_it_had_never_been_preempted(family):
    model = tiny_model(family, **FAMILIES[family])
    plenty, _ = rollout(model)
    kept, metrics = rollout(model, **OFFLOADED)
    # The sizes of decode batches differ, and so may a product's last bit.
    require_equal(kept, plenty, within=1e-5)
    assert metrics["rollout/preemptions"] > 1
    assert metrics["rollout/offloaded_sequences"] == metrics["rollout/preemptions"]
    assert metrics["rollout/restored_sequences"] == metrics["rollout/preemptions"]
    # Nothing is computed twice.
    assert metrics["rollout/prefill_tokens"] == sum(map(len, PROMPTS))


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f == "qwen3" else pytest.mark.slow) for f in ("qwen3", "lfm2")],
)
def test_in_bitwise_numerics_no_bit_differs(family):
    model = tiny_model(family)
    plenty, _ = rollout(model, numerics="bitwise")
    kept, metrics = rollout(model, numerics="bitwise", **OFFLOADED)
    assert metrics["rollout/restored_sequences"] > 1
    require_equal(kept, plenty)


def test_where_a_prefill_is_faster_sequences_are_computed_again():
    model = tiny_model()
    plenty, _ = rollout(model)
    again, metrics = rollout(model, speeds=COMPUTES, **OFFLOADED)
    _, without = rollout(model, **SCARCE)
    require_equal(again, plenty, within=1e-5)
    assert metrics["rollout/preemptions"] > 1
    assert metrics["rollout/offloaded_sequences"] == metrics["rollout/restored_sequences"] == 0
    assert metrics["rollout/prefill_tokens"] == without["rollout/prefill_tokens"]


@pytest.mark.slow
def test_speeds_are_measured_on_this_machine():
    """Which way it goes is the machine's affair; the tokens are not."""
    model = tiny_model()
    plenty, _ = rollout(model)
    with generator_of(model, offloading.OffloadSpeeds(), **OFFLOADED) as generator:
        for _ in range(2):
            outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        speeds = offloader_of(generator).speeds
        assert speeds.prefill_tokens_per_second > 0
        assert speeds.bus_bytes_per_second > 0
    assert [o.generated_tokens for o in outputs.values()] == [o.generated_tokens for o in plenty]


def test_groups_and_chunks_of_prompts_are_kept_too():
    model = tiny_model()
    prompts = [[50 + i % 7 for i in range(13)], [9, 8, 7]]
    plenty, _ = rollout(model, prompts, num=3)
    kept, metrics = rollout(model, prompts, num=3, max_batch_tokens=4, **OFFLOADED)
    assert metrics["rollout/restored_sequences"] > 1
    require_equal(kept, plenty, within=1e-5)


def test_a_full_store_computes_the_longest_kept_again():
    model = tiny_model()
    plenty, _ = rollout(model)
    # One segment, which holds one sequence.
    one = {**OFFLOADED, "cpu_offload_space": offloading.MIN_SEGMENT_BYTES / 2**30}
    kept, metrics = rollout(model, **one)
    require_equal(kept, plenty, within=1e-5)
    assert 0 < metrics["rollout/restored_sequences"] < metrics["rollout/offloaded_sequences"]


@pytest.mark.slow
def test_the_experts_of_kept_sequences_are_those_that_they_took():
    model = tiny_model("qwen3_moe")
    settings = {"router_replay": True, "verify_every_steps": 0}
    plenty, _ = rollout(model, **settings)
    kept, metrics = rollout(model, **settings, **OFFLOADED)
    assert metrics["rollout/restored_sequences"] > 1
    for ours, theirs in zip(kept, plenty, strict=True):
        assert (ours.routed_experts == theirs.routed_experts).all()


def stepped_until_one_is_kept(generator):
    """Step the engine by hand; return it and the requests once the keys of one are on the host."""
    manager = generator.manager
    requests = manager.create_requests(PROMPTS, [PARAMS] * len(PROMPTS))
    for request in requests:
        manager.engine.add(request)
    while not offloader_of(generator)._kept:
        manager.engine.step()
    return manager.engine, requests


def finish(engine):
    while engine.has_work:
        engine.step()


def require_tokens(requests, outputs):
    expected = [output.generated_tokens for output in outputs]
    assert [request.token_ids[len(request.prompt_ids) :] for request in requests] == expected


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("keep_keys", [False, True])
def test_after_a_sync_kept_keys_of_the_old_policy_never_come_back(keep_keys):
    model = tiny_model()
    plenty, _ = rollout(model)
    with generator_of(model, **OFFLOADED) as generator:
        engine, requests = stepped_until_one_is_kept(generator)
        (waiting,) = [r for r in requests if offloader_of(generator).holds(r)]
        num_tokens, num_prefilled = waiting.num_tokens, engine.counters.prefill_tokens
        engine.begin_policy_version(1, keep_keys=keep_keys)
        assert not offloader_of(generator)._kept
        while waiting.num_tokens == num_tokens:
            engine.step()
        assert waiting.policy_versions[-1] == (1, 1)
        # All its tokens went through a forward of the new policy.
        assert engine.counters.prefill_tokens >= num_prefilled + num_tokens
        finish(engine)
        # The weights are the same here.
        require_tokens(requests, plenty)


def test_a_write_to_the_weights_forgets_kept_keys():
    model = tiny_model()
    with generator_of(model, **OFFLOADED) as generator:
        engine, _ = stepped_until_one_is_kept(generator)
        engine.release_model()
        model.lm_head.weight.data.mul_(1.0)
        model.lm_head.weight.detach().mul_(1.0)
        offloader, version = offloader_of(generator), engine.policy_version
        engine._notice_changed_function()
        assert engine.policy_version == version + 1
        assert not offloader._kept
        finish(engine)


def test_keys_of_a_cancelled_sequence_are_forgotten():
    model = tiny_model()
    plenty, _ = rollout(model)
    with generator_of(model, **OFFLOADED) as generator:
        engine, requests = stepped_until_one_is_kept(generator)
        for request in list(requests):
            if offloader_of(generator).holds(request):
                engine.cancel(request)
        assert not offloader_of(generator)._kept
        finish(engine)
        pairs = zip(requests, plenty, strict=True)
        ended = [(r, o) for r, o in pairs if r.num_generated == PARAMS.max_new_tokens]
        assert len(ended) == len(requests) - 1
        require_tokens(*zip(*ended, strict=True))


def test_a_released_cache_holds_no_byte_of_the_host_and_sequences_go_on_after():
    model = tiny_model()
    plenty, _ = rollout(model)
    with generator_of(model, **OFFLOADED) as generator:
        engine, requests = stepped_until_one_is_kept(generator)
        assert engine.status().host_kv_bytes > 0
        engine.release_cache()
        assert engine.status().host_kv_bytes == 0
        assert not offloader_of(generator)._kept
        finish(engine)
        require_tokens(requests, plenty)


def test_asleep_and_closed_no_byte_of_the_host_is_held():
    with generator_of(tiny_model(), **OFFLOADED) as generator:
        for _ in range(2):
            generator.generate_batch(PROMPTS, sampling_params=PARAMS)
            # Kept for the next rollout's sequences.
            assert generator.manager.status().host_kv_bytes > 0
            generator.sleep()
            assert generator.manager.status().host_kv_bytes == 0
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    assert generator.manager.status().host_kv_bytes == 0


def test_the_plan_names_the_space_and_a_cpu_says_why_it_needs_none(monkeypatch, caplog):
    with generator_of(tiny_model(), cpu_offload_space=0.5) as generator:
        plan = str(generator.memory_plan())
        assert "offloaded keys          0.500 GiB  of host memory at most" in plan
    monkeypatch.setattr(offloading, "OFFLOADED_DEVICES", {"cuda"})
    caplog.set_level(logging.INFO, logger="cb_rollout")
    with generator_of(tiny_model(), cpu_offload_space=0.5) as generator:
        plan = str(generator.memory_plan())
        assert "0.000 GiB  the keys of a cpu are in host memory already" in plan
        assert offloader_of(generator) is None
    assert "cpu_offload_space=0.5 has nothing to do here: the keys of a cpu are" in caplog.text
    with generator_of(tiny_model()) as generator:
        assert "offloaded" not in str(generator.memory_plan())


@pytest.mark.slow
def test_a_margin_of_free_blocks_leaves_the_tokens_and_preempts_fewer():
    model = tiny_model()
    plenty, _ = rollout(model)
    margins = {}
    for margin in (0.0, 0.6, 1.0):
        outputs, metrics = rollout(model, safety_margin=margin, **SCARCE)
        require_equal(outputs, plenty, within=1e-5)
        margins[margin] = metrics["rollout/preemptions"]
    assert margins[0.0] >= margins[0.6] >= margins[1.0] == 0
    assert margins[0.0] > 0
