"""Products of the same rows by neighbouring weights are computed as one."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_model

from cb_rollout.compat import inductor
from cb_rollout.compat.transformers import text_token_ids
from cb_rollout.engine.attention.cpu.backend import simplify
from cb_rollout.engine.attention.decode_cache import DecodeCache
from cb_rollout.engine.attention.joined_products import linear_nodes, replace_by_columns
from cb_rollout.engine.attention.traced_forward import (
    Trace,
    Traceable,
    Tracing,
    UntraceableError,
    attend_to_new_token,
    example,
)
from cb_rollout.engine.attention.triton import backend
from cb_rollout.engine.attention.triton.backend import join_products
from cb_rollout.engine.model.precision import Precision
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.weights.copied import CopiedWeights

aten = torch.ops.aten
COUNTED, CAST = [], []


def join(graph, weights):
    inputs = graph.find_nodes(op="placeholder")[-len(weights) :]
    casts = graph.find_nodes(op="call_function", target=aten._to_copy.default)
    CAST[:] = [node for node in casts if node.args[0] in inputs]
    found = join_products(graph, weights)
    products = [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    COUNTED[:] = [len(products), len(found) - len(weights)]
    return found


TRACING = Tracing(num_rows=3, tried_rows=(1, 3, 8), rewrite=join, simplify=simplify)


def traced(model, autocast_dtype=None, tracing=TRACING):
    """A forward to trace, and its trace, which agrees with the model's own forward."""
    runner = ModelRunner(model.eval(), autocast_dtype)
    cache, ids = DecodeCache(runner.probe(), runner.device), text_token_ids(model)
    dtype, precisely = runner.compute_dtype, runner.computing_in
    own = Traceable(runner.decode, cache, ids, dtype, precisely)
    return own, Trace(own, tracing)


def joined(model, autocast_dtype=None):
    """Products and joined weights of a trace."""
    traced(model, autocast_dtype)
    return tuple(COUNTED)


@pytest.mark.fast_cases("settings2-6-1")
@pytest.mark.parametrize(
    ("settings", "products", "weights"),
    [
        ({}, 5, 2),
        # Biases are joined with their weights.
        ({"attention_bias": True, "mlp_bias": True}, 5, 4),
        # Its weights' parts would not be aligned.
        ({"intermediate_size": 72}, 6, 1),
    ],
)
def test_a_copy_has_one_product_for_query_key_and_value_and_one_for_gate_and_up(
    settings, products, weights
):
    trained = tiny_model("llama", num_hidden_layers=1, **settings)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    copied = CopiedWeights(trained, Precision(None, None), None)
    assert joined(copied.module) == (products, weights)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.25)
    copied.sync()
    assert copied.differing() == []
    # A model's own weights lie apart.
    assert joined(trained) == (8, 0)


BFLOAT16 = torch.bfloat16
PRECISIONS = {
    "as trained": Precision(None, None),
    "autocast": Precision(BFLOAT16, None),
    "a copy in bfloat16": Precision(None, BFLOAT16),
}


@pytest.mark.fast_cases("True-autocast")
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("tied", [True, False])
def test_products_are_joined_and_no_weight_is_cast_in_any_precision(precision, tied):
    trained = tiny_model("qwen3", tie_word_embeddings=tied)
    copied = CopiedWeights(trained, precision, None)
    assert joined(copied.module, precision.autocast_dtype) == (9, 4)
    assert not CAST


def columns_in_another_order(graph, layers, product):
    replace_by_columns(graph, layers[::-1], product)


def without_biases(graph):
    groups = linear_nodes(graph)
    return [[replace(x, weights=x.weights[:1]) for x in layers] for layers in groups]


FAULTS = {
    "outputs are in another order": ("replace_by_columns", columns_in_another_order),
    "weights are joined that lie apart": ("_follows", lambda before, after: True),
    "biases are left out": ("linear_nodes", without_biases),
}


@pytest.mark.fast_cases("biases are left out")
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_join_with_a_fault_is_refused(fault, monkeypatch):
    """The rewrite of the trace is compared with the model's own forward before it is used."""
    model = tiny_model("llama", num_hidden_layers=1, attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    if fault != "weights are joined that lie apart":
        model = CopiedWeights(model, Precision(None, None), None).module
    if fault is None:
        assert joined(model)[1] > 0
        return
    monkeypatch.setattr(backend, *FAULTS[fault])
    with pytest.raises((UntraceableError, RuntimeError)):
        joined(model)


@pytest.mark.slow
def test_equal_casts_are_made_once_and_change_no_bit(monkeypatch):
    cast = []

    def count(graph, weights):
        cast.append(len(graph.find_nodes(op="call_function", target=aten._to_copy.default)))
        return weights

    tracing = Tracing(3, (1, 3, 8), count, simplify)
    precision = PRECISIONS["autocast"]
    module = CopiedWeights(tiny_model("qwen3"), precision, None).module

    def casts():
        own, trace = traced(module, BFLOAT16, tracing)
        for num_rows in (1, 5, 64):
            inputs = example(num_rows, own.token_ids, own.cache.device)
            with torch.no_grad():
                expected = own.run(attend_to_new_token, *inputs)
            assert torch.equal(trace(*inputs, attend_to_new_token), expected)
        return cast[-1]

    num_casts = casts()
    monkeypatch.setattr(inductor, "merge_casts", lambda graph: None)
    # Of query, key and value, and of gate and up, in two layers.
    assert casts() - num_casts == 2 * (2 + 1)


def test_a_merge_of_unequal_casts_is_refused(monkeypatch):
    def merged(graph):
        first = {}
        for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
            key = str(node.kwargs), str(node.args[0].meta["val"].shape)
            if (other := first.setdefault(key, node)) is not node:
                node.replace_all_uses_with(other)

    monkeypatch.setattr(inductor, "merge_casts", merged)
    with pytest.raises(UntraceableError, match="it computes something else"):
        joined(tiny_model("qwen3"), BFLOAT16)


def writes_a_cast(rows):
    first, second = rows.to(BFLOAT16), rows.to(BFLOAT16)
    return first.add_(1) * second


def writes_a_view(rows):
    first, second = rows.to(BFLOAT16), rows.to(BFLOAT16)
    first.view(-1).add_(1)
    return first * second


def writes_between(rows):
    states = rows * 2
    first = states.to(BFLOAT16)
    states.view(-1).add_(1)
    return first * states.to(BFLOAT16)


@pytest.mark.parametrize("function", [writes_a_cast, writes_a_view, writes_between])
def test_casts_of_which_one_is_written_are_not_merged(function):
    rows = torch.arange(6.0).view(3, 2)
    module, _ = inductor.trace_graph(function, rows)
    graph = torch.fx.GraphModule(module, module.graph)
    assert torch.equal(graph(rows), function(rows))
