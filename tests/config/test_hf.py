import math

import pytest
from transformers import GenerationConfig

from cb_rollout.config.generation_fields import REFUSED
from cb_rollout.config.hf import from_generation_config
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError, InvalidRequestError

MODEL_EOS = (1, 7)


def test_a_generation_config_at_rest_is_greedy():
    assert from_generation_config(GenerationConfig()) == SamplingParams(do_sample=False)


def test_a_generation_config_is_read_field_by_field():
    asked = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        max_new_tokens=12,
        max_length=40,
        eos_token_id=[1, 7],
    )
    assert from_generation_config(asked) == SamplingParams(
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        max_new_tokens=12,
        max_length=40,
        eos_token_id=(1, 7),
    )


def test_the_reference_way_to_switch_off_eos_is_read():
    params = from_generation_config(GenerationConfig(eos_token_id=-1))
    assert params.stop_tokens(MODEL_EOS) == frozenset()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_beams", 2),
        ("eta_cutoff", 0.1),
        ("top_h", 0.5),
    ],
)
def test_a_generation_setting_that_is_not_honoured_is_refused(field, value):
    with pytest.raises(ConfigurationError) as raised:
        from_generation_config(GenerationConfig(**{field: value}))
    assert str(raised.value).startswith(f"GenerationConfig.{field}={value!r} is not honoured")
    assert REFUSED[field].reason in str(raised.value)
    assert REFUSED[field].advice in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", 1.0), ("num_beams", 1), ("typical_p", 1.0), ("min_new_tokens", 0)],
)
def test_a_generation_setting_at_rest_is_accepted(field, value):
    asked = GenerationConfig(do_sample=True, **{field: value})
    assert from_generation_config(asked) == SamplingParams()


def test_a_generation_setting_without_effect_is_accepted():
    asked = GenerationConfig(
        do_sample=True, pad_token_id=0, use_cache=False, num_assistant_tokens=5
    )
    assert from_generation_config(asked) == SamplingParams()


def test_a_setting_that_transformers_does_not_know_is_refused_not_dropped():
    asked = GenerationConfig()
    asked.entropy_floor = 0.5
    with pytest.raises(
        ConfigurationError, match=r"entropy_floor=0\.5 is not a field .* leave it out"
    ):
        from_generation_config(asked)


def test_a_generation_value_out_of_range_is_refused():
    asked = GenerationConfig(do_sample=True)
    asked.top_p = 1.5
    with pytest.raises(InvalidRequestError, match=r"top_p=1\.5"):
        from_generation_config(asked)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("repetition_penalty", 1.2, {"repetition_penalty": 1.2}),
        ("min_new_tokens", 4, {"min_new_tokens": 4}),
        ("min_length", 9, {"min_length": 9}),
        ("stop_strings", "END", {"stop": ("END",)}),
        ("stop_strings", ["END", "\n\n"], {"stop": ("END", "\n\n")}),
        ("bad_words_ids", [[3], [4, 5]], {"bad_words": ((3,), (4, 5))}),
        ("suppress_tokens", [3, 4], {"logit_bias": {3: -math.inf, 4: -math.inf}}),
        ("begin_suppress_tokens", [3], {"begin_suppress_tokens": (3,)}),
        ("sequence_bias", [[[3], 1.5], [[4], -2.0]], {"logit_bias": {3: 1.5, 4: -2.0}}),
        ("sequence_bias", {(3,): 1.5}, {"logit_bias": {3: 1.5}}),
        ("sequence_bias", [[[3, 4], 2]], {"sequence_bias": {(3, 4): 2.0}}),
        ("no_repeat_ngram_size", 3, {"no_repeat_ngram_size": 3}),
        ("forced_bos_token_id", 1, {"forced_bos_token_id": (1,)}),
        ("forced_eos_token_id", 1, {"forced_eos_token_id": (1,)}),
    ],
)
def test_what_changes_logits_or_ends_a_sequence_is_read(field, value, expected):
    asked = GenerationConfig(do_sample=True, **{field: value})
    assert from_generation_config(asked) == SamplingParams(**expected)


def test_a_suppressed_token_stays_so_under_a_bias():
    asked = GenerationConfig(do_sample=True, sequence_bias=[[[3], 1.5]], suppress_tokens=[3])
    assert from_generation_config(asked).logit_bias == {3: -math.inf}


def test_the_end_of_sequence_token_is_no_bad_word_as_in_transformers():
    asked = GenerationConfig(do_sample=True, eos_token_id=[1, 7], bad_words_ids=[[7], [7, 8]])
    assert from_generation_config(asked).bad_words == ((7, 8),)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 0.5}, "generation_config is a dict, {'temperature': 0.5}; pass a"),
        ("greedy", "generation_config is a str, 'greedy'; pass a"),
        (SamplingParams(), "pass it as sampling_params"),
    ],
)
def test_what_is_no_generation_config_is_refused(given, said):
    with pytest.raises(ConfigurationError) as raised:
        from_generation_config(given)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 160
