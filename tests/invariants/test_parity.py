"""Rollout log-probabilities equal a plain forward of the training module."""

import random

import pytest
import torch
from tiny import FAMILIES, largest_difference, tiny_model

from cb_rollout import GenerationOutput, RolloutConfig, RolloutGenerator, SamplingParams

TOLERANCE = 1e-5
PROMPT_LENGTHS = (1, 5, 40, 70)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(3, 256) for _ in range(length)] for length in lengths]


@pytest.mark.fast_cases("llama", "mistral", "bloom")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_a_plain_forward(family):
    model = tiny_model(family)
    params = SamplingParams(temperature=0.8, max_new_tokens=24, ignore_eos=True)
    with RolloutGenerator(model, RolloutConfig(block_size=16, seed=0)) as generator:
        outputs = generator.generate_batch(
            prompts(*PROMPT_LENGTHS), sampling_params=params, num_return_sequences=3
        ).values()
    assert [len(output.generated_tokens) for output in outputs] == [24] * 12
    assert largest_difference(model, outputs, temperature=0.8) <= TOLERANCE


@pytest.mark.fast_cases("mistral", "bloom", "qwen3_5_text")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family):
    model = tiny_model(family)
    inputs = prompts(7, 33)
    with RolloutGenerator(model) as generator:
        outputs = generator.generate_batch(
            inputs, sampling_params=SamplingParams(temperature=0, max_new_tokens=16)
        ).values()
    for prompt, output in zip(inputs, outputs, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=16,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        assert output.generated_tokens == expected


def test_chunked_prefill_small_blocks_and_preemption_change_nothing():
    model = tiny_model()
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    inputs = prompts(30, 50, 20, 61)
    roomy = RolloutConfig(seed=3)
    tight = RolloutConfig(seed=3, block_size=4, num_blocks=60, max_batch_tokens=16)
    results: list[list[GenerationOutput]] = []
    for config in (roomy, tight):
        with RolloutGenerator(model, config) as generator:
            outputs = generator.generate_batch(
                inputs, sampling_params=params, num_return_sequences=2
            )
            results.append(list(outputs.values()))
            if config is tight:
                assert generator.metrics()["rollout/preemptions"] > 0
                assert generator.metrics()["rollout/kv_blocks_used"] == 0
    assert [o.generated_tokens for o in results[0]] == [o.generated_tokens for o in results[1]]
    assert largest_difference(model, results[1]) <= TOLERANCE


def test_a_prompt_of_many_completions_is_prefilled_once():
    model = tiny_model()
    (prompt,) = prompts(70)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    for arguments in (
        {"inputs": [prompt], "num_return_sequences": 8},
        {"inputs": [prompt] * 8},
    ):
        with RolloutGenerator(model) as generator:
            outputs = generator.generate_batch(**arguments, sampling_params=params)
            assert generator.metrics()["rollout/prefill_tokens"] == 70
            assert generator.metrics()["rollout/prefill_tokens_saved"] == 7 * 70
        assert len({tuple(o.generated_tokens) for o in outputs.values()}) == 8
        assert largest_difference(model, outputs.values()) <= TOLERANCE


def test_a_second_turn_prefills_only_new_tokens_until_the_weights_change():
    model = tiny_model()
    (prompt,) = prompts(64)
    params = SamplingParams(max_new_tokens=33, ignore_eos=True)
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        (first,) = generator.generate_batch([prompt], sampling_params=params).values()
        second_turn = prompt + first.generated_tokens + prompts(10, seed=1)[0]
        (second,) = generator.generate_batch([second_turn], sampling_params=params).values()
        # 64 + 33 tokens fill six blocks of 16; the last sampled token was never computed.
        assert generator.metrics()["rollout/prefill_tokens"] == len(second_turn) - 96
        generator.sync_weights()
        generator.generate_batch([second_turn], sampling_params=params)
        assert generator.metrics()["rollout/prefill_tokens"] == len(second_turn)
    assert largest_difference(model, [second]) <= TOLERANCE


def test_processed_logprobs_are_those_of_the_truncated_distribution():
    model = tiny_model()
    (prompt,) = prompts(20)
    params = SamplingParams(top_k=5, max_new_tokens=12, ignore_eos=True)
    config = RolloutConfig(logprobs_mode="processed", seed=0)
    with RolloutGenerator(model, config) as generator:
        (output,) = generator.generate_batch([prompt], sampling_params=params).values()
    ids = torch.tensor([prompt + output.generated_tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(5)
    for place, token in enumerate(output.generated_tokens):
        assert token in best.indices[place]
        renormalized = logits[place, token] - best.values[place].logsumexp(-1)
        assert output.logprobs[place] == pytest.approx(renormalized.item(), abs=TOLERANCE)
