"""`score` and `prompt_logprobs` are those of a plain forward of the model that the user holds."""

import copy
from dataclasses import replace

import pytest
import torch
from adapters import adapted
from peft import LoraConfig, get_peft_model
from tiny import BOS, char_tokenizer, tiny_model
from tiny_vision import picture, tiny_vision_model

from cb_rollout import (
    InvalidRequestError,
    RolloutConfig,
    RolloutError,
    RolloutGenerator,
    SamplingParams,
)

CONFIG = RolloutConfig(seed=0, block_size=4, num_blocks=64, max_batch_tokens=64)
COMMON = [BOS, *range(20, 40)]
TEXTS = [
    [*COMMON, 50, 51, 52],
    [*COMMON, 50, 60],
    COMMON,
    [*COMMON, 50, 51, 52],
    [9],
    list(range(100, 190)),
]


@torch.no_grad()
def plain_logits_of(model, token_ids):
    input_ids = torch.tensor([token_ids])
    mask = torch.ones_like(input_ids)
    return model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[0, :-1].float()


def require_scores_of(model, scored, top_k=0, temperature=1.0, tolerance=2e-5):
    """Fail unless each record holds what the model says about its tokens."""
    for text in scored:
        assert text.logprobs[0] is None
        logprobs_TV = (plain_logits_of(model, text.token_ids) / temperature).log_softmax(-1)
        expected_T = logprobs_TV.gather(-1, torch.tensor(text.token_ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(text.logprobs[1:]), expected_T, atol=tolerance, rtol=tolerance
        )
        if not top_k:
            assert text.top_logprobs is None
            continue
        assert text.top_logprobs[0] is None
        values_TK, _ = logprobs_TV.topk(top_k, -1)
        for place, values_K, logprobs_V in zip(
            text.top_logprobs[1:], values_TK, logprobs_TV, strict=True
        ):
            found_K = torch.tensor([logprob for _, logprob in place])
            torch.testing.assert_close(found_K, values_K, atol=tolerance, rtol=tolerance)
            own_K = logprobs_V[[token for token, _ in place]]
            torch.testing.assert_close(own_K, found_K, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "family",
    ["qwen3", "mistral", "gpt2", "bloom", "lfm2", "qwen3_5_text", "qwen3_moe", "gpt_oss"],
)
def test_scores_are_those_of_a_plain_forward(family):
    model = tiny_model(family)
    with RolloutGenerator(model, CONFIG) as generator:
        scored = generator.score(TEXTS, top_k=3)
    assert [text.token_ids for text in scored] == TEXTS
    assert {text.policy_version for text in scored} == {0}
    require_scores_of(model, scored, top_k=3)


def test_a_temperature_divides_the_logits():
    model = tiny_model()
    with RolloutGenerator(model, CONFIG) as generator:
        require_scores_of(model, generator.score(TEXTS, temperature=0.6), temperature=0.6)


def test_scores_of_sampled_tokens_are_those_that_the_rollout_reported():
    with RolloutGenerator(tiny_model(), CONFIG) as generator:
        outputs = generator.generate_batch(
            [COMMON],
            sampling_params=SamplingParams(temperature=1.0, max_new_tokens=8),
            num_return_sequences=3,
        )
        texts = [output.prompt_ids + output.generated_tokens for output in outputs.values()]
        for text, output in zip(generator.score(texts), outputs.values(), strict=True):
            assert text.logprobs[len(COMMON) :] == pytest.approx(output.logprobs, abs=2e-5)


def test_what_texts_begin_with_is_computed_once():
    model = tiny_model()
    num_embedded = []
    with RolloutGenerator(model, CONFIG) as generator:
        # The first call compares. The last token of a text predicts nothing.
        generator.score(TEXTS[:3])
        handle = model.get_input_embeddings().register_forward_hook(
            lambda _module, arguments, _output: num_embedded.append(arguments[0].numel())
        )
        generator.score(TEXTS[:3])
        handle.remove()
    assert sum(num_embedded) == len(COMMON) + 2


def test_a_batch_holds_at_most_the_tokens_of_a_prefill():
    model = tiny_model()
    widths = []
    texts = [list(range(start, start + 40)) for start in range(20, 60, 10)]
    with RolloutGenerator(model, CONFIG) as generator:
        generator.score(texts)
        handle = model.get_input_embeddings().register_forward_hook(
            lambda _module, arguments, _output: widths.append(arguments[0].numel())
        )
        require_scores_of(model, generator.score(texts))
        handle.remove()
    assert widths[0] <= CONFIG.max_batch_tokens


def test_a_teacher_that_only_scores_allocates_no_cache():
    with RolloutGenerator(tiny_model(), CONFIG) as teacher:
        teacher.score(TEXTS)
        assert teacher.manager.status().kv_bytes == 0


def test_a_model_in_training_is_scored_in_evaluation_and_left_as_it_was():
    model = tiny_model("gpt2", resid_pdrop=0.5)
    expected = copy.deepcopy(model)
    model.train()
    with RolloutGenerator(model, CONFIG) as generator:
        require_scores_of(expected, generator.score(TEXTS))
    assert model.training
    assert not any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("method", ["LORA", "IA3", "LORA (trained tokens)", "ADAPTION_PROMPT"])
def test_an_adapter_is_scored_as_its_own_forward(method, tmp_path):
    model = adapted(method, tmp_path)
    with RolloutGenerator(model, CONFIG) as generator:
        require_scores_of(model, generator.score(TEXTS, top_k=2), top_k=2)


def test_a_copy_scores_with_the_weights_of_its_last_sync():
    model = tiny_model()
    before = copy.deepcopy(model)
    with RolloutGenerator(model, replace(CONFIG, weight_sync="copy")) as generator:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        require_scores_of(before, generator.score(TEXTS))
        generator.sync_weights()
        scored = generator.score(TEXTS)
    require_scores_of(model, scored)
    assert {text.policy_version for text in scored} == {1}


def test_shared_weights_are_scored_as_they_are_now():
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"], r=4))
    with RolloutGenerator(model, CONFIG) as generator:
        generator.score(TEXTS)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.3)
        generator.sync_weights()
        require_scores_of(model, generator.score(TEXTS))


