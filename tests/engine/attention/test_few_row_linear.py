"""The C++ kernel of few-row linear layers against torch's linear layer, over random shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from cb_rollout.compat import inductor
from cb_rollout.engine.attention.cpu import few_row_linear
from cb_rollout.engine.attention.cpu.few_row_linear import widened
from cb_rollout.engine.numerics import kernels
from cb_rollout.engine.numerics.native.library import TYPES

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


@dtypes
@some
@shapes
def test_a_product_is_a_linear_layer(dtype, num_rows, size, seed, is_strided):
    torch.manual_seed(seed)
    rows = numbers(num_rows, size, dtype=dtype, is_strided=is_strided)
    weight = numbers(seed % 23 + 1, size, dtype=dtype)
    bias = numbers(seed % 23 + 1, dtype=dtype, is_strided=is_strided)
    check(few_row_linear.multiply(rows, weight), rows, weight)
    check(few_row_linear.multiply(rows, weight, bias), rows, weight, bias)


@dtypes
def test_a_product_of_many_numbers_is_one_too(dtype):
    rows, weight = numbers(7, 300, dtype=dtype), numbers(401, 300, dtype=dtype)
    bias = numbers(1, dtype=dtype).expand(401)
    check(few_row_linear.linear(rows, weight, bias), rows, weight, bias)


def test_many_rows_and_transposed_weights_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(few_row_linear, "multiply", None)
    many, weight = torch.randn(few_row_linear.MAX_ROWS + 1, 8), torch.randn(5, 8)
    check(few_row_linear.linear(many, weight), many, weight)
    transposed = torch.randn(8, 5).t()
    check(few_row_linear.linear(many[:2], transposed), many[:2], transposed)


@pytest.fixture
def no_bfloat16(monkeypatch):
    monkeypatch.setattr(few_row_linear, "multiplies_bfloat16", lambda: False)


@pytest.mark.parametrize("num_rows", [2, few_row_linear.MAX_ROWS + 1])
@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_cpu_without_bfloat16_runs_a_models_layers_in_float32(
    no_bfloat16, monkeypatch, num_rows, has_compiler
):
    monkeypatch.setattr(few_row_linear, "WIDENED_AT_ONCE", 40)
    if not has_compiler:
        monkeypatch.setattr(inductor, "compiler_obstacle", lambda: "none")
        monkeypatch.setattr(few_row_linear, "multiply", None)
    layer = torch.nn.Linear(20, 7, dtype=torch.bfloat16)
    rows = torch.randn(num_rows, 1, 20, dtype=torch.bfloat16)
    seen = []
    monkeypatch.setattr(few_row_linear, "widened", lambda *a: seen.append(a) or widened(*a))
    with few_row_linear.replacing_linear(torch.bfloat16, torch.device("cpu")), torch.no_grad():
        outputs = layer(rows)
    assert bool(seen) == (num_rows > few_row_linear.MAX_ROWS or not has_compiler)
    check(outputs[:, 0], rows[:, 0], layer.weight, layer.bias)


def test_layers_under_autocast_round_their_weights_first(no_bfloat16):
    layer, rows = torch.nn.Linear(20, 7), torch.randn(2, 20)
    replaced = few_row_linear.replacing_linear(torch.bfloat16, torch.device("cpu"))
    with replaced, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        outputs = layer(rows)
    check(outputs, *(given.bfloat16() for given in (rows, layer.weight, layer.bias)))


def test_layers_of_other_dtypes_are_left_to_torch(no_bfloat16):
    layer, rows = torch.nn.Linear(20, 7), torch.randn(2, 20)
    expected = layer(rows)
    with few_row_linear.replacing_linear(torch.bfloat16, torch.device("cpu")):
        assert torch.equal(layer(rows), expected)
    for dtype, kind in ((torch.float32, "cpu"), (torch.bfloat16, "cuda")):
        assert not few_row_linear.replacing_linear(dtype, torch.device(kind)).__enter__()


@dtypes
def test_nan_stays_nan(dtype):
    row = torch.tensor([[1.0, float("nan")]], dtype=dtype)
    assert few_row_linear.multiply(row, row).isnan().all()


@dtypes
def test_a_kernel_that_cannot_be_compiled_stops_no_engine(dtype, monkeypatch):
    def fails(*_, **__):
        raise OSError("no room for a library")

    monkeypatch.setattr(kernels, "library", fails)
    kernels.ordered_kernel.cache_clear()
    few_row_linear.prepare(dtype)
    with pytest.raises(OSError, match="no room"):
        few_row_linear.multiply(torch.ones(1, 2, dtype=dtype), torch.ones(3, 2, dtype=dtype))
