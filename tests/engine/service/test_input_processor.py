import math
import random
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import char_tokenizer
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import BatchEncoding

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.service.input_processor import InputProcessor, ServingLimits
from cb_rollout.errors import InvalidRequestError


def processor_of(seed=0, rank=0, **limits):
    defaults = {
        "vocab_size": 100,
        "max_positions": 50,
        "max_cached_tokens": 80,
        "model_eos": (1, 7),
    }
    values = defaults | limits
    cached, vocab_size = values.pop("max_cached_tokens"), values.pop("vocab_size")
    limits = ServingLimits(
        **values, max_cached_tokens=lambda: cached, vocab_size=lambda: vocab_size
    )
    return InputProcessor(limits, seed, rank)


def one(input_processor, prompt=(3, 4), **params):
    (request,) = input_processor.requests([prompt], [SamplingParams(**params)])
    return request


def refusal(prompt=(3, 4), limits=None, **params):
    with pytest.raises(InvalidRequestError) as raised:
        one(processor_of(**(limits or {})), prompt, **params)
    return str(raised.value)


def test_a_request_carries_what_was_asked():
    request = one(processor_of(), [3, 4, 5], max_new_tokens=6, stop_token_ids=(9,))
    assert request.prompt_ids == request.token_ids == [3, 4, 5]
    assert request.max_new_tokens == 6
    assert request.stop_tokens == {1, 7, 9}
    assert not request.status.is_final


def test_ids_from_a_tensor_become_plain_integers():
    assert one(processor_of(), torch.tensor([3, 4])).prompt_ids == [3, 4]


NO_TOKEN_IDS = [
    ([True, False], "True at position 0 is a boolean, as in a mask"),
    ([5, False], "False at position 1 is a boolean"),
    (np.array([True, False]), "True at position 0 is a boolean"),
    ([3, np.True_], "True at position 1 is a boolean"),
    (torch.tensor([False, True]), "False at position 0 is a boolean"),
    ([3, torch.tensor(True)], "True at position 1 is a boolean"),
    ([3.0, 4.0], "3.0 at position 0 is a float, and ids are whole numbers"),
    (torch.tensor([3.0]), "3.0 at position 0 is a float"),
    (np.array([3, 4], dtype=np.float32), "3.0 at position 0 is a float"),
    ([3, np.float64(4)], "4.0 at position 1 is a float"),
    ([3, "4"], "at position 1: 'str' object"),
    ([3, math.nan], "nan at position 1 is a float"),
]


@pytest.mark.parametrize(("prompt", "said"), NO_TOKEN_IDS)
def test_a_boolean_or_a_float_is_no_token_id(prompt, said):
    message = refusal(prompt)
    assert message.startswith(f"input 0 is not a list of token ids ({said}")
    assert "pass tokenizer(text)['input_ids']" in message


@pytest.mark.parametrize(
    "prompt",
    [
        [np.int64(3), np.uint8(4)],
        np.array([3, 4], dtype=np.uint16),
        [torch.tensor(3), 4],
        (3, 4),
        array("i", [3, 4]),
        range(3, 5),
    ],
)
def test_whole_numbers_of_any_kind_are_token_ids(prompt):
    prompt_ids = one(processor_of(), prompt).prompt_ids
    assert prompt_ids == [3, 4]
    assert {*map(type, prompt_ids)} == {int}


def test_the_callers_list_is_not_the_requests():
    ids = [3, 4]
    request = one(processor_of(), ids)
    ids.append(5)
    assert request.prompt_ids == [3, 4]


@pytest.mark.parametrize("prompt", [[3.5], [None], [True, "a"]])
def test_what_is_no_list_of_token_ids_is_refused(prompt):
    message = refusal(prompt)
    assert message.startswith("input 0 is not a list of token ids")
    assert "pass tokenizer(text)['input_ids']" in message


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("text", "input 0 is text, but a manager needs token ids; pass tokenizer(text)"),
        (5, "input 0 is a single number; pass add_request one prompt, such as [5, 6, 7]"),
        (torch.tensor(5), "input 0 is a single number"),
        (
            [[3, 4], [5]],
            "input 0 is a batch of 2 sequences, but one sequence is expected; pass one",
        ),
        (torch.tensor([[3, 4]]), "input 0 is a batch of 1 sequences, but one sequence is expected"),
        ([torch.tensor([3, 4])], "input 0 is a batch of 1 sequences, but one sequence is expected"),
        (
            BatchEncoding({"input_ids": [3, 4], "attention_mask": [1, 1]}),
            "a tokenizer's BatchEncoding of input_ids, attention_mask; pass its ['input_ids']",
        ),
    ],
)
def test_another_shape_of_a_prompt_is_told_what_to_pass(prompt, said):
    assert said in refusal(prompt)


