import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.sampling_params import SamplingParams, from_generation_config, resolved

MODEL_EOS = (1, 7)


def test_the_defaults_sample_from_the_whole_distribution():
    params = SamplingParams()
    assert params.temperature == 1.0
    assert not params.is_greedy
    assert not params.is_truncated


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("temperature", -0.1, "use 0 for greedy"),
        ("temperature", float("inf"), "use 0 for greedy"),
        ("temperature", float("nan"), "use 0 for greedy"),
        ("top_p", 0.0, "use 1 to switch it off"),
        ("top_p", 1.5, "use 1 to switch it off"),
        ("top_p", float("nan"), "use 1 to switch it off"),
        ("top_k", -1, "use 0 to switch it off"),
        ("min_p", -0.1, "use 0 to switch it off"),
        ("min_p", 1.1, "use 0 to switch it off"),
        ("max_new_tokens", 0, "None is no limit"),
        ("max_new_tokens", -3, "None is no limit"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_to_use(field, value, advice):
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**{field: value})
    assert str(raised.value).startswith(f"{field}={value} ")
    assert advice in str(raised.value)


@given(
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    max_new_tokens=st.none() | st.integers(1, 10_000),
)
def test_every_value_in_range_is_accepted_and_kept(**values):
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_params_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(do_sample=False)])
def test_temperature_zero_and_no_sampling_are_greedy(params):
    assert params.is_greedy


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_filter_truncates_sampling_but_not_greedy_decoding(filters):
    assert SamplingParams(**filters).is_truncated
    assert not SamplingParams(do_sample=False, **filters).is_truncated


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), {1, 7}),
        (SamplingParams(eos_token_id=5), {5}),
        (SamplingParams(eos_token_id=0), {0}),
        (SamplingParams(eos_token_id=(5, 6)), {5, 6}),
        (SamplingParams(eos_token_id=-1), set()),
        (SamplingParams(ignore_eos=True), set()),
        (SamplingParams(eos_token_id=5, ignore_eos=True), set()),
        (SamplingParams(stop_token_ids=(9,)), {1, 7, 9}),
        (SamplingParams(eos_token_id=-1, stop_token_ids=(9,)), {9}),
        (SamplingParams(ignore_eos=True, stop_token_ids=(9,)), {9}),
    ],
)
def test_a_sequence_stops_at_the_tokens_asked_for(params, expected):
    assert params.stop_tokens(MODEL_EOS) == expected


def test_a_model_without_eos_never_stops_by_itself():
    assert SamplingParams().stop_tokens(()) == frozenset()


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
        ("repetition_penalty", 1.2),
        ("min_new_tokens", 4),
        ("min_length", 4),
        ("no_repeat_ngram_size", 3),
        ("num_beams", 2),
        ("typical_p", 0.9),
        ("stop_strings", ["END"]),
        ("bad_words_ids", [[3]]),
        ("suppress_tokens", [3]),
        ("sequence_bias", [[[3], 1.0]]),
        ("forced_eos_token_id", 1),
        ("max_time", 1.0),
        ("renormalize_logits", True),
    ],
)
def test_a_generation_setting_that_is_not_honoured_is_refused(field, value):
    with pytest.raises(ConfigurationError) as raised:
        from_generation_config(GenerationConfig(**{field: value}))
    assert str(raised.value).startswith(f"GenerationConfig.{field}={value!r} is not honoured")
    assert "model.generate" in str(raised.value)


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
    with pytest.raises(ConfigurationError, match=r"GenerationConfig\.entropy_floor=0\.5"):
        from_generation_config(asked)


def test_a_generation_value_out_of_range_is_refused():
    asked = GenerationConfig(do_sample=True)
    asked.top_p = 1.5
    with pytest.raises(InvalidRequestError, match=r"top_p=1\.5"):
        from_generation_config(asked)


DEFAULTS = SamplingParams(temperature=0.3, max_new_tokens=8, eos_token_id=(1,), seed=5)


def test_without_params_the_defaults_are_used_whole():
    assert resolved(None, DEFAULTS) == DEFAULTS


def test_params_take_only_length_and_end_of_sequence_from_the_defaults():
    assert resolved(SamplingParams(top_k=4), DEFAULTS) == SamplingParams(
        top_k=4, max_new_tokens=8, eos_token_id=(1,)
    )


def test_what_params_say_is_kept():
    params = SamplingParams(max_new_tokens=3, eos_token_id=-1)
    assert resolved(params, DEFAULTS) == params


def test_the_words_of_the_request_come_first():
    params = SamplingParams(max_new_tokens=3, eos_token_id=9)
    assert resolved(params, DEFAULTS, max_new_tokens=2, eos_token_id=[4, 5]) == SamplingParams(
        max_new_tokens=2, eos_token_id=(4, 5)
    )
    assert resolved(params, DEFAULTS, eos_token_id=-1).stop_tokens(MODEL_EOS) == frozenset()


def test_a_length_below_one_is_refused_where_it_is_asked_for():
    with pytest.raises(InvalidRequestError, match="max_new_tokens=0 is not a whole number >= 1"):
        resolved(None, DEFAULTS, max_new_tokens=0)
