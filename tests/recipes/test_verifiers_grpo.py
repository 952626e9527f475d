"""The recipe with verifiers, for two steps, through its own code."""

import os
import re

import pytest
from launching import run_recipe

PYTHON = os.environ.get("CB_ROLLOUT_VERIFIERS_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="CB_ROLLOUT_VERIFIERS_PYTHON names no environment")
def test_two_steps_train_on_the_traces_of_verifiers():
    printed = run_recipe(
        "verifiers_grpo",
        *("--verifiers-python", PYTHON, "--max-steps", 2, "--tasks", 4, "--rollouts", 4),
    )
    # A policy that has learned the format names one of the two digits.
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d\d)  version", printed)]
    assert len(rewards) == 2
    assert sum(rewards) > 0
    assert "version 2" in printed
    (difference,) = re.findall(r"log-probability difference\|\s+(\S+)$", printed, re.MULTILINE)
    assert float(difference) < 1e-5
