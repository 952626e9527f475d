"""The agent's recipe, for two steps, through its own code."""

import re

import agent_openai as recipe
import pytest
from launching import run_recipe


@pytest.mark.parametrize(("secret", "guess", "said"), [(5, "5", "="), (5, "4", ">"), (5, "9", "<")])
def test_the_environment_says_where_the_secret_is(secret, guess, said):
    assert recipe.answer(secret, guess) == said


@pytest.mark.slow
def test_two_steps_train_on_exactly_what_was_sampled():
    printed = run_recipe("agent_openai", "--max-steps", 2, "--games", 12)
    assert "versions 2" in printed
    (difference,) = re.findall(r"log-probability difference\|\s+(\S+)", printed)
    assert float(difference) < 1e-5
    # A policy with little training samples a special token now and then.
    (num_rewritten,) = re.findall(r"history was rewritten\s+(\d+)$", printed, re.MULTILINE)
    assert int(num_rewritten) <= 4
