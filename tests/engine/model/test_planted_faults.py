"""Each planted fault is found in every precision, and the engine without one is accepted."""

import pytest
import torch
from tiny import FAMILIES, tiny_model

import planted_faults
from cb_rollout.engine.model.check import check_model
from cb_rollout.engine.model.runner import ModelRunner

PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}
QUICK = ("llama", "lfm2")
OTHERS = [family for family in FAMILIES if family not in QUICK]
SLOW = pytest.mark.slow

# transformers' own, of kernels that are not installed and of tiny configs.
pytestmark = pytest.mark.filterwarnings("ignore")


# Their attention has biases, or recurrent layers tell the order.
WITHOUT_POSITIONS = ("bloom", "granitemoehybrid")
OF_POSITIONS = "a decoded token's position is one too high"


def require_found(model, autocast_dtype, absent=None):
    margins = planted_faults.margins(model, autocast_dtype)
    margins.pop(absent, None)
    right = margins.pop(planted_faults.NONE)
    assert right < 0.6
    assert len(margins) >= 5
    assert min(margins.values()) > 10, margins


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "family",
    [*QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f not in QUICK)],
)
def test_planted_faults_are_found(family, precision):
    dtype, autocast_dtype = PRECISIONS[precision]
    absent = OF_POSITIONS if family in WITHOUT_POSITIONS else None
    require_found(tiny_model(family).to(dtype), autocast_dtype, absent)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_planted_faults_are_found_in_real_weights(smollm2, precision):
    from transformers import AutoModelForCausalLM

    dtype, autocast_dtype = PRECISIONS[precision]
    require_found(AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype), autocast_dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_seeds"), [("llama", 200), ("lfm2", 40), ("qwen3_moe", 40)])
def test_no_right_engine_is_refused_over_many_seeds(family, num_seeds):
    """In bfloat16, whose rows are compared in float32 too."""
    layouts = set()
    for seed in range(num_seeds):
        runner = ModelRunner(tiny_model(family, seed=seed).bfloat16(), None)
        check_model(runner)
        layouts.add(runner.batch_layout)
    assert len(layouts) == 1
