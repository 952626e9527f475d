"""The agent's recipe, for two steps, through its own code."""

import re
import subprocess
import sys
from pathlib import Path

import agent_openai as recipe
import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 240
# A run that hangs is killed and fails the test.


@pytest.mark.parametrize(("secret", "guess", "said"), [(5, "5", "="), (5, "4", ">"), (5, "9", "<")])
def test_the_environment_says_where_the_secret_is(secret, guess, said):
    assert recipe.answer(secret, guess) == said


def test_two_steps_train_on_exactly_what_was_sampled():
    command = [sys.executable, str(ROOT / "recipes" / "agent_openai.py")]
    result = subprocess.run(
        [*command, "--max-steps", "2", "--games", "12"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "versions 2" in result.stdout
    (difference,) = re.findall(r"log-probability difference\|\s+(\S+)", result.stdout)
    assert float(difference) < 1e-5
    assert re.search(r"history was rewritten\s+0$", result.stdout, re.MULTILINE)
