"""The loops without a trainer: two steps each, in one process and in two."""

import difflib
import random
import re
import sys

import bare_loop
import pytest
import torch
from launching import ACCELERATE, RECIPES, TORCHRUN, launched, run_recipe

from cb_rollout.metrics.run_records import read_metrics

LAST_LINE = re.compile(r"held-out accuracy \d+\.\d% -> \d+\.\d%")

# The other 100 lines or so are the bare loop's.
MOST_LINES_OF_ACCELERATE = 70


FEW_STEPS = ("--warmup-steps", 2, "--max-steps", 2)
ON_A_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        (*TORCHRUN, "2"),
        (*ACCELERATE, "--multi_gpu", "--main_process_port", "0", "--num_processes", "2"),
    ],
    ids=["torchrun", "accelerate"],
)
def test_the_accelerate_loop_runs_two_steps_in_two_processes_and_says_each_line_once(launcher):
    printed = run_recipe("accelerate_grpo", *FEW_STEPS, launcher=launcher, **ON_A_CPU)
    lines = printed.strip().splitlines()
    assert lines[0] == "processes: 2"
    assert [line.partition(":")[0] for line in lines[1:-1]] == ["step 1", "step 2"]
    assert LAST_LINE.fullmatch(lines[-1]), lines


@pytest.mark.slow
def test_the_accelerate_loop_says_that_accelerate_dropped_the_number_of_processes():
    launcher = (*ACCELERATE, "--cpu", "--num_processes", "2")
    done = launched("accelerate_grpo", *FEW_STEPS, launcher=launcher, **ON_A_CPU)
    assert done.returncode
    assert "started only this one" in done.stderr
    assert "torchrun --nproc-per-node" in done.stderr
    assert done.stdout.splitlines() == ["processes: 1"]


@pytest.mark.slow
def test_the_bare_loop_runs_two_steps_and_ends_with_its_accuracy(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = ["bare_loop.py", "--warmup-steps", "2", "--max-steps", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    bare_loop.main()
    lines = capsys.readouterr().out.strip().splitlines()
    assert LAST_LINE.fullmatch(lines[-1]), lines
    assert [line.partition(":")[0] for line in lines[:-1]] == ["step 1", "step 2"]
    recorded = read_metrics("runs/bare_loop")
    assert [len(metrics.completion_lengths) for metrics in recorded] == [128, 128]
    said = [f"step {metrics.step}: reward {metrics.scalars['reward']:.2f}" for metrics in recorded]
    assert said == lines[:-1]


def test_the_accelerate_loop_is_the_bare_loop_plus_accelerate():
    bare, accelerated = (
        (RECIPES / name).read_text().partition('"""\n')[2].splitlines()
        for name in ("bare_loop.py", "accelerate_grpo.py")
    )
    changes = [line for line in difflib.ndiff(bare, accelerated) if line[0] in "+-"]
    assert len(changes) <= MOST_LINES_OF_ACCELERATE, "\n".join(changes)


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [("7*2=14-5=9.", 1.0), ("7*2=14-5=9", 0.0), ("7*2=14.", 0.0), ("9.", 0.0), ("", 0.0)],
)
def test_a_reward_is_for_the_right_number_at_the_end(completion, wanted):
    assert bare_loop.reward("7*2=14-5=9", bare_loop.encode(completion)) == wanted


def test_training_and_held_out_problems_do_not_overlap():
    rng = random.Random(0)
    train = {bare_loop.draw_problem(rng)[0] for _ in range(300)}
    assert not train & {bare_loop.draw_problem(rng, held_out=True)[0] for _ in range(100)}


def test_the_loss_of_an_unchanged_policy_is_minus_the_mean_advantage_and_pushes_its_tokens():
    class Output:
        prompt_ids, generated_tokens = [3, 4], [5, 6, 1]

    torch.manual_seed(0)
    model = bare_loop.create_model()
    ids = torch.tensor([[3, 4, 5, 6, 1]])
    logits = model(input_ids=ids).logits[0, 1:-1].log_softmax(-1)
    Output.logprobs = logits.gather(1, ids[0, 2:, None])[:, 0].tolist()
    loss = bare_loop.grpo_loss(model, [Output], torch.tensor([2.0]))
    assert loss.item() == pytest.approx(-2.0, abs=1e-5)
    loss.backward()
    expected = torch.autograd.grad(
        -2 * (logits.gather(1, ids[0, 2:, None])).mean(), model.model.norm.weight
    )[0]
    assert torch.allclose(model.model.norm.weight.grad, expected, atol=1e-5)
