"""Each planted fault is found in every precision, and the engine without one is accepted."""

import pytest
import torch
from tiny import FAMILIES, tiny_model
from transformers import AutoModelForCausalLM

from cb_rollout.engine.model.check import check_model
from cb_rollout.engine.model.runner import ModelRunner
from chaos import planted_faults

QUICK = ("llama", "lfm2")
OTHERS = [family for family in FAMILIES if family not in QUICK]
SLOW = pytest.mark.slow

OF_POSITIONS = "a decoded token's position is one too high"
# Their attention has biases, or recurrent layers tell the order.
WITHOUT_POSITIONS = ("bloom", "granitemoehybrid")
# Each costs several forwards of 135 M parameters, in float32 and in bfloat16.
ON_REAL_WEIGHTS = (
    OF_POSITIONS,
    "one layer's weights are 1% off",
    "a key of a neighbour in one layer",
)

# transformers' own, of kernels that are not installed and of tiny configs.
pytestmark = pytest.mark.filterwarnings("ignore")


def require_found(margins):
    right = margins.pop(planted_faults.NONE)
    assert right < 0.6
    assert len(margins) >= 3
    assert min(margins.values()) > 10, margins


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(f, marks=SLOW) for f in OTHERS)])
def test_planted_faults_are_found(family, dtype):
    margins = planted_faults.margins(tiny_model(family).to(dtype))
    if family in WITHOUT_POSITIONS:
        margins.pop(OF_POSITIONS)
    require_found(margins)


@pytest.mark.slow
def test_planted_faults_are_found_in_real_weights_under_autocast(smollm2):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    require_found(planted_faults.margins(model, torch.bfloat16, ON_REAL_WEIGHTS))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_seeds"), [("llama", 60), ("lfm2", 20), ("qwen3_moe", 20)])
def test_no_right_engine_is_refused_over_many_seeds(family, num_seeds):
    """In bfloat16, whose rows are compared in float32 too."""
    layouts = set()
    for seed in range(num_seeds):
        runner = ModelRunner(tiny_model(family, seed=seed).bfloat16(), None)
        layouts.add(check_model(runner).execution.batch_layout)
    assert len(layouts) == 1