def test_an_empty_prompt_is_refused():
    assert refusal([]) == "input 0 is empty; a prompt needs at least one token."


@pytest.mark.parametrize("token", [-1, 100, 5000])
def test_a_token_outside_the_vocabulary_is_refused_by_name(token):
    message = refusal([3, token, 4])
    assert message.startswith(
        f"input 0 holds token id {token}, outside the model's vocabulary of 100"
    )


def test_the_first_and_last_ids_of_the_vocabulary_are_accepted():
    assert one(processor_of(), [0, 99]).prompt_ids == [0, 99]


@pytest.mark.parametrize(
    ("limits", "params", "length", "advice"),
    [
        ({}, {"max_new_tokens": 10}, 41, "the model takes at most 50"),
        ({}, {}, 50, "the model takes at most 50"),
        ({"max_positions": None}, {"max_new_tokens": 10}, 71, "the KV cache holds at most 80"),
        ({"max_cached_tokens": 20}, {}, 20, "the KV cache holds at most 20"),
        ({}, {"max_length": 10}, 10, "max_length allows at most 10"),
    ],
)
def test_a_sequence_that_can_never_fit_is_refused_with_the_numbers(limits, params, length, advice):
    message = refusal([3] * length, limits, **params)
    assert message.startswith(f"input 0 has {length} tokens")
    assert advice in message
    assert one(processor_of(**limits), [3] * (length - 1), **params)


@given(
    length=st.integers(1, 60),
    wanted=st.none() | st.integers(1, 60),
    positions=st.none() | st.integers(1, 60),
    cached=st.integers(1, 60),
)
def test_an_accepted_sequence_always_fits(length, wanted, positions, cached):
    input_processor = processor_of(max_positions=positions, max_cached_tokens=cached)
    room = min(cached, positions or cached) - length
    if room < (wanted or 1):
        with pytest.raises(InvalidRequestError):
            one(input_processor, [3] * length, max_new_tokens=wanted)
    else:
        request = one(input_processor, [3] * length, max_new_tokens=wanted)
        assert request.max_new_tokens == (wanted or room)


def test_max_length_counts_the_prompt_and_yields_to_max_new_tokens():
    input_processor = processor_of()
    assert one(input_processor, [3] * 4, max_length=10).max_new_tokens == 6
    assert one(input_processor, [3] * 4, max_length=5, max_new_tokens=8).max_new_tokens == 8


def test_an_end_of_sequence_outside_the_vocabulary_is_refused_unless_it_is_the_models_own():
    message = refusal(eos_token_id=5000)
    assert message.startswith("eos_token_id holds token id 5000, outside the model's vocabulary")
    assert one(processor_of(), eos_token_id=-1).stop_tokens == set()
    own = processor_of(model_eos=(5000,))
    assert one(own, eos_token_id=5000).stop_tokens == {5000}


def test_equal_prompts_of_one_call_are_one_group():
    prompts = [[3, 4], [5], [3, 4], (5,)]
    requests = processor_of().requests(prompts, [SamplingParams()] * 4)
    a, b, c, d = (request.group for request in requests)
    assert a == c != b == d


def test_what_waits_keeps_one_prompt_a_group_and_stop_tokens_once():
    params = [SamplingParams(ignore_eos=True), SamplingParams(ignore_eos=True, seed=1)] * 2
    waiting = processor_of().requests([[3, 4], [3, 4], (3, 4), [5]], params)
    held = {id(tokens) for request in waiting for tokens in (request.prompt_ids, request.token_ids)}
    assert len(held) == 2
    assert len({id(request.stop_tokens) for request in waiting}) == 1
    first, second, *_ = waiting
    first.append(9, -1.0, 0)
    assert (first.prompt_ids, first.token_ids, first.num_generated) == ([3, 4], [3, 4, 9], 1)
    assert (second.prompt_ids, second.token_ids, second.num_generated) == ([3, 4], [3, 4], 0)


def test_equal_prompts_of_two_calls_are_two_groups():
    input_processor = processor_of()
    assert one(input_processor).group != one(input_processor).group


def test_one_bad_prompt_refuses_the_whole_call_and_is_named():
    with pytest.raises(InvalidRequestError, match="input 1 holds token id 200"):
        processor_of().requests([[3], [200]], [SamplingParams()] * 2)


def test_ids_that_are_made_here_never_repeat():
    input_processor = processor_of()
    ids = [one(input_processor).request_id for _ in range(20)]
    assert len(set(ids)) == 20


