"""The C++ kernels of layers against torch's operators, over random shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from cb_rollout.engine.attention import cpp_layers
from cb_rollout.engine.attention.choice import CPU_DTYPES

TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-13}
# Rounding of sums of a few hundred numbers of order one.

dtypes = pytest.mark.parametrize("dtype", CPU_DTYPES)
shapes = given(
    num_rows=st.integers(1, 70),
    size=st.integers(1, 130),
    seed=st.integers(0, 10_000),
    is_strided=st.booleans(),
)
some = settings(max_examples=20, deadline=None)


def numbers(*shape, dtype, is_strided=False):
    """Random ones; strided, they lie in another order, with others between them."""
    if is_strided:
        backwards = torch.randn(*reversed(shape), 2, dtype=dtype)[..., 0]
        return backwards.permute(*reversed(range(len(shape))))
    return torch.randn(*shape, dtype=dtype)


def check(got, expected):
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@dtypes
@some
@shapes
def test_a_product_is_a_linear_layer(dtype, num_rows, size, seed, is_strided):
    torch.manual_seed(seed)
    rows = numbers(num_rows, size, dtype=dtype, is_strided=is_strided)
    weight = numbers(seed % 23 + 1, size, dtype=dtype)
    bias = numbers(seed % 23 + 1, dtype=dtype, is_strided=is_strided)
    check(cpp_layers.multiply(rows, weight), functional.linear(rows, weight))
    check(cpp_layers.multiply(rows, weight, bias), functional.linear(rows, weight, bias))


@dtypes
def test_a_product_of_many_numbers_is_one_too(dtype):
    rows, weight = numbers(7, 300, dtype=dtype), numbers(401, 300, dtype=dtype)
    bias = numbers(1, dtype=dtype).expand(401)
    check(cpp_layers.product(rows, weight, bias), functional.linear(rows, weight, bias))


def test_what_the_kernel_is_not_for_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(cpp_layers, "multiply", None)
    many, weight = torch.randn(cpp_layers.MOST_ROWS + 1, 8), torch.randn(5, 8)
    check(cpp_layers.product(many, weight), functional.linear(many, weight))
    transposed = torch.randn(8, 5).t()
    check(cpp_layers.product(many[:2], transposed), functional.linear(many[:2], transposed))


@dtypes
@some
@shapes
def test_a_norm_is_what_models_compute(dtype, num_rows, size, seed, is_strided):
    torch.manual_seed(seed)
    rows = numbers(num_rows, 2, size, dtype=dtype, is_strided=is_strided)
    weight = numbers(size, dtype=dtype, is_strided=is_strided)
    expected = weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 0.5))
    check(cpp_layers.norm(rows, weight, 0.5), expected)


@dtypes
@some
@shapes
def test_heads_are_rotated_as_models_do(dtype, num_rows, size, seed, is_strided):
    torch.manual_seed(seed)
    heads = numbers(num_rows, 1, 3, 2 * size, dtype=dtype, is_strided=is_strided).transpose(1, 2)
    cosines, sines = (
        numbers(num_rows, 1, 1, 2 * size, dtype=dtype, is_strided=is_strided) for _ in range(2)
    )
    turned = torch.cat([-heads[..., size:], heads[..., :size]], -1)
    check(cpp_layers.rotate(heads, cosines, sines), heads * cosines + turned * sines)


@dtypes
@some
@shapes
def test_a_gate_is_silu_times_values(dtype, num_rows, size, seed, is_strided):
    torch.manual_seed(seed)
    gates = 20 * numbers(num_rows, size, dtype=dtype)
    values = numbers(num_rows, size, dtype=dtype, is_strided=is_strided)
    check(cpp_layers.gate(gates, values), functional.silu(gates) * values)
    check(cpp_layers.gate(values, gates), functional.silu(values) * gates)


def test_a_gate_of_many_numbers_is_one_too():
    gates, values = torch.randn(2, 40, 1003).unbind()
    check(cpp_layers.gate(gates, values), functional.silu(gates) * values)


@dtypes
def test_what_is_no_number_stays_none(dtype):
    odd = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), -1e4, 1e4], dtype=dtype)
    ones = torch.ones_like(odd)
    torch.testing.assert_close(cpp_layers.gate(odd, ones), functional.silu(odd), equal_nan=True)
    row = odd[None, :2].contiguous()
    assert cpp_layers.norm(row, ones[:2], 1e-6).isnan().all()
    assert cpp_layers.multiply(row, row).isnan().all()


@dtypes
def test_a_kernel_that_cannot_be_compiled_stops_no_engine(dtype, monkeypatch):
    def fails(*_, **__):
        raise OSError("no room for a library")

    monkeypatch.setattr(cpp_layers, "layers_library", fails)
    cpp_layers._kernel.cache_clear()
    cpp_layers.prepare(dtype)
    with pytest.raises(OSError, match="no room"):
        cpp_layers.multiply(torch.ones(1, 2, dtype=dtype), torch.ones(3, 2, dtype=dtype))
