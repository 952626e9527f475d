"""The cause of a fault is named on a real model: SmolLM2-135M-Instruct, with an adapter."""

import pytest
import torch

import cb_rollout
from measure.audit import NUM_NEW, engines, real_setting

pytestmark = pytest.mark.slow

# An audit takes twenty seconds. In bfloat16 an adapter or a second BOS moves a number by about its
# rounding, so only what moves it more is named on every CPU, of twice the tokens.
FAULTS = {
    torch.float32: (NUM_NEW, "none", "prompt keys of it", "adapter not loaded"),
    torch.bfloat16: (2 * NUM_NEW, "older version", "temperature not in the numbers"),
}


@pytest.mark.parametrize("dtype", FAULTS, ids=str)
def test_the_cause_of_a_fault_of_a_real_model_comes_first(smollm2, dtype):
    setting, (num_new, *faults) = real_setting(dtype), FAULTS[dtype]
    named = {}
    for fault, cause, engine, arguments in engines(setting):
        if fault in faults:
            outputs = engine.sample(setting.prompts, num_new)
            report = cb_rollout.audit(outputs, setting.model, **arguments)
            named[fault] = report.cause, cause
    assert set(named) == {*faults}
    assert {fault: pair for fault, pair in named.items() if pair[0] is not pair[1]} == {}
