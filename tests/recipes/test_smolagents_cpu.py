"""The recipe with an unmodified smolagents agent, for one step, on the real model."""

import re

import pytest
from launching import run_recipe

pytest.importorskip("smolagents")
pytest.importorskip("reasoning_gym")


@pytest.mark.slow
def test_an_agent_of_the_package_index_trains_smollm2(tmp_path, smollm2):
    printed = run_recipe(
        "smolagents_cpu",
        *("--model", smollm2, "--output-dir", tmp_path, "--max-steps", 1, "--batch-size", 8),
    )
    (first, last) = re.search(r"reward ([\d.]+)% -> ([\d.]+)%", printed).groups()
    assert first == last
    assert 0 <= float(first) <= 100
