"""A prompt of a wrong type is refused with what to pass in its place."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import char_tokenizer, tiny_model

from cb_rollout import InvalidRequestError, RolloutConfig, RolloutGenerator
from cb_rollout.rollout.prompts import Padding, encoded, padding_of, refuse_padding

PAD = 0
# Of a tokenizer that pads with a token of its own, and of one that pads with the end of text.
OWN, END_OF_TEXT = Padding(PAD, is_text=False), Padding(PAD, is_text=True)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({5, 6}, "input 1 is a set, which has no order; pass a list"),
        (7, r"input 1 is a single number; .*\[\[5, 6, 7\]\]"),
        (b"text", "input 1 is bytes; decode it"),
        ({"role": "user"}, "input 1 is a dict of role; a chat is a list of messages"),
        ("text", "input 1 is text; pass token ids, or use a RolloutGenerator with tokenizer="),
    ],
)
def test_a_prompt_of_a_wrong_type_is_refused(prompt, said):
    with pytest.raises(InvalidRequestError, match=said):
        encoded([[5, 6], prompt], None)


def tokenized(side):
    tokenizer = char_tokenizer()
    tokenizer.padding_side = side
    return tokenizer(["ab", "abcde", "abc"], padding=True)["input_ids"]


PADDED = {
    "left": tokenized("left"),
    "right": tokenized("right"),
    "tuples": tuple(map(tuple, tokenized("left"))),
    "list of tensors": list(torch.tensor(tokenized("left"))),
    "list of arrays": list(np.array(tokenized("right"))),
    "tensor": torch.tensor(tokenized("left")),
    "array": np.array(tokenized("right")),
}


@pytest.mark.parametrize("padding", [OWN, END_OF_TEXT])
@pytest.mark.parametrize("prompts", PADDED.values(), ids=PADDED)
def test_prompts_that_a_tokenizer_padded_are_refused(prompts, padding):
    with pytest.raises(InvalidRequestError, match=r"2 of its rows (begin|end) with 0, the padding"):
        refuse_padding(prompts, padding)


@pytest.mark.parametrize(
    "prompts",
    [
        [[PAD, 5], [6, 7]],
        [[PAD, PAD, 5]],
        [[PAD, PAD, 5, 6], [PAD, PAD, PAD, 5]],
        torch.tensor([[5, 6, PAD, PAD]]),
    ],
    ids=["by one", "one to a length", "all to a length", "a tensor to a length"],
)
def test_a_token_of_padding_alone_shows_by_itself(prompts):
    with pytest.raises(
        InvalidRequestError, match="the padding token, which the model would read as"
    ):
        refuse_padding(prompts, OWN)


@pytest.mark.parametrize("num_rows", [3, 8, 60])
def test_a_list_of_made_up_ids_may_have_that_of_padding_at_a_border(num_rows):
    prompts = [[5, 6, number] for number in range(num_rows)]
    assert prompts[0][-1] == PAD
    refuse_padding(prompts, OWN)
    refuse_padding([prompt[::-1] for prompt in prompts], OWN)
    with pytest.raises(InvalidRequestError, match="1 of its rows end with 0, the padding token"):
        refuse_padding(torch.tensor(prompts), OWN)


@pytest.mark.parametrize(
    "prompts",
    [
        [[PAD, 5], [6, 7]],
        [[PAD, 5], [PAD, 7]],
        [[5, 6, PAD], [5, PAD, 7]],
        [[PAD, PAD, 5]],
        [[PAD], [5]],
        [[PAD, PAD], [5, 6]],
    ],
)
def test_a_prompt_may_begin_or_end_with_a_token_of_text_that_also_pads(prompts):
    refuse_padding(prompts, END_OF_TEXT)


@pytest.mark.parametrize(
    "prompts",
    [
        [[PAD, 5, 6], [7, 8]],
        [[PAD, PAD, 5], [7, 8]],
        [[5, PAD, 6], [7, PAD, PAD, 8]],
        [[5, 6], [7, 8]],
        [],
        [[]],
        [[], []],
        ["ab", "cd"],
        [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
        [5, 6],
        torch.zeros((0, 3), dtype=torch.long),
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("padding", [OWN, END_OF_TEXT, None])
def test_what_was_not_padded_passes(prompts, padding):
    refuse_padding(prompts, padding)


def test_prompts_of_an_iterator_are_not_taken_from_it():
    prompts = iter([[PAD, PAD, 5], [6, 7, 8]])
    refuse_padding(prompts, OWN)
    assert len(list(prompts)) == 2


def test_without_an_id_of_padding_nothing_is_known():
    refuse_padding(PADDED["left"], None)


@pytest.mark.parametrize(
    ("holders", "padding"),
    [
        ([{"pad_token_id": 3}, {"pad_token_id": 4}], Padding(3, False)),
        ([{"pad_token_id": None}, {"pad_token_id": 4, "eos_token_id": 5}], Padding(4, False)),
        ([{"pad_token_id": 3}, {"eos_token_id": [7, 3]}], Padding(3, True)),
        ([{"pad_token_id": 3, "bos_token_id": 3}], Padding(3, True)),
        ([{"pad_token_id": None}, {}], None),
    ],
)
def test_padding_is_of_the_first_that_names_it_and_is_text_where_any_says_so(holders, padding):
    assert padding_of(None, *(SimpleNamespace(**holder) for holder in holders)) == padding


def test_a_generator_refuses_padded_lists_and_takes_a_prompt_that_begins_with_the_end_of_text():
    tokenizer = char_tokenizer()
    config = RolloutConfig(seed=0, num_blocks=16)
    with RolloutGenerator(tiny_model(), config, tokenizer=tokenizer) as generator:
        with pytest.raises(
            InvalidRequestError, match=r"inputs is a list of shape \(3, 5\), and 2 of"
        ):
            generator.generate_batch(tokenized("left"), max_new_tokens=2)
        generator.tokenizer.pad_token = tokenizer.eos_token
        begins = [[tokenizer.eos_token_id, 5, 6], [5, 6, 7]]
        outputs = generator.generate_batch(begins, max_new_tokens=2)
        assert [output.prompt_ids for output in outputs.values()] == begins
        with pytest.raises(InvalidRequestError, match="rows begin with 1, the padding token"):
            generator.generate_batch([[1, 1, 5], [5, 6, 7]], max_new_tokens=2)
