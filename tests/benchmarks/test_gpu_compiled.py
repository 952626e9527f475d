"""What inductor would launch for a decode step, counted without a GPU."""

from collections import Counter

import pytest
import sympy
import torch
from torch._inductor.dependencies import MemoryDep
from torch.utils._triton import has_triton

pytest.importorskip("triton")

from benchmarks.harness.workload import TINY
from benchmarks.roofline.compiled import PROPERTIES, Form, Plan, _plan
from benchmarks.roofline.inductor_kernels import (
    GeneratedKernel,
    OperatorCall,
    Sized,
    _num_elements,
    _pretended,
)
from benchmarks.roofline.steps import Rows, engine_decode

# Weights of 16 rows each, so that a copy places them side by side.
SHAPE = TINY.shape | {"num_hidden_layers": 6}
ROWS = Rows(4, 100)


def step(num_layers, plan=None):
    replace = None if plan is None else plan.forward
    return engine_decode(SHAPE, ROWS, 132, num_layers, replace=replace)


def flops(one):
    return sum(n * k.num_flops for k, n in one.kernels.items() if k.name == "mm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "launches"), [(Form(False), 14), (Form(True), 11), (Form(True, is_autocast=True), 11)]
)
def test_a_compiled_layer_launches_products_attention_and_a_kernel_between_each(form, launches):
    """3 or 1 products of the states, 2 rotations, write and attention, a product, a norm, 2 or 1
    products, the activation, a product, a norm."""
    plan = _plan(tuple(SHAPE.items()), form)
    layers = step(6, plan).plus(step(4, plan), -1)
    assert layers.num_launches == 2 * launches
    names = Counter()
    for kernel, count in layers.kernels.items():
        names[kernel.name] += count
    assert names["mm"] == (2 * 4 if form.is_copy else 2 * 7)
    assert names["attend_kernel"] == names["write_kernel"] == 2
    own = step(6)
    whole = step(6, plan)
    assert flops(whole) == flops(own)
    assert whole.num_bytes < own.num_bytes


def test_a_card_that_is_described_has_triton_and_none_stays_behind():
    """torch keeps the first answer of a process; compiled CPU code asks too."""
    found = has_triton()
    with _pretended(PROPERTIES):
        assert has_triton()
    assert has_triton() == found


def kernel(name):
    return GeneratedKernel(name, 8, 2)


def test_layers_between_the_first_and_the_last_are_repeated():
    attention = OperatorCall(torch.ops.cb_rollout.attend.default, ())
    parts = [[kernel("before")], *([attention, kernel(name)] for name in "abcd")]
    plan = Plan(parts, [], 1)
    names = [one.name for one in plan.of_layers(8) if isinstance(one, GeneratedKernel)]
    assert names == ["before", "a", *"bcbcbc", "d"]
    assert len(plan.of_layers(2)) == 5


def test_elements_that_two_accesses_share_count_once():
    row, column, looked_up = sympy.symbols("row column looked_up", integer=True)
    sizes = (sympy.Integer(3), sympy.Integer(4))

    def access(index):
        return MemoryDep("buffer", index, (row, column), sizes)

    left, right = access(10 * row + column), access(10 * row + column + 2)
    assert _num_elements([left], {}, 30) == 12
    assert _num_elements([left, right], {}, 30) == 18
    assert _num_elements([left, access(10 * row + column + 5)], {}, 30) == 24
    assert _num_elements([access(1000 * looked_up + column)], {}, 5000) == 12


def test_sizes_grow_with_the_rows():
    assert Sized(((0, 1), (32, 0)), (32, 1), torch.bfloat16).shape(5) == (5, 32)