@pytest.mark.parametrize("numerics", ["fast", "bitwise"])
def test_bfloat16_is_scored_to_its_own_rounding(numerics):
    model = tiny_model("llama").bfloat16()
    with RolloutGenerator(model, replace(CONFIG, numerics=numerics)) as generator:
        require_scores_of(model, generator.score(TEXTS), tolerance=0.2)


def test_texts_and_chats_are_encoded():
    tokenizer = char_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    with RolloutGenerator(model, CONFIG, tokenizer=tokenizer) as generator:
        text, conversation = generator.score(["hello", chat])
    assert tokenizer.decode(text.token_ids) == "hello"
    assert tokenizer.decode(conversation.token_ids) == "user: hi\nassistant: yes\n"
    require_scores_of(model, [text, conversation])


def test_texts_with_images_are_scored_as_the_model_scores_them():
    model, processor = tiny_vision_model("qwen2_5_vl")
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "image": picture(1)}, {"type": "text", "text": "w60"}],
        }
    ]
    with RolloutGenerator(model, CONFIG, tokenizer=processor) as generator:
        with_image, plain = generator.score([chat, "w60 w61"])
        tensors = processor.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_tensors="pt"
        )
    tensors = {name: tensors[name] for name in tensors}
    assert tensors["input_ids"][0].tolist() == with_image.token_ids
    with torch.no_grad():
        logits_TV = model(**tensors, use_cache=False).logits[0, :-1]
    expected_T = logits_TV.log_softmax(-1).gather(-1, tensors["input_ids"][0, 1:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor(with_image.logprobs[1:]), expected_T, atol=2e-5, rtol=2e-5
    )
    require_scores_of(model, [plain])


def test_prompts_of_a_rollout_are_scored_at_the_temperature_of_their_input():
    model = tiny_model()
    params = [SamplingParams(temperature=0.7, max_new_tokens=3), SamplingParams(max_new_tokens=2)]
    with RolloutGenerator(model, CONFIG) as generator:
        outputs = generator.generate_batch(
            [COMMON, TEXTS[1]],
            sampling_params=params,
            num_return_sequences=2,
            prompt_logprobs=2,
        )
        bare = generator.generate_batch([COMMON], max_new_tokens=2)
        own_only = generator.generate_batch([COMMON], max_new_tokens=2, prompt_logprobs=0)
    for output, temperature in zip(outputs.values(), [0.7, 0.7, 1.0, 1.0], strict=True):
        scored = _AsText(output)
        require_scores_of(model, [scored], top_k=2, temperature=temperature)
    assert [output.prompt_logprobs for output in bare.values()] == [None]
    (output,) = own_only.values()
    assert len(output.prompt_logprobs) == len(COMMON)
    assert output.prompt_top_logprobs is None


class _AsText:
    """The prompt of an output, as `score` reports a text."""

    def __init__(self, output):
        self.token_ids = output.prompt_ids
        self.logprobs = output.prompt_logprobs
        self.top_logprobs = output.prompt_top_logprobs


def test_a_refused_prompt_has_no_scores_and_the_others_have_theirs():
    model = tiny_model()
    with RolloutGenerator(model, CONFIG) as generator:
        outputs = generator.generate_batch(
            [[], COMMON], max_new_tokens=2, prompt_logprobs=0, on_error="return"
        )
    refused, served = outputs.values()
    assert refused.prompt_logprobs is None
    require_scores_of(model, [_AsText(served)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"inputs": [[]]}, "input 0 is empty"),
        ({"inputs": [[1], [256]]}, "input 1 holds token id 256"),
        ({"inputs": [[7] * 513]}, "input 0 has 513 tokens, but the model takes at most 512"),
        ({"inputs": ["text"]}, "input 0 is text; pass token ids"),
        ({"inputs": "text"}, "inputs is a str"),
        ({"inputs": [[5, 6]], "top_k": -1}, "top_k=-1 is not a whole number from 0"),
        ({"inputs": [[5, 6]], "top_k": 257}, "top_k=257 is not a whole number from 0"),
        ({"inputs": [[5, 6]], "top_k": True}, "top_k=True is not a whole number from 0"),
        ({"inputs": [[5, 6]], "temperature": 0}, "temperature=0 is not a finite number above 0"),
        ({"inputs": [[5, 6]], "temperature": float("nan")}, "temperature=nan is not a finite"),
    ],
)
def test_what_cannot_be_scored_is_refused(arguments, said):
    with (
        RolloutGenerator(tiny_model(), CONFIG) as generator,
        pytest.raises(InvalidRequestError, match=said),
    ):
        generator.score(**arguments)


