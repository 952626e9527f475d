"""A compiled forward with a fault planted in its graph is refused, and one without is not."""

import pytest
from graph_faults import FAULTS
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator
from cb_rollout.errors import ConfigurationError

PATHS = ("varlen_compile_config", "decode_compile_config")


def config_of(path, backend):
    settings = {"backend": backend, "mode": None, "dynamic": True}
    return RolloutConfig(seed=3, **{path: settings})


FAST = "RoPE frequencies off by 1%"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fault",
    [FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in FAULTS if name != FAST)],
)
def test_a_fault_is_refused(fault, path):
    with pytest.raises(ConfigurationError, match=r"computes something else: .* beyond the model's"):
        RolloutGenerator(tiny_model("llama", num_hidden_layers=1), config_of(path, FAULTS[fault]))


@pytest.mark.parametrize("path", PATHS)
def test_a_graph_without_a_fault_runs(path):
    model = tiny_model("llama", num_hidden_layers=1)
    with RolloutGenerator(model, config_of(path, "eager")) as generator:
        paths = {part.text.split(", ")[-1] for part in generator.manager.engine.paged_model.paths}
    assert "compiled" in paths
