from contextlib import contextmanager

import torch
from tiny import tiny_model

from cb_rollout import RolloutConfig
from cb_rollout.weights import create_weight_sync
from cb_rollout.weights.source import SOURCES, PlainSource, create_source
from cb_rollout.weights.split import parts


class HalvedSource(PlainSource):
    """Reads a model whose trainer keeps every tensor doubled."""

    @staticmethod
    def matches(model):
        return getattr(model, "keeps_doubled", False)

    @contextmanager
    def read(self, tensors, splits=None):
        yield parts([tensor / 2 for tensor in tensors], splits)


def test_a_weight_source_is_a_class_and_a_place_in_the_list(monkeypatch):
    monkeypatch.setattr("cb_rollout.weights.source.SOURCES", [HalvedSource, *SOURCES])
    model = tiny_model("llama")
    assert type(create_source(model)) is PlainSource
    model.keeps_doubled = True
    weights = create_weight_sync(model, RolloutConfig(weight_sync="copy"))
    trained, held = (dict(m.named_parameters()) for m in (model, weights.module))
    assert trained.keys() == held.keys()
    assert all(torch.equal(held[name], trained[name] / 2) for name in held)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert weights.differing()
    weights.sync()
    assert not weights.differing()