def test_an_id_that_is_given_is_kept():
    (request,) = processor_of().requests([[3]], [SamplingParams()], request_id="mine")
    assert request.request_id == "mine"


def test_an_id_that_is_made_here_is_none_that_was_given():
    input_processor = processor_of()
    (given_id,) = input_processor.requests([[3]], [SamplingParams()], request_id="req_1")
    assert one(input_processor).request_id != given_id.request_id


@pytest.mark.parametrize(("given_id", "first_id"), [(None, "req_0"), ("mine", "mine")])
def test_further_sequences_of_an_input_are_named_after_the_first(given_id, first_id):
    input_processor = processor_of()
    arguments = {"members": range(3), "request_id": given_id}
    requests = input_processor.requests([[3]], [SamplingParams()], **arguments)
    ids = [request.request_id for request in requests]
    assert ids == [first_id, f"{first_id}__child#0", f"{first_id}__child#1"]


def test_an_id_that_is_made_here_names_no_children_that_were_given():
    input_processor = processor_of()
    input_processor.requests([[3]], [SamplingParams()], request_id="req_7__child#0")
    assert one(input_processor).request_id == "req_8"


def seeds(input_processor, count=4, **params):
    requests = input_processor.requests([[3]], [SamplingParams(**params)], members=range(count))
    return [request.seed for request in requests]


def test_every_sequence_has_a_seed_of_its_own():
    input_processor = processor_of()
    drawn = seeds(input_processor) + seeds(input_processor)
    assert len(set(drawn)) == 8
    assert all(-(2**63) <= seed < 2**63 for seed in drawn)


def test_the_same_config_seed_gives_the_same_seeds_again():
    assert seeds(processor_of(seed=5)) == seeds(processor_of(seed=5))
    assert not set(seeds(processor_of(seed=5))) & set(seeds(processor_of(seed=6)))


def test_ranks_draw_apart():
    assert not set(seeds(processor_of(rank=0))) & set(seeds(processor_of(rank=1)))


def test_the_process_group_tells_the_rank_else_the_launcher_does(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    of_rank = {rank: seeds(processor_of(rank=rank)) for rank in (0, 1, 2)}
    made_before_the_group = processor_of(rank=None)
    assert seeds(processor_of(rank=None)) == of_rank[0]
    monkeypatch.setenv("RANK", "2")
    assert seeds(processor_of(rank=None)) == of_rank[2]
    # A fake group of which this process is the second.
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        assert seeds(made_before_the_group) == of_rank[1]
        assert seeds(processor_of(rank=0)) == of_rank[0]
    finally:
        distributed.destroy_process_group()
    monkeypatch.setenv("RANK", "sergeant")
    assert seeds(processor_of(rank=None)) == of_rank[0]


def test_a_seed_of_a_request_holds_whatever_came_before_and_parts_its_group():
    fresh, used = processor_of(seed=1, rank=0), processor_of(seed=2, rank=3)
    seeds(used)
    assert seeds(fresh, seed=11) == seeds(used, seed=11)
    assert len(set(seeds(fresh, seed=11))) == 4


def test_without_a_seed_each_processor_draws_fresh_and_asks_no_global_generator():
    before = torch.get_rng_state(), random.getstate()
    assert seeds(processor_of(seed=None)) != seeds(processor_of(seed=None))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": (100,)}, "stop_token_ids holds token id 100"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids holds token id -1"),
        ({"bad_words": ((3,), (4, 100))}, "bad_words holds token id 100"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias holds token id -5"),
        ({"top_logprobs": 101}, "top_logprobs=101 is more than the model's vocabulary of 100"),
    ],
)
def test_settings_outside_the_vocabulary_are_refused_by_name(params, message):
    assert refusal(**params).startswith(message)


def test_a_least_length_counts_the_prompt_where_it_says_so():
    assert one(processor_of(), [3, 4, 5], min_new_tokens=2, min_length=9).min_generated == 6
    assert one(processor_of(), [3, 4, 5], min_new_tokens=8, min_length=9).min_generated == 8


def test_a_least_length_that_cannot_be_reached_is_refused_with_the_numbers():
    message = refusal([3, 4, 5], min_length=20, max_new_tokens=10)
    assert (
        "min_length=20 ask for at least 17 new tokens after a prompt of 3, but at most 10"
        in message
    )


def test_stop_strings_take_a_tokenizer():
    assert "pass tokenizer= to the generator or manager" in refusal(stop="END")
    input_processor = InputProcessor(processor_of().limits, 0, 0, char_tokenizer())
    first, second = (one(input_processor, stop="END") for _ in range(2))
    assert first.stop_strings is not second.stop_strings
