"""Sampling settings mean what they mean in transformers' `generate`; a fault stays with its own."""

import random
from functools import cache

import numpy as np
import pytest
import torch
from tiny import EOS, char_tokenizer, plain_logprobs, tiny_model
from transformers import GenerationConfig
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from cb_rollout import (
    ConfigurationError,
    ContinuousBatchingManager,
    IncompleteRolloutError,
    InvalidRequestError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
)

TOLERANCE = 1e-5
SETTINGS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encouraged_repetition": {"repetition_penalty": 0.8},
    "min_new_tokens": {"min_new_tokens": 20},
    "min_length": {"min_length": 22},
    "bad_words": {"bad_words_ids": [[t] for t in range(10, 90, 3)] + [[t] * 3 for t in range(256)]},
    "sequence_bias": {"sequence_bias": [[[t], -9.0] for t in range(3, 250, 4)]},
    "suppress": {"suppress_tokens": list(range(3, 200, 2)), "begin_suppress_tokens": [4, 6, 8]},
    "forced_eos": {"forced_eos_token_id": EOS},
    "rarer": {
        "no_repeat_ngram_size": 2,
        "sequence_bias": [[[t, t - 1], 9.0] for t in range(4, 250)],
        "forced_bos_token_id": 9,
    },
    "together": {
        "repetition_penalty": 1.2,
        "min_new_tokens": 5,
        "bad_words_ids": [[t, t] for t in range(3, 256)],
        "sequence_bias": [[[t], 2.0] for t in range(3, 250, 5)],
    },
}


def prompts(*lengths, seed=0, vocab_size=256):
    draws = random.Random(seed)
    return [[draws.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


FOUR_PROMPTS = prompts(1, 4, 17, 33)


def generated(model, prompt, **settings):
    """What transformers' own `generate` makes, greedily."""
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
    return output[0, len(prompt) :].tolist()


@cache
def generated_freely(family):
    """What `generate` makes of `FOUR_PROMPTS` under no setting."""
    model, config = tiny_model(family), GenerationConfig(max_new_tokens=24, eos_token_id=EOS)
    return [generated(model, prompt, generation_config=config) for prompt in FOUR_PROMPTS]


@pytest.mark.fast_cases(
    "qwen3-bad_words",
    "qwen3-sequence_bias",
    "qwen3-forced_eos",
    "gpt2-encouraged_repetition",
    "gpt2-min_length",
    "gpt2-bad_words",
    "gpt2-rarer",
    "lfm2-min_length",
    "lfm2-bad_words",
    "lfm2-together",
)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "lfm2"])
def test_greedy_tokens_under_a_setting_are_those_of_generate(family, setting):
    model = tiny_model(family)
    config = GenerationConfig(max_new_tokens=24, eos_token_id=EOS, **SETTINGS[setting])
    with RolloutGenerator(model, generation_config=config) as generator:
        outputs = list(generator.generate_batch(FOUR_PROMPTS).values())
    for prompt, output in zip(FOUR_PROMPTS, outputs, strict=True):
        assert output.generated_tokens == generated(model, prompt, generation_config=config)
        policy = plain_logprobs(model, prompt, output.generated_tokens)
        assert output.logprobs == pytest.approx(policy, abs=TOLERANCE)
    if setting not in ("min_new_tokens", "min_length"):
        assert any(
            output.generated_tokens != free
            for output, free in zip(outputs, generated_freely(family), strict=True)
        ), "the setting changed nothing"


