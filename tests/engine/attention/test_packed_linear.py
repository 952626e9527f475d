"""Linear layers of packed weights, and of few rows, against torch's, over random shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from cb_rollout.compat import inductor
from cb_rollout.engine.attention.cpu import packed_linear
from cb_rollout.engine.attention.cpu.packed_linear import PackedLinear
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.numerics import kernels
from cb_rollout.engine.numerics.kernels import TYPES

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
    check(packed_linear.multiply(rows, weight), rows, weight)
    check(packed_linear.multiply(rows, weight, bias), rows, weight, bias)


@dtypes
@pytest.mark.parametrize("num_rows", [packed_linear.FEW_ROWS, packed_linear.FEW_ROWS + 1])
def test_a_product_of_many_numbers_is_one_too(dtype, num_rows):
    rows, weight = numbers(num_rows, 300, dtype=dtype), numbers(401, 300, dtype=dtype)
    bias = numbers(1, dtype=dtype).expand(401)
    check(packed_linear.linear(rows, [weight], [bias]), rows, weight, bias)


packable = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

# Torch packs no weights in bfloat16 on a CPU without AVX-512.
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU packs no bfloat16"
)
bfloat16_or_float32 = pytest.mark.parametrize(
    "has_bfloat16", [pytest.param(True, marks=needs_bfloat16), False]
)


def packed(layer):
    return PackedLinear(torch.nn.Sequential(layer), is_enabled=True)


def compute(weights, layer, rows):
    """A layer's own forward, inside of which products take packed weights."""
    with weights.replacing_linear(layer.weight.dtype), torch.no_grad():
        return layer(rows)


@packable
@bfloat16_or_float32
@some
@shapes
def test_a_packed_product_is_a_linear_layer(dtype, has_bfloat16, num_rows, size, seed, is_strided):
    torch.manual_seed(seed)
    layer = torch.nn.Linear(size, seed % 23 + 1, bias=seed % 2 == 0, dtype=dtype)
    rows = numbers(num_rows, size, dtype=dtype, is_strided=is_strided)
    weights = packed(layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_linear, "FEW_ROWS", 0)
        patch.setattr(packed_linear, "multiplies_bfloat16", lambda: has_bfloat16)
        outputs = compute(weights, layer, rows)
        assert list(weights._packed) == [(id(layer.weight), dtype)]
        held = torch.float32 if dtype == torch.float32 or not has_bfloat16 else torch.bfloat16
        assert weights.plan(1 << 30, dtype) == layer.weight.numel() * held.itemsize
    check(outputs.detach(), rows, layer.weight, layer.bias)


def test_any_number_of_rows_leaves_few_programs(monkeypatch):
    layer, seen = torch.nn.Linear(20, 7), set()
    weights, multiply = packed(layer), torch.ops.mkldnn._linear_pointwise

    def product(rows, *arguments):
        seen.add(rows.shape[0])
        return multiply(rows, *arguments)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    for num_rows in range(1, packed_linear.MOST_ROWS + 50):
        rows = torch.randn(num_rows, 20)
        check(compute(weights, layer, rows), rows, layer.weight, layer.bias)
    assert len(seen) == 16
    assert max(seen) == packed_linear.MOST_ROWS


class Layers(torch.nn.Module):
    """Three layers of the same inputs, one of which may be given other inputs in between."""

    def __init__(self, dtype, bias):
        super().__init__()
        sizes = 7, 3, 12
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(20, size, bias=bias, dtype=dtype) for size in sizes
        )

    def forward(self, rows, between=lambda rows, outputs: rows):
        outputs = []
        for layer in self.layers:
            outputs.append(layer(rows))
            rows = between(rows, outputs)
        return outputs

    def join(self, weights, rows):
        parameters = [[layer.weight for layer in self.layers]]
        if self.layers[0].bias is not None:
            parameters.append([layer.bias for layer in self.layers])
        with weights.active(), torch.no_grad():
            return packed_linear.linear(rows, *parameters)


def run_layers(model, weights, rows, dtype=None, **arguments):
    with weights.replacing_linear(dtype or rows.dtype), torch.no_grad():
        return model(rows, **arguments)


