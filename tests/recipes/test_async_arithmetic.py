"""The asynchronous recipe: two steps of each trainer, from one start."""

import re

import pytest
from launching import run_recipe

LAST_LINES = re.compile(
    r"asynchronous +(\d+\.\d)% -> +\d+\.\d%  in +\d+ s\n"
    r"synchronous +(\d+\.\d)% -> +\d+\.\d%  in +\d+ s\n$"
)


@pytest.mark.slow
def test_both_trainers_run_two_steps_from_the_same_start(tmp_path):
    options = ("--warmup-steps", 5, "--max-steps", 2, "--num-held-out", 20)
    printed = run_recipe(
        "async_arithmetic", *options, "--output-dir", tmp_path, OMP_NUM_THREADS="1"
    )
    found = LAST_LINES.search(printed)
    assert found, printed
    assert found[1] == found[2]
