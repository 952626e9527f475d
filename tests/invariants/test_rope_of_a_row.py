"""Rotary frequencies that follow a length follow the row's own, whatever runs beside it."""

import random
import weakref
from typing import Any

import pytest
import torch
from fast_path import Playback, pretend_cuda
from tiny import tiny_model

from cb_rollout import (
    GenerationOutput,
    InvalidRequestError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
    packed_logprobs,
)
from cb_rollout.compat.module_state import forward_identity
from cb_rollout.packing.batch import PackingLayout
from cb_rollout.packing.logprobs import _LAYOUTS, AgreedLayouts

# Tokens of the longest row that has the short factors.
LIMIT = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.12}

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": LIMIT,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT},
    "phimoe": {
        "rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.4},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma3_text": {
        "rope_parameters": {
            "full_attention": LONGROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
}
TIGHT = {"block_size": 4, "num_blocks": 24, "max_batch_tokens": 8}
CONFIGS = {"roomy": {"block_size": 4}, "tight": TIGHT, "copied": {"allow_block_sharing": False}}
SAMPLED = SamplingParams(max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=30, ignore_eos=True)


def longrope_model(family: str = "phi3", **settings: Any):
    return tiny_model(family, max_position_embeddings=64, **FAMILIES[family] | settings)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(3, 256) for _ in range(length)] for length in lengths]


@torch.no_grad()
def sampled_logprobs(model, output: GenerationOutput) -> list[float]:
    """Of each token, by a plain forward of the sequence as long as it was, and of nothing else."""
    ids, first = [*output.prompt_ids, *output.generated_tokens], len(output.prompt_ids)
    logprobs = []
    for stop in range(first, len(ids)):
        # A row of the long factors has the same logits as any longer one.
        before = ids if stop > LIMIT else ids[:stop]
        logits = model(input_ids=torch.tensor([before]), use_cache=False).logits
        logprobs.append(logits[0, stop - 1].float().log_softmax(-1)[ids[stop]].item())
    return logprobs


def distance(model, outputs) -> float:
    return max(
        abs(own - plain)
        for output in outputs
        for own, plain in zip(output.logprobs, sampled_logprobs(model, output), strict=True)
    )


def rollout(model, inputs, params=SAMPLED, num=1, **config):
    with RolloutGenerator(model, RolloutConfig(seed=0, **config)) as generator:
        found = generator.generate_batch(inputs, sampling_params=params, num_return_sequences=num)
        return list(found.values())


@pytest.mark.fast_cases("gemma3_text-copied")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_sampled_as_alone_on_either_side_and_where_it_crosses(family, config):
    model = longrope_model(family)
    outputs = rollout(model, prompts(2, 3, 10, LIMIT, LIMIT + 1, 24), num=2, **config)
    assert [len(output.logprobs) for output in outputs] == [12] * 12
    assert distance(model, outputs) <= TOLERANCE[torch.float32]


def test_a_row_is_sampled_as_alone_in_bfloat16():
    model = longrope_model().to(torch.bfloat16)
    outputs = rollout(model, prompts(2, 3, 10, LIMIT, LIMIT + 1, 24), num=2)
    assert distance(model, outputs) <= TOLERANCE[torch.bfloat16]


def test_a_traced_step_takes_the_factors_of_its_rows():
    model = longrope_model()
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        generator.manager.engine.warm_up()
        assert "from a trace" in generator.manager.decode_path
        for lengths in ((24, 20), (2, 3), (24, 2), (10, 11)):
            outputs = generator.generate_batch(prompts(*lengths), sampling_params=SAMPLED)
            assert distance(model, outputs.values()) <= TOLERANCE[torch.float32]


