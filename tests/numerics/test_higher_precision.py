import copy

import pytest
import torch
from tiny import tiny_model

from cb_rollout.engine.numerics.higher_precision import higher_precision

FAMILIES = ("qwen3", "gpt2", "lfm2", "qwen3_5_text", "granitemoehybrid", "deepseek_v3", "gpt_oss")
IDS = torch.arange(3, 13)[None]


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


# transformers' own, of kernels that are not installed and of a tiny config.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_weights_of_16_bits_compute_as_their_copy_in_float32_does(family):
    model = tiny_model(family).bfloat16()
    expected = logits(copy.deepcopy(model).float())
    with higher_precision(torch.float32):
        found = logits(model)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (logits(model) - expected).abs().max() > 1e-3, "bfloat16 is as coarse as ever after it"


@torch.no_grad()
def test_float32_computes_in_float64():
    model = tiny_model()
    with higher_precision(torch.float64):
        found = logits(model)
    exact = logits(copy.deepcopy(model).double())
    assert found.dtype == torch.float64
    # transformers turns positions in float32, whatever the model's dtype.
    assert (found - exact).abs().max() < (logits(model) - exact).abs().max() / 2


@torch.no_grad()
def test_autocast_casts_to_the_higher_precision_inside_and_to_its_own_after():
    model, autocast = tiny_model(), torch.autocast("cpu", torch.bfloat16)
    expected = logits(model)
    with autocast:
        before = logits(model)
        with higher_precision(torch.float32):
            inside = logits(model)
        after = logits(model)
    assert torch.equal(inside, expected)
    assert torch.equal(before, after)
    assert (before.float() - expected).abs().max() > 1e-3


def test_gradients_under_autocast_are_those_of_float32():
    model = tiny_model()
    weight = model.model.norm.weight
    expected = torch.autograd.grad(logits(model).logsumexp(-1).sum(), weight)[0]
    with higher_precision(torch.float32), torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(logits(model).logsumexp(-1).sum(), weight)[0]
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_an_operator_that_writes_rounds_to_the_dtype_of_what_it_writes():
    held = torch.zeros(3, dtype=torch.bfloat16)
    with higher_precision(torch.float32):
        returned = held.add_(torch.full((3,), 1 + 2**-12))
        held[1] = 2.0
    assert returned is held
    assert held.tolist() == [1.0, 2.0, 1.0]
