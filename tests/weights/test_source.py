import torch
from documented import block, run
from tiny import tiny_model

from cb_rollout import RolloutConfig
from cb_rollout.weights import create_weight_sync
from cb_rollout.weights.source import SOURCES, PlainSource, create_source


def test_a_weight_source_is_a_class_and_a_place_in_the_list(monkeypatch):
    source = run(block("Add a weight source"))["ScaledSource"]
    monkeypatch.setattr("cb_rollout.weights.source.SOURCES", [source, *SOURCES])
    model = tiny_model("llama")
    assert type(create_source(model)) is PlainSource
    model.weight_scale = 2
    weights = create_weight_sync(model, RolloutConfig(weight_sync="copy"))
    trained, held = (dict(m.named_parameters()) for m in (model, weights.module))
    assert trained.keys() == held.keys()
    assert all(torch.equal(held[name], trained[name] / 2) for name in held)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert weights.differing()
    weights.sync()
    assert not weights.differing()