def test_a_prefix_of_one_side_is_not_matched_on_the_other():
    model, (prompt,) = longrope_model(), prompts(24)
    with RolloutGenerator(model, RolloutConfig(seed=0, block_size=4)) as generator:
        for stop in (12, 12, 24, 20):
            params = SamplingParams(max_new_tokens=2, ignore_eos=True)
            outputs = generator.generate_batch([prompt[:stop]], sampling_params=params)
            assert distance(model, outputs.values()) <= TOLERANCE[torch.float32]
        assert generator.manager.counters.prefill_tokens_saved == 8 + 16


def test_a_sequence_that_crosses_is_computed_anew_and_is_not_counted_as_preempted():
    model = longrope_model()
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        generator.generate_batch(prompts(10), sampling_params=SAMPLED)
        counters = generator.manager.counters
        assert (counters.preemptions, counters.prefill_tokens) == (0, 10 + LIMIT + 1)


def output_of(prompt: list[int], completion: list[int]) -> GenerationOutput:
    return GenerationOutput(request_id="", prompt_ids=prompt, generated_tokens=completion)


@torch.no_grad()
def plain_logprobs(model, output) -> torch.Tensor:
    ids, first = [*output.prompt_ids, *output.generated_tokens], len(output.prompt_ids)
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, first - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(ids[first:])[:, None])[:, 0]


@pytest.mark.parametrize("layout", [PackingLayout.SHARED_PREFIXES, PackingLayout.PADDED])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_takes_the_factors_of_each_whole_row(family, layout):
    model = longrope_model(family)
    compared_model = (forward_identity(model), weakref.ref(model))
    _LAYOUTS[model] = AgreedLayouts(compared_model, {False: layout})
    short, long = prompts(10, 20)
    outputs = [
        output_of(prompt, completion)
        for prompt in (short, long)
        for completion in prompts(2, LIMIT - 10, LIMIT - 9, 12, 1)
    ]
    for found, output in zip(packed_logprobs(model, outputs), outputs, strict=True):
        torch.testing.assert_close(found, plain_logprobs(model, output), atol=2e-5, rtol=0)


def test_the_loss_shares_a_prompt_among_completions_of_one_side():
    model, (prompt,) = longrope_model(), prompts(10)
    outputs = [output_of(prompt, completion) for completion in prompts(2, 12, 3, 13)]
    for found, output in zip(packed_logprobs(model, outputs), outputs, strict=True):
        torch.testing.assert_close(found, plain_logprobs(model, output), atol=2e-5, rtol=0)


def test_dynamic_frequencies_of_an_earlier_longer_row_are_forgotten():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny_model("llama", max_position_embeddings=LIMIT, rope_parameters=rope)
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        generator.generate_batch(prompts(LIMIT - 1), sampling_params=params)
        with torch.no_grad():
            model(input_ids=torch.tensor(prompts(40)))
        assert generator.verify(1).max <= TOLERANCE[torch.float32]


def test_a_row_that_would_change_its_dynamic_frequencies_is_refused():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny_model("llama", max_position_embeddings=LIMIT, rope_parameters=rope)
    with pytest.raises(InvalidRequestError, match=r"at most 16 .* lower max_new_tokens"):
        rollout(model, prompts(10), SamplingParams(max_new_tokens=7))


@pytest.mark.slow
@pytest.mark.parametrize("use_async_batching", [False, True])
def test_a_graph_takes_the_factors_of_its_rows(use_async_batching, monkeypatch):
    pytest.importorskip("triton")
    pretend_cuda(monkeypatch)
    model = longrope_model(num_hidden_layers=1)
    settings = {"block_size": 8, "max_requests_per_batch": 4}
    settings |= {"use_cuda_graph": True, "use_async_batching": use_async_batching}
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with RolloutGenerator(model, RolloutConfig(seed=0, **settings)) as generator:
        for lengths in ((2, LIMIT - 2), (24, 2), (2, 3)):
            outputs = generator.generate_batch(prompts(*lengths), sampling_params=params)
            assert distance(model, outputs.values()) <= TOLERANCE[torch.float32]
    assert Playback.num_captures
