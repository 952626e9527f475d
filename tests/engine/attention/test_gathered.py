"""Batched products give what the model's own attention function gives, or leave the work to it."""

from types import SimpleNamespace

import pytest
import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.attention.gathered import BatchedAttention


def inputs_of(B=3, H=2, G=2, S=7, D=8, E=8, Q=1, dtype=torch.float64):
    torch.manual_seed(0)
    query = torch.randn(B, H * G, Q, D, dtype=dtype)
    key = torch.randn(B, H, S, D, dtype=dtype)
    value = torch.randn(B, S, H, E, dtype=dtype).transpose(1, 2)
    return SimpleNamespace(num_key_value_groups=G), query, key, value


def mask_of(kind, B, S, dtype):
    seen = (torch.arange(S) >= torch.arange(B)[:, None])[:, None, None]
    seen[..., -1] = True
    if kind == "none":
        return None
    if kind == "bool":
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def fails(*_, **__):
    pytest.fail("the model's own function was called")


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("sizes", [{}, {"G": 1}, {"H": 1, "G": 4}, {"E": 5}, {"S": 1}, {"B": 1}])
def test_it_agrees_with_the_models_own(kind, sizes, monkeypatch):
    module, query, key, value = inputs_of(**sizes)
    mask = mask_of(kind, query.shape[0], key.shape[2], query.dtype)
    wanted, _ = hf_compat.sdpa_attention()(module, query, key, value, mask, scaling=0.3)
    monkeypatch.setattr(hf_compat, "sdpa_attention", lambda: fails)
    got, weights = BatchedAttention()(fails, module, query, key, value, mask, scaling=0.3)
    assert weights is None
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_layers_with_one_mask_share_its_bias(monkeypatch):
    monkeypatch.setattr(hf_compat, "sdpa_attention", lambda: fails)
    module, query, key, value = inputs_of()
    mask = mask_of("bool", 3, 7, query.dtype)
    attend = BatchedAttention()
    first, _ = attend(fails, module, query, key, value, mask)
    second, _ = attend(fails, module, query, key, value, mask)
    assert len(attend._biases) == 1
    assert torch.equal(first, second)
    other, _ = attend(fails, module, query, key, value, mask_of("float", 3, 7, query.dtype))
    assert len(attend._biases) == 2
    torch.testing.assert_close(other, first)


@pytest.mark.parametrize(
    ("sizes", "known"),
    [
        ({"Q": 2}, {}),
        ({"dtype": torch.bfloat16}, {}),
        ({}, {"softcap": 3.0}),
        ({}, {"dropout": 0.1}),
        ({}, {"position_bias": torch.zeros(1)}),
    ],
)
def test_unknown_arguments_are_left_to_the_models_own_attention(sizes, known):
    module, query, key, value = inputs_of(**sizes)
    called = []

    def found(*args, **kwargs):
        called.append((args, kwargs))
        return "theirs", None

    assert BatchedAttention()(found, module, query, key, value, None, **known)[0] == "theirs"
    assert called[0][1] == known


def test_another_attention_than_sdpa_is_left_alone():
    module, query, key, value = inputs_of()
    assert BatchedAttention()(lambda *_, **__: "eager", module, query, key, value, None) == "eager"
