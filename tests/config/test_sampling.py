import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from cb_rollout.config.checks import setting
from cb_rollout.config.sampling import SamplingParams, resolved
from cb_rollout.errors import ConfigurationError, InvalidRequestError

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
        ("temperature", 1e-310, "use 0 for greedy"),
        ("temperature", 1e-7, "use 0 for greedy"),
        ("temperature", True, "use 0 for greedy"),
        ("temperature", "1", "use 0 for greedy"),
        ("repetition_penalty", 0.0, "use 1 to switch it off"),
        ("repetition_penalty", 1e-310, "use 1 to switch it off"),
        ("presence_penalty", float("inf"), "use 0 to switch it off"),
        ("frequency_penalty", 1e300, "use 0 to switch it off"),
        ("min_new_tokens", -1, "0 is no minimum"),
        ("min_length", 2.5, "0 is no minimum"),
        ("top_logprobs", -1, "0 is none"),
        ("top_k", True, "use 0 to switch it off"),
        ("top_k", np.bool_(True), "use 0 to switch it off"),
        ("seed", 1.5, "not a whole number"),
        ("top_p", 0.0, "use 1 to switch it off"),
        ("top_p", 1.5, "use 1 to switch it off"),
        ("top_p", float("nan"), "use 1 to switch it off"),
        ("top_k", -1, "use 0 to switch it off"),
        ("no_repeat_ngram_size", -1, "use 0 to switch it off"),
        ("min_p", -0.1, "use 0 to switch it off"),
        ("min_p", 1.1, "use 0 to switch it off"),
        ("max_new_tokens", 0, "None is no limit"),
        ("max_new_tokens", -3, "None is no limit"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_to_use(field, value, advice):
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**{field: value})
    assert str(raised.value).startswith(f"{field}={value!r} ")
    assert advice in str(raised.value)


NUMERIC = [
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "no_repeat_ngram_size", "max_new_tokens", "max_length", "min_new_tokens",
    "min_length", "top_logprobs", "seed", "eos_token_id", "stop_token_ids",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
]  # fmt: skip
HUGE = {"128 bits": 2**128, "no float": 10**400, "negative": -(10**400), "no text": 10**5000}
WRAPPED = {
    "logit_bias": lambda number: {number: 1.0},
    "sequence_bias": lambda number: {(1, number): 1.0},
    "bad_words": lambda number: [[number]],
}


@pytest.mark.parametrize("huge", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("field", [*NUMERIC, *WRAPPED])
def test_a_number_that_no_tensor_holds_is_refused(field, huge):
    with pytest.raises(InvalidRequestError, match=field) as raised:
        SamplingParams(**{field: WRAPPED.get(field, lambda number: number)(huge)})
    assert len(str(raised.value)) < 500


def test_a_bias_that_no_tensor_holds_is_refused():
    for values in (
        {"logit_bias": {1: 1e300}},
        {"logit_bias": {1: 10**400}},
    ):
        with pytest.raises(InvalidRequestError, match=next(iter(values))):
            SamplingParams(**values)


@given(
    temperature=st.just(0.0) | st.floats(1e-6, 100),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    max_new_tokens=st.none() | st.integers(1, 10_000),
)
def test_every_value_in_range_is_accepted_and_kept(**values):
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


@pytest.mark.parametrize(
    ("field", "value", "plain"),
    [
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", torch.tensor(0.5), 0.5),
        ("temperature", 1, 1.0),
        ("top_k", np.int64(5), 5),
        ("top_k", torch.tensor(5), 5),
        ("seed", np.uint8(3), 3),
        ("do_sample", np.bool_(False), False),
        ("stop_token_ids", torch.tensor([3, 4]), (3, 4)),
        ("stop_token_ids", np.int32(3), (3,)),
        ("stop_token_ids", {3}, (3,)),
        ("eos_token_id", torch.tensor(3), (3,)),
        ("bad_words", [np.array([3, 4]), [5]], ((3, 4), (5,))),
        ("logit_bias", {np.int64(3): np.float32(0.5)}, {3: 0.5}),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("bad_words", None, ()),
    ],
)
def test_scalars_and_arrays_of_other_libraries_become_plain_values(field, value, plain):
    kept = getattr(SamplingParams(**{field: value}), field)
    assert kept == plain
    assert type(kept) is type(plain)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("stop_token_ids", (3, True), "is not made of token ids"),
        ("stop_token_ids", (3.5,), "is not made of token ids"),
        ("stop_token_ids", "3", "is not made of token ids"),
        ("eos_token_id", -2, "-1 is none"),
        ("bad_words", (3, 4), "sequence of token-id sequences"),
        ("bad_words", ((),), "sequence of token-id sequences"),
        ("bad_words", ("word",), "tokenizer(word, add_special_tokens=False)"),
        ("logit_bias", [(3, 1.0)], "not a dict"),
        ("logit_bias", {3: float("nan")}, "gives token 3 nan"),
        ("logit_bias", {3: float("inf")}, "gives token 3 inf"),
        ("logit_bias", {"3": 1.0}, "is not made of token ids"),
        ("sequence_bias", {3: 1.0}, "not a dict of token-id tuple"),
        ("sequence_bias", {(3, 4): float("nan")}, "gives token 4 nan"),
        ("stop", "", "not empty"),
        ("stop", ("a", ""), "not empty"),
        ("stop", 5, "not a text"),
        ("logits_processors", len, "(processor,)"),
        ("logits_processors", (5,), "callables"),
        ("grammar", "a+", "cb_rollout.config.grammar.Grammar"),
        ("ignore_eos", 1, "not True or False"),
    ],
)
def test_a_value_of_the_wrong_shape_is_refused_by_name(field, value, said):
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**{field: value})
    assert field in str(raised.value)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("max_tokens", "max_new_tokens"),
        ("min_tokens", "min_new_tokens"),
        ("stop_strings", "stop"),
        ("temperature_", "temperature"),
    ],
)
def test_a_neighbours_word_is_answered_with_ours(word, ours):
    with pytest.raises(InvalidRequestError, match=f"no field '{word}'; did you mean '{ours}'"):
        SamplingParams(**{word: 1})


