"""Every type that runs gets the same batch layout in float32 and in 16 bits."""

import copy

import pytest
import torch
from configs import NOT_BUILT, REFUSED
from nightly import some_slow
from parity import create_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cb_rollout.engine.model.check import check_model
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.errors import ConfigurationError

# The models' own warnings, about weights and settings that only a tiny model has.
pytestmark = pytest.mark.filterwarnings("default")

MAPPED = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
RUNNING = [t for t in MAPPED if t not in REFUSED and t not in NOT_BUILT]
# transformers 5.23 multiplies float32 by 16 bits in its own forward.
NOT_IN_16_BITS = ("inkling2_text",)


@pytest.mark.parametrize("model_type", some_slow(RUNNING, ("gemma2", "falcon_mamba")))
def test_a_type_is_run_in_the_same_layout_in_16_bits(model_type):
    model = create_model(model_type)
    layouts = []
    for dtype in (torch.float32, torch.bfloat16):
        runner = ModelRunner(copy.deepcopy(model).to(dtype), None)
        if model_type in NOT_IN_16_BITS and dtype != torch.float32:
            with pytest.raises(ConfigurationError, match="does not run on token ids alone"):
                check_model(runner)
            return
        layouts.append(check_model(runner).execution.batch_layout)
    assert layouts[0] is layouts[1]
