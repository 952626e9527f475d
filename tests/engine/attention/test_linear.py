"""Linear layers by the C++ kernels against torch's, over random shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from cb_rollout.compat import inductor
from cb_rollout.engine.attention.cpu import linear as linear_module
from cb_rollout.engine.attention.cpu.linear import (
    FEW_ROWS,
    MOST_ROWS,
    has_kernel,
    linear,
    replacing_linear,
)
from cb_rollout.engine.numerics import kernels, operators
from cb_rollout.engine.numerics.kernels import TYPES, multiply, multiply_many

# Rounding of sums of a few hundred numbers of order one.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-13, torch.bfloat16: 2**-8}

dtypes = pytest.mark.parametrize("dtype", TYPES)
shapes = given(
    num_rows=st.integers(1, 70),
    size=st.integers(1, 130),
    seed=st.integers(0, 10_000),
    is_strided=st.booleans(),
)
some = settings(max_examples=20, deadline=None)


def numbers(*shape, dtype, is_strided=False):
    """Return random numbers; strided ones are in another order, with gaps."""
    if is_strided:
        backwards = torch.randn(*reversed(shape), 2, dtype=dtype)[..., 0]
        return backwards.permute(*reversed(range(len(shape))))
    return torch.randn(*shape, dtype=dtype)


def check(got, rows, weight, bias=None):
    """A linear layer, summed in float32 at least and rounded once."""
    tolerance = TOLERANCES[got.dtype]
    doubles = [None if given is None else given.double() for given in (rows, weight, bias)]
    expected = functional.linear(*doubles)
    torch.testing.assert_close(got.double(), expected, atol=min(tolerance, 2e-5), rtol=tolerance)


@pytest.mark.fast_cases("dtype2")
@dtypes
@some
@shapes
def test_a_product_is_a_linear_layer(dtype, num_rows, size, seed, is_strided):
    torch.manual_seed(seed)
    rows = numbers(num_rows, size, dtype=dtype, is_strided=is_strided)
    weight = numbers(seed % 23 + 1, size, dtype=dtype)
    bias = numbers(seed % 23 + 1, dtype=dtype, is_strided=is_strided)
    check(multiply(rows, weight), rows, weight)
    check(multiply(rows, weight, bias), rows, weight, bias)


@dtypes
@pytest.mark.parametrize("num_rows", [FEW_ROWS, FEW_ROWS + 1])
def test_a_large_product_is_a_linear_layer(dtype, num_rows):
    rows, weight = numbers(num_rows, 300, dtype=dtype), numbers(401, 300, dtype=dtype)
    bias = numbers(1, dtype=dtype).expand(401)
    check(linear(rows, [weight], [bias]), rows, weight, bias)


@dtypes
@some
@given(
    num_rows=st.integers(1, 150),
    size=st.integers(1, 130),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    seed=st.integers(0, 10_000),
    is_strided=st.booleans(),
)
def test_a_product_of_many_rows_is_each_of_its_layers(
    dtype, num_rows, size, sizes, seed, is_strided
):
    torch.manual_seed(seed)
    rows = numbers(num_rows, size, dtype=dtype, is_strided=is_strided)
    weights = [numbers(count, size, dtype=dtype) for count in sizes]
    biases = [numbers(count, dtype=dtype, is_strided=is_strided) for count in sizes]
    for given_biases in ([], biases):
        outputs = multiply_many(rows, weights, given_biases).split(sizes, dim=1)
        passed = given_biases or [None] * len(sizes)
        for got, weight, bias in zip(outputs, weights, passed, strict=True):
            check(got, rows, weight, bias)


@dtypes
def test_many_rows_are_summed_in_one_order(dtype):
    rows, weight = numbers(101, 75, dtype=dtype), numbers(61, 75, dtype=dtype)
    # Sums that nearly cancel have bits that tell one order from another, also in bfloat16.
    rows[:, 36:72] = rows[:, :36]
    weight[:, 36:72] = -weight[:, :36]
    outputs = multiply_many(rows, [weight])
    for count in (1, 16, 17, 40, 64, 100):
        assert torch.equal(multiply_many(rows[:count], [weight]), outputs[:count])


@pytest.mark.parametrize("size", [64, 75])
def test_weights_are_rounded_as_torch_rounds_them(size):
    rows, weight = numbers(20, size, dtype=torch.bfloat16), numbers(50, size, dtype=torch.float32)
    weight[0, 0] = float("nan")
    # Halfway between two numbers of bfloat16.
    weight[1] = 1 + 2.0**-8
    weight[2] = 1 + 3 * 2.0**-8
    found = multiply_many(rows, [weight])
    expected = multiply_many(rows, [weight.bfloat16()])
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_each_number_of_rows_takes_its_kernel(dtype, has_bfloat16, monkeypatch):
    monkeypatch.setattr(linear_module, "multiplies_bfloat16", lambda: has_bfloat16)
    taken = []
    for name in ("multiply", "multiply_many", "_multiply_by_torch"):
        function = getattr(linear_module, name)

        def recorded(*given, name=name, function=function):
            taken.append(name)
            return function(*given)

        monkeypatch.setattr(linear_module, name, recorded)
    weight = numbers(30, 20, dtype=dtype)
    for num_rows in (FEW_ROWS, FEW_ROWS + 1, MOST_ROWS, MOST_ROWS + 1):
        rows = numbers(num_rows, 20, dtype=dtype)
        check(linear(rows, [weight]), rows, weight)
    assert taken == ["multiply", "multiply_many", "multiply_many", "_multiply_by_torch"]


def compute(layer, rows, dtype=None):
    """A layer's own forward, inside of which `linear` computes the product."""
    with replacing_linear(dtype or layer.weight.dtype), torch.no_grad():
        return layer(rows)