@packable
@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_the_same_rows_are_packed_as_one(dtype, bias, monkeypatch):
    model, rows = Layers(dtype, bias), torch.randn(9, 20, dtype=dtype)
    weights = PackedLinear(model, is_enabled=True)
    run_layers(model, weights, rows)
    assert len(weights._packed) == 3
    joined = model.join(weights, rows)
    # No weight is held twice, and the model's own forward takes the joined ones.
    assert len(weights._packed) == 1
    seen, product = [], torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda *a: seen.append(a[0]) or product(*a)
    )
    for num_rows in (9, 3):
        outputs = run_layers(model, weights, rows[:num_rows].view(1, num_rows, 20))
        for layer, got in zip(model.layers, outputs, strict=True):
            check(got[0], rows[:num_rows], layer.weight, layer.bias)
    assert len(seen) == 1
    assert torch.equal(torch.cat(run_layers(model, weights, rows), 1), joined)
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.mul_(2)
    weights.forget()
    for layer, got in zip(model.layers, run_layers(model, weights, rows), strict=True):
        check(got, rows, layer.weight, layer.bias)
    assert len(weights._packed) == 1


def test_a_layer_that_cannot_be_packed_leaves_the_others_packed():
    model, rows, router = Layers(torch.float32, False), torch.randn(9, 20), torch.randn(5, 20)
    weights = PackedLinear(model, is_enabled=True)
    given = [model.layers[0].weight, router, model.layers[1].weight]
    with weights.active(), torch.no_grad():
        outputs = packed_linear.linear(rows, given)
    check(outputs, rows, torch.cat(given).detach())
    assert [key[0] for key in weights._packed] == [id(given[0]), id(given[2])]


def test_joined_layers_of_other_inputs_are_computed_again():
    model, rows = Layers(torch.float32, True), torch.randn(9, 20)
    weights = PackedLinear(model, is_enabled=True)
    model.join(weights, rows)
    first, second, third = model.layers

    def other(rows, outputs):
        return rows * 2

    def written(rows, outputs):
        return rows.mul_(2)

    for between in (other, written):
        given, expected = rows.clone(), rows
        for layer, got in zip(
            model.layers, run_layers(model, weights, given, between=between), strict=True
        ):
            check(got, expected, layer.weight, layer.bias)
            expected = expected * 2

    def run(*layers):
        with weights.replacing_linear(rows.dtype), torch.no_grad():
            return [layer(rows) for layer in layers]

    # A layer that is called twice gives tensors that its caller may write to.
    once, twice = run(second, second)
    once.zero_()
    check(twice, rows, second.weight, second.bias)
    # A call with a bias that is not the layer's gets that one.
    bias = torch.randn(3)
    with weights.replacing_linear(rows.dtype), torch.no_grad():
        check(functional.linear(rows, second.weight, bias), rows, second.weight, bias)
    # A weight that is gone leaves its layers alone.
    model.layers[1] = torch.nn.Linear(20, 3)
    weights.forget()
    for layer, got in zip((first, third), run(first, third), strict=True):
        check(got, rows, layer.weight, layer.bias)
    assert len(weights._packed) == 2


@packable
def test_weights_that_changed_are_packed_again(dtype):
    layer, rows = torch.nn.Linear(20, 7, dtype=dtype), torch.randn(9, 20, dtype=dtype)
    weights = packed(layer)
    first = compute(weights, layer, rows)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(compute(weights, layer, rows), first)
    weights.forget()
    check(compute(weights, layer, rows), rows, layer.weight, layer.bias)


def test_other_weights_are_taken_as_they_are(monkeypatch):
    monkeypatch.setattr(packed_linear, "multiply", None)
    layer, rows = torch.nn.Linear(20, 7), torch.randn(9, 20)
    weights, other = packed(layer), torch.randn(5, 20)
    with weights.active():
        check(packed_linear.linear(rows, [other]), rows, other)
        transposed = torch.randn(20, 5).t()
        check(packed_linear.linear(rows[:2], [transposed]), rows[:2], transposed)
    assert not weights._packed


class FreshWeight(torch.nn.Linear):
    """Shows a new tensor at each access, as a layer does that is split over processes."""

    @property
    def weight(self):
        return torch.zeros(7, 20)


def test_a_weight_that_lives_shortly_lends_its_id_to_no_other():
    layer, rows = torch.nn.Linear(20, 7), torch.randn(9, 20)
    layer.__class__ = FreshWeight
    weights = packed(layer)
    with weights.active():
        for _ in range(20):
            weight = torch.randn(7, 20)
            check(packed_linear.linear(rows, [weight]), rows, weight)