@pytest.mark.fast_cases("setting0")
@pytest.mark.parametrize("setting", [{}, {"min_new_tokens": 9}, {"min_length": 20}])
def test_a_least_length_holds_the_end_of_sequence_back_as_in_generate(setting):
    model, inputs = tiny_model(), prompts(3, 8, 12)
    free = [generated(model, prompt, max_new_tokens=24) for prompt in inputs]
    # Whatever comes third is made the end of the sequence.
    eos = sorted({tokens[2] for tokens in free})
    config = GenerationConfig(max_new_tokens=24, eos_token_id=eos, **setting)
    with RolloutGenerator(model, generation_config=config) as generator:
        outputs = list(generator.generate_batch(inputs).values())
    for prompt, output in zip(inputs, outputs, strict=True):
        assert output.generated_tokens == generated(model, prompt, generation_config=config)
    lengths = [len(output.generated_tokens) for output in outputs]
    assert max(lengths) <= 3 if not setting else min(lengths) > 3


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize("length", [1, 2, 4])
def test_stop_strings_end_where_they_end_generate(length):
    tokenizer = char_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    texts = ["1+2=", "hello", "x", "the end"]
    inputs = [tokenizer(text)["input_ids"] for text in texts]
    endless = {"max_new_tokens": 30, "suppress_tokens": [0, EOS, 2]}
    free = [tokenizer.decode(generated(model, prompt, **endless)) for prompt in inputs]
    stops = [text[10 : 10 + length] for text in free]
    config = GenerationConfig(stop_strings=stops, eos_token_id=EOS, **endless)
    with RolloutGenerator(model, tokenizer=tokenizer, generation_config=config) as generator:
        outputs = list(generator.generate_batch(texts).values())
    for prompt, output in zip(inputs, outputs, strict=True):
        expected = generated(model, prompt, generation_config=config, tokenizer=tokenizer)
        assert output.generated_tokens == expected
        assert output.finish_reason == "stop"
        assert len(output.generated_tokens) <= 10 + length
        assert any(stop in tokenizer.decode(output.generated_tokens) for stop in stops)


def test_a_stop_string_before_the_least_length_is_passed_over():
    tokenizer = char_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    (prompt,) = prompts(6, vocab_size=99)
    two_in_turn = dict.fromkeys(tokenizer("ab")["input_ids"], 90.0)
    params = SamplingParams(
        logit_bias=two_in_turn, stop="abb", min_new_tokens=20, max_new_tokens=200, seed=1
    )
    with RolloutGenerator(model, tokenizer=tokenizer) as generator:
        (output,) = generator.generate_batch([prompt], sampling_params=params).values()
    text = tokenizer.decode(output.generated_tokens)
    assert "abb" in text[:19], "nothing was passed over"
    assert text.endswith("abb")
    assert text.find("abb", 20 - len("abb")) == len(text) - len("abb")


def test_stop_strings_without_a_tokenizer_are_refused_in_the_caller():
    params = SamplingParams(stop="END")
    with RolloutGenerator(tiny_model()) as generator:
        with pytest.raises(InvalidRequestError, match=r"stop=\('END',\).*tokenizer="):
            generator.generate_batch([[5]], sampling_params=params)
        with pytest.raises(InvalidRequestError, match=r"stop=\('END',\).*tokenizer="):
            generator.manager.add_request([5], sampling_params=params)


def test_a_manager_with_a_tokenizer_takes_stop_strings():
    tokenizer = char_tokenizer()
    manager = ContinuousBatchingManager(tiny_model(vocab_size=99), tokenizer=tokenizer)
    manager.start()
    every_character = tuple(map(chr, range(32, 127)))
    params = SamplingParams(stop=every_character, max_new_tokens=30)
    manager.add_request([5, 6], sampling_params=params)
    output = manager.get_result()
    manager.stop()
    assert len(output.generated_tokens) < 30 or output.finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"eos_token_id": 5000}, "eos_token_id holds token id 5000"),
        ({"eos_token_id": (1, 256)}, "eos_token_id holds token id 256"),
        ({"stop_token_ids": (256,)}, "stop_token_ids holds token id 256"),
        ({"stop_token_ids": (-3,)}, "stop_token_ids holds token id -3"),
        ({"bad_words": ((5, 300),)}, "bad_words holds token id 300"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias holds token id 1000"),
        ({"begin_suppress_tokens": (256,)}, "begin_suppress_tokens holds token id 256"),
        ({"forced_eos_token_id": 999}, "forced_eos_token_id holds token id 999"),
        ({"sequence_bias": {(3, 300): 1.0}}, "sequence_bias holds token id 300"),
        ({"forced_bos_token_id": 256}, "forced_bos_token_id holds token id 256"),
        ({"top_logprobs": 257}, "top_logprobs=257"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9"),
        ({"min_length": 20, "max_new_tokens": 8}, "min_length=20"),
    ],
)
def test_what_this_model_cannot_do_is_refused_in_the_caller(params, said):
    with (
        RolloutGenerator(tiny_model()) as generator,
        pytest.raises(InvalidRequestError, match=said),
    ):
        generator.generate_batch([[5, 6]], sampling_params=SamplingParams(**params))