@pytest.mark.parametrize("num_rows", [2, 9, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_weight_is_read_at_once(dtype, num_rows):
    layer, rows = torch.nn.Linear(20, 7, dtype=dtype), torch.randn(num_rows, 20, dtype=dtype)
    check(compute(layer, rows), rows, layer.weight, layer.bias)
    layer.weight.data.mul_(2)
    check(compute(layer, rows), rows, layer.weight, layer.bias)
    layer.weight = torch.nn.Parameter(torch.randn(7, 20, dtype=dtype))
    check(compute(layer, rows), rows, layer.weight, layer.bias)


@pytest.mark.parametrize("num_rows", [2, 9])
def test_weights_in_another_order_are_left_to_torch(num_rows, monkeypatch):
    monkeypatch.setattr(linear_module, "multiply", None)
    monkeypatch.setattr(linear_module, "multiply_many", None)
    rows, transposed = torch.randn(num_rows, 20), torch.randn(20, 5).t()
    check(linear(rows, [transposed]), rows, transposed)


@pytest.mark.parametrize("num_rows", [2, 9, 200])
def test_layers_of_the_same_rows_are_one_product(num_rows, monkeypatch):
    calls = []
    monkeypatch.setattr(
        linear_module, "multiply_many", lambda *a: calls.append(a) or multiply_many(*a)
    )
    rows = torch.randn(num_rows, 20)
    layers = [torch.nn.Linear(20, size) for size in (7, 3, 12)]
    joined = linear(rows, [x.weight for x in layers], [x.bias for x in layers])
    for layer, got in zip(layers, joined.split((7, 3, 12), dim=1), strict=True):
        check(got, rows, layer.weight, layer.bias)
    assert len(calls) == (num_rows == 9)


@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("num_rows", [2, 9])
def test_layers_need_no_compiler(monkeypatch, has_compiler, num_rows):
    layer, rows, seen = torch.nn.Linear(20, 7), torch.randn(num_rows, 20), []
    for name in ("multiply", "multiply_many"):
        function = getattr(linear_module, name)
        monkeypatch.setattr(
            linear_module, name, lambda *a, function=function: seen.append(a) or function(*a)
        )
    if not has_compiler:
        monkeypatch.setattr(inductor, "compiler_obstacle", lambda: "none")
        has_kernel.cache_clear()
    check(compute(layer, rows), rows, layer.weight, layer.bias)
    has_kernel.cache_clear()
    assert bool(seen) == has_compiler


@pytest.mark.parametrize("num_rows", [2, 9, 200])
@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_layers_under_autocast_round_their_weights(num_rows, has_bfloat16, monkeypatch):
    monkeypatch.setattr(linear_module, "multiplies_bfloat16", lambda: has_bfloat16)
    layer, rows = torch.nn.Linear(20, 7), torch.randn(num_rows, 20)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = compute(layer, rows, torch.bfloat16)
    assert outputs.dtype == torch.bfloat16
    check(outputs, *(given.bfloat16() for given in (rows, layer.weight, layer.bias)))


@pytest.mark.parametrize("num_rows", [2, 9, 200])
@pytest.mark.parametrize("weight_shape", [(12, 24), (12, 15), (16,), (3, 12, 16)])
def test_a_weight_that_does_not_fit_is_left_to_torch(num_rows, weight_shape):
    rows, weight = torch.randn(num_rows, 16), torch.randn(weight_shape)

    def answer():
        try:
            return functional.linear(rows, weight)
        except RuntimeError as error:
            return str(error)

    expected = answer()
    with replacing_linear(rows.dtype):
        found = answer()
    assert found == expected if isinstance(expected, str) else torch.equal(found, expected)


@pytest.mark.parametrize("case", ["rounded weights", "a strided bias"])
def test_bitwise_products_do_not_depend_on_the_number_of_rows(case):
    torch.manual_seed(0)
    rows, weight = numbers(200, 600, dtype=torch.float32), numbers(100, 600, dtype=torch.float32)
    biases = []
    if case == "rounded weights":
        rows = rows.bfloat16()
    else:
        biases = [numbers(100, dtype=torch.float32, is_strided=True)]
    with operators.installed():
        together = linear(rows, [weight], biases)
        for count in (2, 9, 100):
            assert torch.equal(linear(rows[:count], [weight], biases), together[:count])


@pytest.mark.parametrize("num_rows", [2, 9, 200])
def test_autocast_leaves_float64_alone(num_rows):
    rows, weight = torch.randn(num_rows, 20).double(), torch.randn(7, 20).double()
    with torch.autocast("cpu", torch.bfloat16), replacing_linear(torch.bfloat16):
        outputs = functional.linear(rows, weight)
    assert torch.equal(outputs, rows @ weight.t())


def test_a_call_with_another_bias_gets_that_one():
    layer, rows, bias = torch.nn.Linear(20, 3), torch.randn(9, 20), torch.randn(3)
    with replacing_linear(rows.dtype), torch.no_grad():
        check(functional.linear(rows, layer.weight, bias), rows, layer.weight, bias)


def test_layers_of_other_dtypes_are_left_to_torch():
    layer, rows = torch.nn.Linear(20, 7), torch.randn(9, 20)
    expected = layer(rows)
    for dtype in (torch.bfloat16, torch.float64):
        with replacing_linear(dtype):
            assert torch.equal(layer(rows), expected)


@dtypes
def test_nan_stays_nan(dtype):
    row = torch.tensor([[1.0, float("nan")]], dtype=dtype)
    assert multiply(row, row).isnan().all()
    assert multiply_many(row, [row]).isnan().all()


@dtypes
@pytest.mark.parametrize("num_rows", [2, 9])
def test_a_kernel_that_cannot_be_compiled_stops_no_engine(dtype, num_rows, monkeypatch):
    def fails(*_, **__):
        raise OSError("no room for a library")

    monkeypatch.setattr(kernels.inductor, "compile_library", fails)
    kernels.kernel.cache_clear()
    has_kernel.cache_clear()
    assert not has_kernel(dtype)
    rows, weight = numbers(num_rows, 20, dtype=dtype), numbers(7, 20, dtype=dtype)
    check(linear(rows, [weight]), rows, weight)
    has_kernel.cache_clear()
