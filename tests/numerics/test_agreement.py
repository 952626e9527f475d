import math
from functools import partial

import pytest
import torch
from pretend_device import Pretended, pretend_device

from cb_rollout.engine.numerics import agreement as agreements
from cb_rollout.engine.numerics.agreement import (
    Agreement,
    agrees,
    computed_in,
    is_measurable,
    references,
    rounding_noise,
)
from cb_rollout.errors import ConfigurationError

P, V = 6, 500


def values(seed=0):
    return torch.randn(P, V, generator=torch.Generator().manual_seed(seed)).mul(3).log_softmax(-1)


def rounded(exact, seed, size=1e-6):
    generator = torch.Generator().manual_seed(seed)
    return exact + size * torch.randn(exact.shape, generator=generator)


def test_two_roundings_of_the_same_values_agree_and_a_shift_does_not():
    exact = values()
    expected = rounded(exact, 1)
    noise = rounding_noise(expected, exact, torch.float32)
    agreement = agrees(rounded(exact, 2), expected, noise)
    assert agreement
    assert agreement.root_mean_square == pytest.approx(math.sqrt(2) * 1e-6, rel=0.1)
    shifted = agrees(expected + 1e-3, expected, noise)
    assert not shifted
    assert "beyond the model's own rounding" in str(shifted)


def test_one_wrong_position_is_enough():
    exact = values()
    noise = rounding_noise(rounded(exact, 1), exact, torch.float32)
    found = rounded(exact, 2)
    found[3] += 1e-3
    agreement = agrees(found, rounded(exact, 1), noise)
    assert not agreement
    assert agreement.typical_multiple < 2


def test_a_chaotic_position_is_held_against_its_own_noise():
    exact = values()
    expected, found = rounded(exact, 1), rounded(exact, 2)
    expected[2] = rounded(exact, 3, 1e-3)[2]
    assert not agrees(found, expected, rounding_noise(rounded(exact, 1), exact, torch.float32))
    assert agrees(found, expected, rounding_noise(expected, exact, torch.float32))


def test_noise_beyond_half_of_the_digits_excuses_nothing():
    exact = values()
    noise = rounding_noise(exact + torch.randn(P, V), exact, torch.float32)
    assert noise.max() < 0.01


def test_a_value_that_is_no_number_agrees_with_nothing():
    exact = values()
    found = exact.clone()
    found[0, 0] = math.nan
    assert not agrees(found, exact, rounding_noise(exact, None, torch.bfloat16))


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min, -65504.0])
def test_excluded_tokens_are_equal_and_no_noise(lowest):
    exact = values()
    exact[:, 7] = lowest
    other = exact.double()
    other[:, 7] = torch.finfo(torch.float64).min
    noise = rounding_noise(exact, other, torch.float32)
    assert agrees(rounded(exact, 1, 1e-7), exact, noise)
    assert not agrees(exact + 1e-2, exact, noise)


@pytest.mark.parametrize("mistake", [TypeError, NameError, UnboundLocalError])
def test_a_mistake_in_code_is_no_refusal_of_a_precision(mistake):
    def compute(error):
        raise error("'nothing' is not defined")

    with pytest.raises(mistake, match="nothing"):
        computed_in(torch.float64, partial(compute, mistake))
    refusals = (NotImplementedError, torch.OutOfMemoryError, ConfigurationError)
    assert [computed_in(torch.float64, partial(compute, own)) for own in refusals] == [None] * 3


def test_16_bits_are_compared_in_float32_first():
    layer = torch.nn.Linear(64, 500).bfloat16()
    rows = torch.randn(P, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    @torch.no_grad()
    def plain():
        return layer(rows).float().log_softmax(-1)

    @torch.no_grad()
    def leaking():
        return layer(rows + 1e-3 * rows.roll(1, 0)).float().log_softmax(-1)

    surest, own = references(plain, torch.bfloat16, is_coarse=True)
    assert (surest.dtype, own.dtype) == (torch.float32, torch.bfloat16)
    from cb_rollout.engine.numerics.higher_precision import higher_precision

    assert surest.compare(plain, higher_precision)
    assert own.compare(leaking, higher_precision), "in 16 bits it is within the rounding"
    assert not surest.compare(leaking, higher_precision)


def test_an_agreement_is_worded_truly_where_the_distance_is_above_the_rounding():
    found = Agreement(
        largest=2.1e-05,
        root_mean_square=7.6e-06,
        noise=3.1e-06,
        typical_multiple=2.4,
        largest_multiple=6.8,
    )
    assert str(found).endswith("within 4 times the model's own rounding of 3.1e-06")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a pretended device has any capability")
@pytest.mark.parametrize(
    ("capability", "is_fast"),
    [
        ((8, 0), True),
        ((9, 0), True),
        ((10, 0), True),
        ((8, 6), False),
        ((8, 9), False),
        ((10, 3), False),
        ((12, 0), False),
    ],
)
def test_a_long_forward_in_float64_is_for_cards_with_units_for_it(capability, is_fast, monkeypatch):
    pytest.importorskip("triton")
    pretend_device(monkeypatch, capability)
    with Pretended():
        model = torch.nn.Linear(10, 10, device="cuda:0")
        num_tokens = int(agreements.MAX_SLOW_GPU_PRODUCTS) // 110
        assert is_measurable(model, num_tokens)
        assert is_measurable(model, num_tokens + 1) is is_fast