def test_nothing_is_scored_of_no_texts():
    with RolloutGenerator(tiny_model(), CONFIG) as generator:
        assert generator.score([]) == []


def test_released_weights_score_nothing():
    model = tiny_model()
    with RolloutGenerator(model, replace(CONFIG, weight_sync="copy")) as generator:
        generator.sleep(level=2)
        with pytest.raises(RolloutError, match="call sync_weights"):
            generator.score(TEXTS)
        generator.sync_weights()
        require_scores_of(model, generator.score(TEXTS))


def test_texts_are_scored_between_the_steps_of_sequences_in_flight():
    model = tiny_model()
    with RolloutGenerator(model, CONFIG) as generator:
        alone = generator.generate_batch([COMMON], max_new_tokens=24)
        generator.manager.start()
        request_id = generator.manager.add_request(COMMON, max_new_tokens=24)
        for _ in range(5):
            require_scores_of(model, generator.score(TEXTS[:2]))
        output = generator.manager.get_result(request_id, timeout=60)
    assert len(output.generated_tokens) == len(next(iter(alone.values())).generated_tokens)
    assert output.logprobs == pytest.approx(
        _scored_completion(model, output.prompt_ids, output.generated_tokens), abs=2e-5
    )


def _scored_completion(model, prompt_ids, generated_tokens):
    token_ids = [*prompt_ids, *generated_tokens]
    logprobs_TV = plain_logits_of(model, token_ids).log_softmax(-1)
    own_T = logprobs_TV.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return own_T[len(prompt_ids) - 1 :].tolist()
