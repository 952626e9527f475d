"""Two processes learn with attach what stock trainers learn from the same completions."""

import pytest
from processes import asked_for, run_processes
from replay import FLOAT32, saved_model

pytestmark = pytest.mark.slow

NAMES = [
    "dapo, several steps a rollout",
    "truncated completions masked, accumulated gradients",
    "LoRA with KL",
    "RLOO",
    "top_entropy_quantile",
    "weighted rewards, some None",
    "evaluation with groups of 2",
    "tools",
]


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    # In a process of several, transformers saves by the first alone.
    saved_model(models, ())
    names = asked_for(request, NAMES, "name")
    return run_processes("distributed/trl_replay.py", str(models), *names)


@pytest.mark.parametrize("name", NAMES)
def test_processes_learn_the_same_as_without_attach(ranks, name):
    for rank in ranks:
        found = rank[name]
        assert found["num_processes"] == 2
        assert found["change"] > 1e-3
        assert found["weights"] <= FLOAT32.weights
        assert {"loss", "grad_norm"} <= found["metrics"].keys()
        assert max(found["metrics"].values()) <= FLOAT32.metrics
