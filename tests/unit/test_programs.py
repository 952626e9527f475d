"""Operators of a trace that one call runs: the same numbers, and only where that is sure."""

import pytest
import torch
from tiny import tiny_model
from torch.nn import functional

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, _compat_tracing
from cb_rollout.engine.attention import listed_forward
from cb_rollout.engine.attention.program import Program
from cb_rollout.engine.attention.trace_fusions import fuse
from cb_rollout.engine.attention.trace_passes import add_reader, reader_of, take_products
from cb_rollout.engine.attention.trace_programs import take_programs


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


TABLE = numbers(64, 8)
# A row for each token that there may be.

WEIGHT, SQUARE, BIAS, SCALES = numbers(12, 8), numbers(8, 8), numbers(12), numbers(8)


def programmed(function, *, has_products=True):
    """What a function does to tokens' rows, with its runs of operators as programs."""
    module, _ = _compat_tracing.traced(of_tokens(function), torch.arange(5))
    take_products(module.graph)
    add_reader(module.graph)
    fuse(module)
    take_programs(module, reader_of(module.graph), [], has_products=has_products)
    module.recompile()
    return module


def of_tokens(function):
    return lambda tokens: function(functional.embedding(tokens, TABLE))


def assert_same(module, function, num_rows=7):
    tokens = torch.arange(num_rows)
    expected = of_tokens(function)(tokens)
    torch.testing.assert_close(module(tokens, None), expected, atol=1e-5, rtol=1e-5)


def programs_of(module):
    return [n.target for n in module.graph.nodes if isinstance(n.target, Program)]


def sums_of_products(rows):
    return 0.5 * functional.linear(rows, SQUARE) + rows


def biased(rows):
    wide = functional.linear(rows, WEIGHT, BIAS)
    return wide + wide


def parts_of_one_product(rows):
    gates, values = functional.linear(rows, torch.cat([WEIGHT, WEIGHT])).chunk(2, -1)
    return functional.silu(gates) * values


def uneven_parts(rows):
    first, second, third = functional.linear(rows, WEIGHT).split([3, 5, 4], -1)
    return second * 2.0, torch.cat([third, first], -1)


def slices_of_heads(rows):
    heads = functional.linear(rows, WEIGHT).view(-1, 3, 4)
    return heads[:, 1:] * 3.0, heads[:, :, -3:] * 2.0


def last_part_is_short(rows):
    *_, rest = functional.linear(rows, WEIGHT).split(5, 1)
    return rest * 2.0


def normed_heads(rows):
    heads = functional.linear(rows, SQUARE).view(-1, 2, 4)
    weight = SCALES[:4]
    squares = heads.pow(2).mean(-1, keepdim=True)
    return (weight * (heads * torch.rsqrt(squares + 1e-6))).transpose(1, 2)


def one_tensor_in_two_shapes(rows):
    wide = functional.linear(rows, SQUARE) * 2.0
    return wide, wide.view(-1, 2, 4), wide[:, None].transpose(1, 2)


def rows_that_do_not_lie_in_order(rows):
    return functional.linear(rows.t().contiguous().t(), SQUARE) * 2.0