def test_weights_that_do_not_fit_are_not_packed(monkeypatch):
    layer, rows = torch.nn.Linear(20, 7), torch.randn(9, 20)
    bytes_needed = devices.FREE_PER_COPY * layer.weight.nbytes
    for free, is_packed in ((bytes_needed - 1, False), (bytes_needed, True)):
        found = devices.DeviceMemory(1 << 30, free)
        monkeypatch.setattr(devices, "memory", lambda _, found=found: found)
        weights = packed(layer)
        check(compute(weights, layer, rows), rows, layer.weight, layer.bias)
        assert bool(weights._packed) == is_packed
        assert weights.plan(free, rows.dtype) == is_packed * layer.weight.nbytes
    assert not weights.plan(bytes_needed - 1, rows.dtype)
    check(compute(weights, layer, rows), rows, layer.weight, layer.bias)
    assert not weights._packed


@pytest.mark.parametrize("has_compiler", [True, False])
def test_few_rows_need_no_compiler(monkeypatch, has_compiler):
    layer, rows, seen = torch.nn.Linear(20, 7), torch.randn(2, 20), []
    kernel = packed_linear.multiply
    monkeypatch.setattr(packed_linear, "multiply", lambda *a: seen.append(a) or kernel(*a))
    if not has_compiler:
        monkeypatch.setattr(inductor, "compiler_obstacle", lambda: "none")
        packed_linear.has_kernel.cache_clear()
    check(compute(packed(layer), layer, rows), rows, layer.weight, layer.bias)
    packed_linear.has_kernel.cache_clear()
    assert bool(seen) == has_compiler


@pytest.mark.parametrize("num_rows", [2, 9])
@bfloat16_or_float32
def test_joined_layers_under_autocast_compute_as_their_own(num_rows, has_bfloat16, monkeypatch):
    monkeypatch.setattr(packed_linear, "multiplies_bfloat16", lambda: has_bfloat16)
    model, rows = Layers(torch.float32, True), torch.randn(num_rows, 20)
    weights = PackedLinear(model, is_enabled=True)
    joined = model.join(weights, rows.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        outputs = run_layers(model, weights, rows, torch.bfloat16)
    assert torch.equal(torch.cat(outputs, 1), joined)
    for layer, got in zip(model.layers, outputs, strict=True):
        check(got, *(given.bfloat16() for given in (rows, layer.weight, layer.bias)))
    assert len(weights._packed) == 1


@pytest.mark.parametrize("num_rows", [2, 9])
def test_layers_under_autocast_round_their_weights_once_for_each_version(num_rows):
    layer, rows = torch.nn.Linear(20, 7), torch.randn(num_rows, 20)
    weights = packed(layer)
    replacing = weights.replacing_linear(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), replacing:
        outputs = layer(rows)
    assert outputs.dtype == torch.bfloat16
    assert list(weights._packed) == [(id(layer.weight), torch.bfloat16)]
    check(outputs, *(given.bfloat16() for given in (rows, layer.weight, layer.bias)))


def test_layers_of_other_dtypes_are_left_to_torch():
    layer, rows = torch.nn.Linear(20, 7), torch.randn(9, 20)
    expected = layer(rows)
    weights = packed(layer)
    for dtype in (torch.bfloat16, torch.float64):
        with weights.replacing_linear(dtype):
            assert torch.equal(layer(rows), expected)
    assert not weights._packed


@dtypes
def test_nan_stays_nan(dtype):
    row = torch.tensor([[1.0, float("nan")]], dtype=dtype)
    assert packed_linear.multiply(row, row).isnan().all()


@dtypes
def test_a_kernel_that_cannot_be_compiled_stops_no_engine(dtype, monkeypatch):
    def fails(*_, **__):
        raise OSError("no room for a library")

    monkeypatch.setattr(kernels.inductor, "compile_library", fails)
    kernels.kernel.cache_clear()
    packed_linear.has_kernel.cache_clear()
    packed_linear.has_kernel(dtype)
    rows, weight = numbers(2, 20, dtype=dtype), numbers(7, 20, dtype=dtype)
    check(packed_linear.linear(rows, [weight]), rows, weight)
    packed_linear.has_kernel.cache_clear()