@pytest.mark.parametrize("given", [{"temperature": 1.0}, "greedy"])
def test_settings_of_another_kind_are_refused_in_the_caller(given):
    with RolloutGenerator(tiny_model()) as generator:
        with pytest.raises(ConfigurationError, match="sampling_params is a"):
            generator.generate_batch([[5, 6]], sampling_params=[given])
        with pytest.raises(ConfigurationError, match="generation_config is a"):
            generator.generate_batch([[5, 6]], given)
        with pytest.raises(ConfigurationError, match="pass it as sampling_params"):
            generator.generate_batch([[5, 6]], SamplingParams())


PENALIZED = SamplingParams(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    bad_words=tuple((t, t + 1) for t in range(3, 200)),
    logit_bias={40: 2.0},
    min_new_tokens=6,
    top_logprobs=3,
    max_new_tokens=40,
    seed=11,
    logits_processors=(NoRepeatNGramLogitsProcessor(2),),
)


def test_preemption_and_small_chunks_change_no_token_under_penalties():
    model, inputs = tiny_model(), prompts(30, 50, 20, 61)
    tight = RolloutConfig(block_size=4, num_blocks=60, max_batch_tokens=16)
    results = []
    for config in (RolloutConfig(), tight):
        with RolloutGenerator(model, config) as generator:
            outputs = generator.generate_batch(
                inputs, sampling_params=PENALIZED, num_return_sequences=2
            )
            results.append(list(outputs.values()))
            if config is tight:
                assert generator.metrics()["rollout/preemptions"] > 0
    for roomy, small in zip(*results, strict=True):
        assert roomy.generated_tokens == small.generated_tokens
        assert small.logprobs == pytest.approx(roomy.logprobs, abs=TOLERANCE)
        assert len(small.top_logprobs) == len(small.generated_tokens)


def test_a_request_with_a_seed_gives_the_same_tokens_in_any_company():
    model = tiny_model()
    mine, *others = prompts(12, 5, 30, 9)
    company = [
        SamplingParams(max_new_tokens=30, seed=1),
        SamplingParams(max_new_tokens=5, top_k=3, repetition_penalty=1.1),
        SamplingParams(max_new_tokens=17, temperature=0, min_new_tokens=3),
    ]
    with RolloutGenerator(model) as generator:
        (alone,) = generator.generate_batch([mine], sampling_params=PENALIZED).values()
        together = generator.generate_batch(
            [*others, mine], sampling_params=[*company, PENALIZED]
        ).values()
    output = list(together)[-1]
    assert output.generated_tokens == alone.generated_tokens
    assert output.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)


def test_requests_that_ask_for_nothing_are_untouched_by_those_that_do():
    model, inputs = tiny_model(), prompts(12, 5, 30)
    plain = SamplingParams(max_new_tokens=20, seed=4)
    with RolloutGenerator(model) as generator:
        alone = list(generator.generate_batch(inputs, sampling_params=plain).values())
        mixed = list(
            generator.generate_batch(
                [*inputs, *inputs], sampling_params=[plain] * 3 + [PENALIZED] * 3
            ).values()
        )
    assert [o.generated_tokens for o in mixed[:3]] == [o.generated_tokens for o in alone]
    assert all(output.top_logprobs is None for output in alone)


