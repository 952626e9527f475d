"""The recipes whose rollouts are a tree, and an agent's."""

import sys
import warnings
from types import SimpleNamespace

import branches_cpu
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
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


@pytest.mark.slow
def test_an_unmodified_agent_of_smolagents_trains_the_model(tmp_path, monkeypatch, capsys, smollm2):
    pytest.importorskip("smolagents", reason="needs `pip install smolagents`")
    import agent_smolagents as recipe

    settings = {"model": smollm2, "output-dir": tmp_path, "max-steps": 1, "batch-size": 8}
    arguments = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["agent_smolagents", *arguments])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recipe.main()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("mean reward ")


def test_the_sums_of_the_agents_task_are_added_up():
    pytest.importorskip("smolagents", reason="needs `pip install smolagents`")
    import agent_smolagents as recipe

    assert recipe.answer_of("What is 141 - 365 - 623?") == 141 - 365 - 623
    assert recipe.answer_of("What is 20 + 56?") == 76
    for problem in recipe.draw_problems(20, seed=0):
        assert isinstance(recipe.answer_of(problem["prompt"][0]["content"]), int)