@pytest.mark.parametrize(
    "function",
    [
        sums_of_products,
        biased,
        parts_of_one_product,
        uneven_parts,
        slices_of_heads,
        last_part_is_short,
        normed_heads,
        one_tensor_in_two_shapes,
        rows_that_do_not_lie_in_order,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_program_does_what_its_operators_do(function, dtype, monkeypatch):
    for name in ("TABLE", "WEIGHT", "SQUARE", "BIAS", "SCALES"):
        monkeypatch.setitem(globals(), name, globals()[name].to(dtype))
    module = programmed(function)
    assert programs_of(module)
    for num_rows in (1, 5, 40):
        assert_same(module, function, num_rows)


def test_numbers_that_are_no_longer_needed_give_their_place_to_others():
    def deep(rows):
        for _ in range(20):
            rows = functional.linear(rows, SQUARE) * 0.5
        return rows

    module = programmed(deep)
    (program,) = programs_of(module)
    assert len(program._operators) == 40
    assert program._workspace_size == 16
    assert_same(module, deep)


def another_operator_between(rows):
    doubled = functional.linear(rows, SQUARE) * 2.0
    return functional.linear(doubled.cumsum(-1), SQUARE) * 2.0


def a_write_between(rows):
    doubled = functional.linear(rows, SQUARE) * 2.0
    rows.add_(1.0)
    return doubled + rows, functional.linear(rows, SQUARE)


def a_write_to_a_part(rows):
    whole = functional.linear(rows, SQUARE) * 2.0
    whole[:, :3].mul_(3.0)
    return functional.linear(whole, SQUARE) * 2.0


def a_write_to_a_whole(rows):
    whole = functional.linear(rows, SQUARE) * 2.0
    part = whole[:, 2:5]
    whole.mul_(3.0)
    return part * 2.0, functional.linear(whole, SQUARE) * 2.0


@pytest.mark.parametrize(
    "function",
    [another_operator_between, a_write_between, a_write_to_a_part, a_write_to_a_whole],
)
def test_what_stands_between_keeps_its_place(function):
    module = programmed(function)
    assert len(programs_of(module)) == 2
    assert_same(module, function)


def in_other_types(rows):
    halves = functional.linear(rows, SQUARE).half()
    return (halves * 2.0 + halves).float() * 2.0


def in_two_types(rows):
    precise = rows.double()
    return functional.linear(rows, SQUARE) * 2.0, precise * 3.0 + precise


def of_types_that_meet(rows):
    return functional.linear(rows, SQUARE) + rows.double() + rows


def of_integers_first(rows):
    return (rows > 0).long() * 2, functional.linear(rows, SQUARE) * 2.0


def of_one_row_for_all(rows):
    return functional.linear(rows, SQUARE) + rows[:1] + rows[:1]


def turned_over(rows):
    turned = functional.linear(rows, SQUARE).view(-1, 2, 4).transpose(1, 2) * 2.0
    return turned + turned


def of_fewer_rows(rows):
    return functional.linear(rows, SQUARE)[1:] * 2.0 + rows[:-1]


@pytest.mark.parametrize(
    ("function", "num_operators"),
    [
        (in_other_types, 0),
        (in_two_types, 2),
        (of_types_that_meet, 0),
        (of_integers_first, 2),
        (of_one_row_for_all, 0),
        (turned_over, 2),
        (of_fewer_rows, 0),
    ],
)
def test_what_a_program_does_not_do_stays(function, num_operators):
    module = programmed(function)
    assert sum(len(program._operators) for program in programs_of(module)) == num_operators
    assert_same(module, function)


def test_many_rows_are_multiplied_by_torch():
    module = programmed(sums_of_products, has_products=False)
    left = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert torch.ops.cb_rollout.product.default in left
    assert programs_of(module)
    assert_same(module, sums_of_products)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "mistral"])
def test_a_program_attends_as_the_reader_does(family, monkeypatch):
    monkeypatch.setattr(listed_forward, "STEPS_BEFORE_TRACE", 2)
    model = tiny_model(family)
    params = SamplingParams(ignore_eos=True, max_new_tokens=30)
    outputs = []
    for is_watched in (False, True):
        monkeypatch.setattr(Program, "is_watched", is_watched)
        with RolloutGenerator(model, RolloutConfig(seed=3, block_size=4)) as generator:
            done = generator.generate_batch([[5, 9, 4], [7] * 9], sampling_params=params)
            listed = generator.manager.engine._runner.decoding.listed
            assert any(isinstance(n.target, Program) for n in listed.trace._few.graph.nodes)
        outputs.append(list(done.values()))
    for one, other in zip(*outputs, strict=True):
        assert one.generated_tokens == other.generated_tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_ordinary_layers_is_programs(dtype, monkeypatch):
    monkeypatch.setattr(listed_forward, "STEPS_BEFORE_TRACE", 2)
    # The rotary tables of a model in float64 are float32, and every rotation mixes the two.
    num_programs = {torch.float32: 1, torch.float64: 4}[dtype]
    with RolloutGenerator(tiny_model("qwen3").to(dtype), RolloutConfig(seed=3)) as generator:
        generator.generate_batch([[5, 9, 4]], max_new_tokens=9, generation_config=None)
        trace = generator.manager.engine._runner.decoding.listed.trace
    assert sum(isinstance(node.target, Program) for node in trace._few.graph.nodes) == num_programs
