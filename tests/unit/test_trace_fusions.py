"""What several operators of a trace do, one kernel does; what only looks like it stays."""

from collections import Counter

import pytest
import torch
from tiny import tiny_model
from torch.nn import functional

from cb_rollout import _compat_tracing
from cb_rollout.engine.attention import trace
from cb_rollout.engine.attention.cpp_layers import gate, norm, product, rotate
from cb_rollout.engine.attention.trace_fusions import fuse
from cb_rollout.engine.attention.trace_passes import take_products
from cb_rollout.engine.rehearsal import rehearse
from cb_rollout.engine.runner import ModelRunner


def calls_of(family, **overrides):
    """How often the list of a model of two layers calls each kernel, before they are programs."""
    runner = ModelRunner(tiny_model(family, **overrides).eval(), None)
    rehearse(runner)
    listed = trace.Trace(runner.forward, runner.decoding.cache)
    return Counter(node.target for node in listed._many.graph.nodes)


@pytest.mark.parametrize(
    ("family", "num_norms", "num_rotations", "num_gates", "num_products"),
    [("llama", 5, 4, 2, 15), ("qwen3", 9, 4, 2, 15), ("gpt2", 0, 0, 0, 1)],
)
def test_a_models_layers_are_found(
    family, num_norms, num_rotations, num_gates, num_products, monkeypatch
):
    monkeypatch.setattr(trace, "take_programs", lambda *_, **__: None)
    found = calls_of(family)
    assert found[norm] == num_norms
    assert found[rotate] == num_rotations
    assert found[gate] == num_gates
    assert found[product] == num_products


def scaled_linear(bias, rows, weight):
    return torch.addmm(bias, rows[:, 0], weight.t(), beta=0.5)


def test_a_product_with_more_to_it_is_no_linear_layer():
    examples = numbers(5), numbers(3, 1, 8), numbers(5, 8)
    module, _ = _compat_tracing.traced(scaled_linear, *examples)
    take_products(module.graph)
    module.recompile()
    torch.testing.assert_close(module(*examples), scaled_linear(*examples))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def normed(rows, weight):
    return weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6))


def normed_weight_last(rows, weight):
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def normed_from_one(rows, weight):
    return normed_weight_last(rows, 1.0 + weight)


def rotated(heads, cosines, sines):
    turned = torch.cat([-heads[..., 4:], heads[..., :4]], -1)
    return heads * cosines + turned * sines


def rotated_elsewhere(heads, cosines, sines):
    turned = torch.cat([-heads[..., 3:], heads[..., :3]], -1)
    return heads * cosines + turned * sines


def rotated_in_part(heads, cosines, sines):
    return torch.cat([rotated(heads[..., :8], cosines, sines), heads[..., 8:]], -1)


def gated(gates, values):
    return functional.silu(gates) * values


def gated_last(gates, values):
    return values * functional.silu(gates)


ROWS, WEIGHT, HEADS = numbers(3, 1, 8), numbers(8), numbers(3, 4, 1, 8)
ANGLES = numbers(2, 3, 1, 1, 8).unbind()


def found_in(function, examples):
    """The kernels that a function's trace calls after fusion; what it computes is the same."""
    module, _ = _compat_tracing.traced(function, *examples)
    fuse(module)
    module.recompile()
    torch.testing.assert_close(module(*examples), function(*examples))
    return [node.target for node in module.graph.nodes if node.target in (norm, rotate, gate)]


def gated_for_nobody(gates, values):
    gated(gates, values)
    return values * 2


def changed_then_normed(rows, weight):
    rows = rows * 1.0
    rows.add_(5.0)
    found = normed(rows, weight) + 1.0
    rows.add_(1.0)
    return found + rows


@pytest.mark.parametrize(
    ("function", "examples", "kernel"),
    [
        (normed, (ROWS, WEIGHT), norm),
        (normed_weight_last, (ROWS, WEIGHT), norm),
        (normed_from_one, (ROWS, WEIGHT), norm),
        (rotated, (HEADS, *ANGLES), rotate),
        (rotated_in_part, (numbers(3, 4, 1, 12), *ANGLES), rotate),
        (gated, (ROWS, ROWS + 1), gate),
        (gated_last, (ROWS, ROWS + 1), gate),
        (gated_for_nobody, (ROWS, ROWS + 1), gate),
        (changed_then_normed, (ROWS * 2, WEIGHT), norm),
    ],
)
def test_what_a_kernel_does_is_found(function, examples, kernel):
    assert found_in(function, examples) == [kernel]


def scale_used_again(rows, weight):
    scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (rows * scale) + scale


def gated_by_number(gates):
    return functional.silu(gates) * 2.0


def gated_by_count(gates):
    return functional.silu(gates) * gates.shape[0]


def normed_by_number(rows):
    return normed_weight_last(rows, 2.0)


def normed_then_changed(rows, weight):
    rows = rows * 1.0
    found = normed(rows, weight)
    rows.add_(5.0)
    return found + rows


@pytest.mark.parametrize(
    ("function", "examples"),
    [
        (normed, (ROWS, WEIGHT[None])),
        (normed, (ROWS, WEIGHT.double())),
        (normed, (ROWS.bfloat16(), WEIGHT.bfloat16())),
        (scale_used_again, (ROWS, WEIGHT)),
        (rotated, (numbers(3, 4, 2, 8), *ANGLES)),
        (rotated, (HEADS, ANGLES[0], numbers(1, 1, 1, 8))),
        (rotated, (HEADS, numbers(1, 1, 1, 8), ANGLES[0])),
        (rotated_elsewhere, (HEADS, *ANGLES)),
        (gated, (ROWS, WEIGHT)),
        (gated_by_number, (ROWS,)),
        (gated_by_count, (ROWS,)),
        (normed_by_number, (ROWS,)),
        (normed_then_changed, (ROWS * 2, WEIGHT)),
    ],
)
def test_what_only_looks_like_it_stays(function, examples):
    assert found_in(function, examples) == []
