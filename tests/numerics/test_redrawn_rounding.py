"""A forward is rounded anew by moving its embeddings, and nothing else changes."""

import pytest
import torch
from tiny import tiny_model
from torch.nn import functional

from cb_rollout.engine.attention.traced_forward import trial_noise
from cb_rollout.engine.numerics.agreement import rounding_noise
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.engine.numerics.redrawn_rounding import redrawn_rounding

IDS = torch.tensor([[3, 9, 27, 5]])


def looked_up(weight, seed, dtype):
    with torch.no_grad(), redrawn_rounding(dtype, seed):
        return functional.embedding(IDS, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_move_by_a_unit_in_the_last_place(dtype):
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    own = weight[IDS]
    moved = looked_up(weight, 1, dtype)
    assert moved.dtype == dtype
    assert 0.2 < (moved != own).double().mean() < 1
    distance = (moved.double() - own.double()).abs()
    # A unit before it is rounded to this dtype again.
    assert (distance <= 2 * torch.finfo(dtype).eps * own.double().abs()).all()


def test_float32_embeddings_move_by_the_unit_of_the_products_under_autocast():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    moved = looked_up(weight, 1, torch.bfloat16)
    assert (moved.bfloat16() != weight[IDS].bfloat16()).double().mean() > 0.2


def test_a_seed_gives_the_same_bits_again_and_another_seed_others():
    weight = torch.randn(32, 64)
    state = torch.get_rng_state()
    first, again, other = (looked_up(weight, seed, torch.float32) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
def test_each_draw_of_a_model_has_the_size_of_its_rounding():
    model = tiny_model("llama").eval()
    exact = tiny_model("llama").double().eval()(IDS).logits
    own = model(IDS).logits
    noise = (own - exact).square().mean().sqrt()
    for seed in range(4):
        with redrawn_rounding(torch.float32, seed):
            drawn = model(IDS).logits
        assert not torch.equal(drawn, own)
        assert noise / 4 < (drawn - exact).square().mean().sqrt() < 4 * noise
    assert torch.equal(model(IDS).logits, own)


def test_a_forward_that_is_exact_by_chance_has_the_noise_of_its_redrawn_forwards():
    # Whole numbers, whose products and sums float32 holds without rounding.
    generator = torch.Generator().manual_seed(0)
    embeddings, head = torch.randint(-8, 9, (2, 32, 64), generator=generator).float()

    def run():
        return functional.embedding(IDS[0], embeddings) @ head.T

    by_chance = rounding_noise(run(), run().double(), torch.float32)
    noise = trial_noise(run, torch.float32, higher_precision)
    assert (noise > 1.3 * by_chance).all()
