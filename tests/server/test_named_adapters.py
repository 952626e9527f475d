"""A client names an adapter of the served model as its `model`."""

import copy

import openai
import pytest
from adapters import with_named_adapters
from served import IDS, client, served
from tiny import byte_tokenizer, plain_logprobs

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def serving():
    tokenizer = byte_tokenizer()
    model = with_named_adapters("llama", vocab_size=len(tokenizer))
    with served(model=model, tokenizer=tokenizer, model_name="policy") as (_, server):
        yield model, server


@pytest.mark.parametrize("name", ["policy", "one", "two", "three"])
def test_a_completion_is_sampled_by_the_adapter_that_the_client_names(serving, name):
    model, server = serving
    answer = client(server).completions.create(
        model=name, prompt=PROMPT, max_tokens=8, logprobs=1, seed=1,
        extra_body=IDS | {"prompt_logprobs": 0},
    )  # fmt: skip
    expected = copy.deepcopy(model)
    expected.set_adapter("one" if name == "policy" else name)
    (choice,) = answer.choices
    plain = plain_logprobs(expected, PROMPT, choice.token_ids)
    assert choice.logprobs.token_logprobs == pytest.approx(plain, abs=1e-5)
    scores = []
    for place in choice.prompt_logprobs[1:]:
        (score,) = place.values()
        scores.append(score["logprob"])
    assert scores == pytest.approx(plain_logprobs(expected, PROMPT[:1], PROMPT[1:]), abs=1e-5)
    assert answer.model == name


def test_adapters_are_listed_as_models_with_their_parent(serving):
    _, server = serving
    cards = {card.id: card.parent for card in client(server).models.list()}
    assert cards == {"policy": None, "one": "policy", "three": "policy", "two": "policy"}


def test_a_model_that_is_no_adapter_is_answered_with_those_there_are(serving):
    _, server = serving
    with pytest.raises(
        openai.NotFoundError, match="this server has 'policy', 'one', 'three', 'two"
    ):
        client(server).completions.create(model="four", prompt=PROMPT, max_tokens=1)
