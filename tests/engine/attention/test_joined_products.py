"""Products of the same rows by neighbouring weights are computed as one."""

import pytest
import torch
from tiny import tiny_model

from cb_rollout.compat.transformers import text_token_ids
from cb_rollout.engine.attention.cpu.backend import simplify
from cb_rollout.engine.attention.traced_forward import Trace, Traceable, Tracing
from cb_rollout.engine.attention.triton.backend import join_products
from cb_rollout.engine.model.check import check_model
from cb_rollout.engine.model.precision import Precision
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.weights.copied import CopiedWeights

aten = torch.ops.aten
COUNTED = []


def join(graph, weights):
    found = join_products(graph, weights)
    products = [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    COUNTED[:] = [len(products), len(found) - len(weights)]
    return found


TRACING = Tracing(num_rows=3, tried_rows=(1, 3, 8), rewrite=join, simplify=simplify)


def joined(model):
    """Products and joined weights of a trace, which agrees with the model's own forward."""
    runner = ModelRunner(model.eval(), None)
    check_model(runner)
    cache, ids = runner.attention_backend.cache, text_token_ids(model)
    Trace(Traceable(runner.decode, cache, ids), TRACING)
    return tuple(COUNTED)


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
