"""The state of a training model changes with what it computes."""

import pytest
import torch

from cb_rollout.weights.state import model_state


def rows_reversed(weight):
    return weight.flip(0)


def columns_reversed(weight):
    return weight.flip(1)


def rows_rolled(weight):
    return weight.roll(1, 0)


def two_numbers_swapped(weight):
    swapped = weight.clone()
    swapped[0, 0], swapped[-1, -1] = weight[-1, -1], weight[0, 0]
    return swapped


def signs_changed(weight):
    return -weight


WRITES = [rows_reversed, columns_reversed, rows_rolled, two_numbers_swapped, signs_changed]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(3, 5), (64, 64), (96, 1022)])
def test_a_write_through_data_that_only_reorders_a_weight_is_seen(
    write, dtype, num_outputs, num_inputs
):
    layer = torch.nn.Linear(num_inputs, num_outputs, dtype=dtype)
    before = model_state(layer)
    assert model_state(layer) == before
    layer.weight.data.copy_(write(layer.weight.data.clone()))
    assert model_state(layer) != before


def test_a_sign_that_changes_in_a_complex_weight_is_seen():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
    before = model_state(module)
    module.weight.data.imag.neg_()
    assert model_state(module) != before


def test_the_state_of_a_transposed_and_an_empty_weight_can_be_read():
    module = torch.nn.Module()
    module.transposed = torch.nn.Parameter(torch.randn(40, 60).T)
    module.empty = torch.nn.Parameter(torch.empty(0, 4))
    module.scalar = torch.nn.Parameter(torch.tensor(1.0))
    before = model_state(module)
    module.transposed.data.copy_(module.transposed.data.flip(0))
    assert model_state(module) != before
