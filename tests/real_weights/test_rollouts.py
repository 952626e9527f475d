"""Rollouts of a real model are as exact as its own forward: SmolLM2-135M-Instruct.

Rounding depends on the weights, and random ones hide it: they are near uniform, and no token stands
out. The yardstick is therefore the model's own rounding, on the same tokens.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cb_rollout import RolloutGenerator, SamplingParams, bitwise
from measure.agreement import (
    chats,
    distance,
    padded_logprobs,
    plain_logprobs,
    rollout,
    sampled_logprobs,
)

pytestmark = pytest.mark.slow

# Measured with scripts/measure/agreement.py: a rollout's mean is 0.2 (float32) to 0.95 times what
# it is held to, its largest difference, of one token among 900, 0.7 to 1.2 times. In autocast,
# RoPE frequencies 1% too high give 1.3 times the mean, one head missing in one layer 2.7 times.
MEAN_FACTOR, MAX_FACTOR = 1.25, 2.0


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def model(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2).eval()


def assert_no_larger(found, allowed):
    figures = f"{found} nats, beside {allowed}"
    assert found["mean"] <= MEAN_FACTOR * allowed["mean"], figures
    assert found["max"] <= MAX_FACTOR * allowed["max"], figures


def test_the_tokenizer_gives_text_back_and_has_the_models_chat_template(tokenizer):
    text = "Paris.\n\n  def f(x):\treturn x+1  # 12345 \u00fcmlaut \u6771\u4eac, 7 apples"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    digits = [token.strip("\u0120") for token in tokenizer.tokenize("in 1234, or  56")]
    assert [token for token in digits if token.isdigit()] == list("123456")
    question = [{"role": "user", "content": "Hi?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


@torch.no_grad()
def test_greedy_chats_are_those_of_generate(model, tokenizer):
    prompts = chats(tokenizer, 8)
    params = SamplingParams(temperature=0.0, max_new_tokens=32)
    with RolloutGenerator(model) as generator:
        outputs = generator.generate_batch(prompts, sampling_params=params).values()
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        theirs = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=32)
        assert output.generated_tokens == theirs[0, len(prompt) :].tolist()
    answer = tokenizer.decode(next(iter(outputs)).generated_tokens)
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_a_rollout_is_no_further_from_float64_than_the_plain_forward(model, tokenizer):
    outputs = rollout(model, chats(tokenizer, 8), 64)
    exact = plain_logprobs(copy.deepcopy(model).double(), outputs)
    plain = plain_logprobs(model, outputs)
    assert_no_larger(distance(sampled_logprobs(outputs), exact), distance(plain, exact))


def test_bitwise_rollouts_are_the_plain_and_the_padded_forward_in_every_bit(model, tokenizer):
    outputs = rollout(model, chats(tokenizer, 8), 48, numerics="bitwise")
    ours = sampled_logprobs(outputs)
    with bitwise(model):
        assert distance(ours, plain_logprobs(model, outputs))["max"] == 0.0
        assert distance(ours, padded_logprobs(model, outputs))["max"] == 0.0


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(torch.bfloat16, id="weights"),
        # Minutes on a CPU without products in bfloat16.
        pytest.param(torch.float32, id="autocast", marks=pytest.mark.nightly),
    ],
)
def test_a_bfloat16_rollout_is_as_near_the_plain_forward_as_padding_is(smollm2, tokenizer, weights):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=weights).eval()
    is_autocast = weights == torch.float32
    outputs = rollout(model, chats(tokenizer), 64, is_autocast)
    plain = plain_logprobs(model, outputs, is_autocast)
    padded = padded_logprobs(model, outputs, is_autocast)
    assert_no_larger(distance(sampled_logprobs(outputs), plain), distance(padded, plain))
