"""The cause of a fault is named on a real model: SmolLM2-135M-Instruct, with an adapter."""

import pytest
import torch

import cb_rollout
from measure_audit import NUM_NEW, engines, real_setting

pytestmark = pytest.mark.slow

# In bfloat16 an adapter or a second BOS moves a number by about its rounding. Evidence, 0.4 nats a
# token, has to exceed the 20 nats that rounding is given.
NUM_TOKENS = 2 * NUM_NEW

# An audit takes twenty seconds.
FAULTS = {
    torch.float32: ("none", "prompt keys of it", "BOS twice"),
    torch.bfloat16: ("older version", "adapter not loaded", "temperature not in the numbers"),
}


@pytest.mark.parametrize("dtype", FAULTS, ids=str)
def test_the_cause_of_a_fault_of_a_real_model_comes_first(smollm2, dtype):
    setting = real_setting(dtype)
    named = {}
    for fault, cause, engine, arguments in engines(setting):
        if fault in FAULTS[dtype]:
            outputs = engine.sample(setting.prompts, NUM_TOKENS)
            report = cb_rollout.audit(outputs, setting.model, **arguments)
            named[fault] = report.cause, cause
    assert set(named) == {*FAULTS[dtype]}
    assert {fault: pair for fault, pair in named.items() if pair[0] is not pair[1]} == {}
