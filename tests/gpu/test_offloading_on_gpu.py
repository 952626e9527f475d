"""Keys of preempted sequences go to pinned memory and come back; `scripts/gpu_check.sh` runs it."""

import pytest
import torch
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.kv_cache.offloading import OffloadSpeeds

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=120, ignore_eos=True, seed=3)
PROMPTS = [[3 + (7 * row + 5 * place) % 200 for place in range(9 + 8 * row)] for row in range(6)]

# For six sequences of nine to eleven blocks each.
OFFLOADED = {"block_size": 16, "num_blocks": 30, "cpu_offload_space": 0.25}


class Always(OffloadSpeeds):
    """Copies are worth it, whatever was measured."""

    def is_copy_faster(self, num_bytes, num_tokens):
        return True


def rollout(model, **settings):
    with RolloutGenerator(model, RolloutConfig(seed=1, **settings)) as generator:
        offloader = generator.manager.engine._offloader
        if offloader is not None:
            offloader.speeds = Always()
        # The second rollout copies into segments that the first one used.
        for _ in range(2):
            outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        if offloader is not None:
            assert not offloader._kept
            assert all(segment.is_pinned() for segment in offloader._free_segments)
            assert generator.manager.status().host_kv_bytes > 0
            generator.sleep()
            assert generator.manager.status().host_kv_bytes == 0
            generator.wake()
            outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        metrics = generator.metrics()
    outputs = list(outputs.values())
    return [o.generated_tokens for o in outputs], [o.logprobs for o in outputs], metrics


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
@pytest.mark.parametrize("use_cuda_graph", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "deepseek_v3", "lfm2", "qwen3_5_text"])
def test_a_sequence_goes_on_from_its_kept_keys_as_if_it_had_never_been_preempted(
    family, use_cuda_graph, weight_sync
):
    """A copy runs on a stream of its own; the graphs launch steps ahead of their tokens."""
    model = tiny_model(family).cuda()
    settings = {"use_cuda_graph": use_cuda_graph, "weight_sync": weight_sync}
    if family == "deepseek_v3":
        del settings["use_cuda_graph"]
    tokens, logprobs, _ = rollout(model, **settings)
    found_tokens, found_logprobs, metrics = rollout(model, **settings, **OFFLOADED)
    assert metrics["rollout/restored_sequences"] == metrics["rollout/preemptions"] > 1
    assert found_tokens == tokens
    for found, expected in zip(found_logprobs, logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


def test_the_bus_is_measured_and_is_faster_than_a_slow_disk():
    model = tiny_model("qwen3").cuda()
    config = RolloutConfig(seed=1, **OFFLOADED)
    with RolloutGenerator(model, config) as generator:
        for _ in range(2):
            generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        speeds = generator.manager.engine._offloader.speeds
    assert speeds.bus_bytes_per_second > 100e6
    assert speeds.prefill_tokens_per_second > 0


def test_pinned_memory_is_given_back():
    model = tiny_model("qwen3").cuda()
    with RolloutGenerator(model, RolloutConfig(seed=1, **OFFLOADED)) as generator:
        generator.manager.engine._offloader.speeds = Always()
        before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        held = generator.manager.status().host_kv_bytes
        during = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        assert during - before >= held > 0
        generator.sleep()
        after = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        assert after <= during - held
