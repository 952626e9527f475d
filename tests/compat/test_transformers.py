import threading

import pytest
import torch
from tiny import plain_logprobs, tiny_model
from transformers import AttentionInterface, Cache

from cb_rollout.compat.transformers import cache_argument, replacing_attention

PRISTINE = AttentionInterface.get_interface


def counting(calls):
    def attend(found, *args, **kwargs):
        calls.append(found)
        return found(*args, **kwargs)

    return attend


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_models_layers_call_the_replacement_with_their_own_function(implementation):
    model = tiny_model("qwen3")
    model.set_attn_implementation(implementation)
    before = plain_logprobs(model, [5, 6], [7])
    calls = []
    with replacing_attention(counting(calls)):
        inside = plain_logprobs(model, [5, 6], [7])
    assert inside == before == plain_logprobs(model, [5, 6], [7])
    assert len(calls) == model.config.num_hidden_layers
    assert calls[0].__name__ == f"{implementation}_attention_forward"
    assert AttentionInterface.get_interface is PRISTINE
    assert model.config._attn_implementation == implementation


def test_another_thread_finds_the_models_own_attention():
    model = tiny_model("qwen3")
    calls, elsewhere = [], []
    with replacing_attention(counting(calls)):
        thread = threading.Thread(
            target=lambda: elsewhere.append(plain_logprobs(model, [5, 6], [7]))
        )
        thread.start()
        thread.join()
    assert elsewhere == [plain_logprobs(model, [5, 6], [7])]
    assert not calls


def test_the_last_thread_to_leave_restores_the_lookup_even_after_an_error():
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with replacing_attention(counting([])):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    with pytest.raises(ZeroDivisionError), replacing_attention(counting([])):
        raise ZeroDivisionError
    assert AttentionInterface.get_interface is not PRISTINE
    leave.set()
    thread.join()
    assert AttentionInterface.get_interface is PRISTINE
    assert torch.is_grad_enabled()


class TakesCache:
    """A model of transformers 5.24."""

    def forward(self, input_ids, cache: Cache | None = None, **kwargs):
        pass


class TakesPastKeyValues:
    """A model of transformers 5.23."""

    def forward(self, input_ids, past_key_values: Cache | None = None, **kwargs):
        pass


class TakesDict:
    """XLM."""

    def forward(self, input_ids, cache: dict[str, torch.Tensor] | None = None):
        pass


class TakesNothing:
    def forward(self, input_ids):
        pass


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (TakesCache(), "cache"),
        (TakesPastKeyValues(), "past_key_values"),
        (TakesDict(), None),
        (TakesNothing(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_argument_for_the_cache_is_the_one_of_this_transformers(model, name):
    assert cache_argument(model) == name