@pytest.mark.parametrize(
    "field",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": {3: 1.0}},
        {"bad_words": ((3,),)},
        {"begin_suppress_tokens": (3,)},
        {"forced_eos_token_id": 3},
        {"min_new_tokens": 3},
        {"min_length": 3},
        {"logits_processors": (len,)},
        {"sequence_bias": {(3, 4): 1.0}},
        {"no_repeat_ngram_size": 2},
        {"forced_bos_token_id": 0},
    ],
)
def test_whatever_changes_the_logits_is_known_to(field):
    assert SamplingParams(**field).is_adjusted
    assert SamplingParams(**field).is_processed
    assert not SamplingParams(stop="END", top_logprobs=3, stop_token_ids=(3,)).is_adjusted


def test_equal_params_have_one_hash():
    first, second = (SamplingParams(logit_bias={3: 1.0}, seed=s, stop="END") for s in (1, 1))
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize("given", [{"temperature": 0.5}, GenerationConfig(), "greedy"])
def test_what_are_no_sampling_params_is_refused(given):
    with pytest.raises(ConfigurationError, match=r"(?s)sampling_params is a .*; pass a"):
        resolved(given, DEFAULTS)


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


class AnyGrammar:
    """A grammar that nothing is sampled by."""

    def matcher(self):
        """Return no state."""


# A value of each parameter that is not its default, by whether a CUDA graph samples with it.
GRAPHED = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "do_sample": False,
    "begin_suppress_tokens": (3,),
    "forced_bos_token_id": (3,),
    "max_new_tokens": 5,
    "max_length": 5,
    "eos_token_id": 3,
    "ignore_eos": True,
    "stop_token_ids": (3,),
    "stop": ("end",),
    "seed": 7,
}
NOT_GRAPHED = {
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "bad_words": ((3,),),
    "min_new_tokens": 5,
    "min_length": 5,
    "top_logprobs": 2,
    "adapter": "one",
    "sequence_bias": {(3, 4): 1.0},
    "no_repeat_ngram_size": 2,
    "forced_eos_token_id": (3,),
    "logits_processors": (lambda ids, scores: scores,),
    "grammar": AnyGrammar(),
}


def test_a_graph_samples_by_the_parameters_that_it_knows_and_no_other():
    values = GRAPHED | NOT_GRAPHED
    assert set(values) == {field.name for field in dataclasses.fields(SamplingParams)}
    given = {name: SamplingParams(**{name: value}) for name, value in values.items()}
    assert all(getattr(given[name], name) != getattr(SamplingParams(), name) for name in values)
    assert {name for name in given if given[name].can_be_graphed} == set(GRAPHED)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Newer(SamplingParams):
    """Parameters with one that no graph knows."""

    smoothing: float = setting(0.0, "Of a later version.", float)


def test_a_graph_does_not_sample_by_a_new_parameter():
    assert Newer().can_be_graphed
    assert not Newer(smoothing=0.5).can_be_graphed
