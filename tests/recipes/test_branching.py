"""The recipe whose rollouts are a tree."""

from types import SimpleNamespace

import branches_cpu
import pytest
import torch
from launching import run_recipe


def row(*completion):
    return SimpleNamespace(prompt_ids=[1], completion_ids=list(completion))


def test_tokens_before_a_fork_have_the_mean_of_what_comes_after_it():
    rows = [row(5, 6, 7), row(5, 6, 8, 9), row(4)]
    found = branches_cpu.by_branch(rows, torch.tensor([1.0, 0.0, -1.0]))
    expected = [[0.5, 0.5, 0.5, 0], [0.5, 0.5, -0.5, -0.5], [-1, 0, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.slow
def test_the_branching_recipe_runs_two_steps(tmp_path):
    few = ("--warmup-steps", 20, "--max-steps", 2, "--num-held-out", 20)
    output = run_recipe("branches_cpu", *few, "--output-dir", tmp_path)
    accuracy, share = output.strip().splitlines()[-2:]
    assert accuracy.startswith("held-out accuracy ")
    assert share.startswith("sampled tokens that branches share ")