@pytest.mark.parametrize("mode", ["policy", "processed"])
def test_top_logprobs_are_the_most_likely_tokens_of_the_same_distribution(mode):
    model, (prompt,) = tiny_model(), prompts(20)
    params = SamplingParams(top_k=4, temperature=0.7, top_logprobs=6, max_new_tokens=10, seed=0)
    with RolloutGenerator(model, RolloutConfig(logprobs_mode=mode)) as generator:
        (output,) = generator.generate_batch([prompt], sampling_params=params).values()
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + output.generated_tokens])).logits[0]
    for place, token in enumerate(output.generated_tokens):
        scaled_V = logits_TV[len(prompt) - 1 + place] / 0.7
        best = scaled_V.topk(6)
        if mode == "processed":
            best = scaled_V.topk(4)
            scaled_V = scaled_V.masked_fill(scaled_V < best.values[-1], -torch.inf)
        alternatives = dict(output.top_logprobs[place])
        assert list(alternatives) == best.indices.tolist()
        expected = scaled_V.log_softmax(-1)[best.indices].tolist()
        assert list(alternatives.values()) == pytest.approx(expected, abs=TOLERANCE)
        if token in alternatives:
            assert alternatives[token] == output.logprobs[place]


def test_a_custom_processor_sees_its_own_row_as_in_generate():
    model, inputs = tiny_model(), prompts(4, 11, 23)
    processors = (NoRepeatNGramLogitsProcessor(1),)
    params = SamplingParams(temperature=0, max_new_tokens=24, logits_processors=processors)
    with RolloutGenerator(model) as generator:
        outputs = generator.generate_batch(inputs, sampling_params=params).values()
    for prompt, output in zip(inputs, outputs, strict=True):
        expected = generated(model, prompt, max_new_tokens=24, no_repeat_ngram_size=1)
        assert output.generated_tokens == expected
        assert output.generated_tokens != generated(model, prompt, max_new_tokens=24)


class FaultyAfter:
    def __init__(self, num_tokens):
        self.num_tokens = num_tokens

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.num_tokens:
            raise ZeroDivisionError("the processor broke")
        return scores


def test_a_sequence_that_no_token_may_follow_names_the_fields_that_its_request_sets():
    params = SamplingParams(
        max_new_tokens=40, ignore_eos=True, no_repeat_ngram_size=1, min_length=9
    )
    with RolloutGenerator(tiny_model(vocab_size=16)) as generator:
        (output,) = generator.generate_batch(
            [[3]], sampling_params=params, on_error="return"
        ).values()
    assert output.error is not None
    assert "none may follow: no_repeat_ngram_size, min_length left" in output.error


def wrong_shape(input_ids, scores):
    return scores[0]


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (FaultyAfter(9), "logits processor FaultyAfter raised ZeroDivisionError: the processor br"),
        (FaultyAfter(0), "logits processor FaultyAfter raised ZeroDivisionError"),
        (
            wrong_shape,
            r"logits processor wrong_shape raised ValueError: .*\[256\] .*not \[1, 256\]",
        ),
        (
            lambda ids, scores: scores.numpy(),
            r"raised TypeError: it returned a numpy\.ndarray, not a",
        ),
        (
            lambda ids, scores: scores.to("meta"),
            r"float32 \(torch\.strided\) on meta, not \[1, 256\]",
        ),
        (lambda ids, scores: None, "it returned a NoneType, not a torch.Tensor"),
        (lambda ids, scores: scores > 0, r"a tensor \[1, 256\] of torch\.bool"),
        (lambda ids, scores: scores.to_sparse(), r"\(torch\.sparse_coo\) on cpu, not"),
        (lambda ids, scores: scores * torch.nan, "after 5 tokens none may follow"),
        (lambda ids, scores: scores - torch.inf, "after 5 tokens none may follow"),
    ],
)
def test_a_faulty_processor_fails_its_own_request_and_no_other(processor, said):
    model, inputs = tiny_model(), prompts(5, 5, 8)
    plain = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True)
    faulty = SamplingParams(max_new_tokens=12, seed=3, logits_processors=(processor,))
    with RolloutGenerator(model) as generator:
        alone = list(generator.generate_batch(inputs, sampling_params=plain).values())
        with pytest.raises(IncompleteRolloutError, match=said) as caught:
            generator.generate_batch(inputs, sampling_params=[plain, faulty, plain])
        outputs = list(caught.value.outputs.values())
        assert generator.metrics()["rollout/kv_blocks_used"] == 0
    assert [o.status for o in outputs] == ["finished", "failed", "finished"]
    for place in (0, 2):
        assert outputs[place].generated_tokens == alone[place].generated_tokens


class Digits:
    """A grammar of a fixed number of digits, and then the end-of-sequence token."""

    def __init__(self, tokenizer, count, is_silent=False):
        self.digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
        self.count, self.is_silent = count, is_silent

    def matcher(self):
        return DigitsMatcher(self)


class DigitsMatcher:
    def __init__(self, grammar):
        self.grammar, self.num_accepted = grammar, 0

    def fill_allowed_tokens(self, mask_V):
        mask_V[self.grammar.digits if self.num_accepted < self.grammar.count else [EOS]] = True

    def accept_token(self, token_id):
        self.num_accepted += 1
        return token_id in self.grammar.digits or token_id == EOS

    def is_terminated(self):
        return self.num_accepted == self.grammar.count + (not self.grammar.is_silent)


@pytest.mark.parametrize("is_silent", [True, False])
def test_every_sequence_obeys_a_grammar_of_its_own(is_silent):
    tokenizer = char_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    inputs = ["1+2=", "hello"]
    params = SamplingParams(
        grammar=Digits(tokenizer, 5, is_silent), max_new_tokens=20, ignore_eos=True
    )
    tight = RolloutConfig(seed=0, block_size=4, num_blocks=12)
    with RolloutGenerator(model, tight, tokenizer=tokenizer) as generator:
        outputs = generator.generate_batch(inputs, sampling_params=params, num_return_sequences=6)
    texts = {
        tokenizer.decode(o.generated_tokens, skip_special_tokens=True) for o in outputs.values()
    }
    assert all(len(text) == 5 and text.isdigit() for text in texts)
    assert len(texts) > 6
    for output in outputs.values():
        assert output.finish_reason == "stop"
        assert len(output.generated_tokens) == 5 + (not is_silent)
        policy = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
        assert output.logprobs == pytest.approx(policy, abs=TOLERANCE)


class BrokenMatcher:
    def fill_allowed_tokens(self, mask_V):
        raise RuntimeError("no such rule")

    def accept_token(self, token_id):
        return True

    def is_terminated(self):
        return False


class RefusingMatcher(BrokenMatcher):
    def fill_allowed_tokens(self, mask_V):
        mask_V[:] = True

    def accept_token(self, token_id):
        return False


class GrammarOf:
    def __init__(self, kind):
        self.kind = kind

    def matcher(self):
        return self.kind()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (BrokenMatcher, "the grammar raised RuntimeError: no such rule"),
        (RefusingMatcher, r"the grammar raised ValueError: token id \d+, which its own mask"),
    ],
)
def test_a_broken_grammar_fails_its_own_request_and_no_other(kind, said):
    model, inputs = tiny_model(), prompts(5, 5)
    broken = SamplingParams(grammar=GrammarOf(kind), max_new_tokens=8, ignore_eos=True)
    plain = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with (
        RolloutGenerator(model) as generator,
        pytest.raises(IncompleteRolloutError, match=said) as caught,
    ):
        generator.generate_batch(inputs, sampling_params=[broken, plain])
    assert [o.status for o in caught.value.outputs.values()] == ["failed", "finished"]


def test_a_request_whose_every_token_is_forbidden_fails_with_what_to_loosen():
    everything = SamplingParams(bad_words=tuple((t,) for t in range(256)), max_new_tokens=8)
    plain = SamplingParams(max_new_tokens=np.int64(8))
    with (
        RolloutGenerator(tiny_model()) as generator,
        pytest.raises(IncompleteRolloutError, match=r"after 3 tokens none.*bad_words.*loosen"),
    ):
        generator.generate_batch([[5, 6, 7], [8]], sampling_params=[everything, plain])


def test_verification_passes_over_sequences_that_report_another_distribution():
    model, inputs = tiny_model(), prompts(5, 5)
    params = [SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=8, min_length=7)]
    for mode, num_compared in (("policy", 2), ("processed", 1)):
        with RolloutGenerator(model, RolloutConfig(logprobs_mode=mode)) as generator:
            outputs = generator.generate_batch(inputs, sampling_params=params)
            report = generator.verify(2)
        lengths = [len(output.generated_tokens) for output in outputs.values()]
        assert report.num_tokens == sum(lengths[:num_compared])
        assert report.max <= TOLERANCE
