"""A run that is resumed from any checkpoint trains what the run that goes on trains."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from counted_rows import ROWS
from datasets import Dataset
from exact_runs import KILLED_AFTER, STRATEGIES, Run, assert_same_end
from nightly import slow_after, some_slow
from trl import RLOOConfig, RLOOTrainer

from cb_rollout.strategies import OverSampling, PartialRollouts, Plain

FOLDER = Path(__file__).parent
TIMEOUT_SECONDS = 240

RLOO = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}
# A generation of two steps, and each trained twice.
DIVIDED = {"steps_per_generation": 2, "per_device_train_batch_size": 2, "num_iterations": 2}
ACCUMULATED = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def resumed_from_each(tmp_path, strategy, steps, **settings):
    """Yield a run without checkpoints, and for each step one that goes on from its checkpoint."""
    whole = Run(tmp_path / "whole", strategy, **settings)
    saving = Run(tmp_path / "saving", strategy, save_strategy="steps", save_steps=1, **settings)
    assert_same_end(saving, whole)
    for step in steps:
        checkpoint = tmp_path / "saving" / f"checkpoint-{step}"
        yield whole, Run(tmp_path / str(step), strategy, resume=checkpoint, **settings)


@pytest.mark.parametrize("name", slow_after(1, ["partial", "plain", "over", "dynamic"]))
def test_a_run_resumed_after_any_step_trains_the_same_rows_to_the_same_weights(tmp_path, name):
    strategy = STRATEGIES[name]
    for whole, resumed in resumed_from_each(tmp_path, strategy, range(1, 6)):
        assert_same_end(resumed, whole)
    versions = {version for row in whole.trained for version in row.versions}
    assert max(versions) == 6
    carried = [row for row in whole.trained if len(set(row.versions)) > 1]
    assert bool(carried) == strategy.carries


@pytest.mark.parametrize("name", slow_after(1, ["partial", "plain", "dynamic"]))
def test_a_generation_of_several_steps_is_trained_to_its_end(tmp_path, name):
    steps = range(1, 6) if name == "partial" else (1, 3)
    for whole, resumed in resumed_from_each(tmp_path, STRATEGIES[name], steps, **DIVIDED):
        assert_same_end(resumed, whole)


@pytest.mark.parametrize(
    ("name", "settings"),
    slow_after(1, [(None, {}), ("partial", {}), (None, DIVIDED), ("dynamic", {})]),
)
def test_a_run_goes_on_in_the_order_of_a_later_pass(tmp_path, name, settings):
    # Passes of three generations; without a strategy the trainer's own loader hands out the rows.
    data = {"train_dataset": Dataset.from_list(ROWS[:6])}
    settings = {**settings, "num_train_epochs": 9, "trainer_arguments": data}
    strategy = STRATEGIES.get(name)
    for whole, resumed in resumed_from_each(tmp_path, strategy, (2, 3, 5), **settings):
        assert_same_end(resumed, whole)


def test_sampled_log_probabilities_are_trusted_as_they_were(tmp_path):
    """Else the old ones would be recomputed after a resume, and in 16 bits they differ."""
    settings = {"old_logps": "auto", "bf16": True, "num_iterations": 2}
    for whole, resumed in resumed_from_each(tmp_path, None, (2, 4), **settings):
        assert_same_end(resumed, whole)


@pytest.mark.parametrize("settings", [RLOO, ACCUMULATED], ids=["rloo", "accumulated"])
@pytest.mark.parametrize("name", some_slow(["partial", "over", "dynamic", "plain"], every=2))
def test_other_trainers_and_batches_resume_exactly(tmp_path, name, settings):
    for whole, resumed in resumed_from_each(tmp_path, STRATEGIES[name], (2, 5), **settings):
        assert_same_end(resumed, whole)


@pytest.mark.parametrize("name", slow_after(1, ["partial", "over"]))
def test_evaluations_between_the_steps_leave_it_exact(tmp_path, name):
    for whole, resumed in resumed_from_each(tmp_path, STRATEGIES[name], (2, 3), **EVALUATED):
        assert_same_end(resumed, whole)


def test_the_same_trainer_goes_back_to_its_checkpoint(tmp_path):
    """Its policy versions are higher then, and each token as old as it was."""
    strategy = STRATEGIES["partial"]
    run = Run(tmp_path, strategy, save_strategy="steps", save_steps=1, is_attached=True)
    trained = list(run.trained)
    weights = run.weights
    run.train(resume=tmp_path / "checkpoint-2")
    again = run.trained[len(trained) :]
    run.close()
    assert [row.tokens for row in again] == [row.tokens for row in trained if row.step >= 2]
    for name, weight in run.weights.items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-6)


def lost_file(checkpoint):
    next(checkpoint.glob("cb_rollout_*.pt")).unlink()


def cut_file(checkpoint):
    path = next(checkpoint.glob("cb_rollout_*.pt"))
    path.write_bytes(path.read_bytes()[:-300])


def other_format(checkpoint):
    path = next(checkpoint.glob("cb_rollout_*.pt"))
    state = torch.load(path, weights_only=True)
    state["header"]["format"] = 0
    torch.save(state, path)


def file_of_no_state(checkpoint):
    path = next(checkpoint.glob("cb_rollout_*.pt"))
    torch.save([1, 2, 3], path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lost_file, ["nothing of this process that can be read: the rows that were half done are"]),
        (cut_file, ["00000.pt cannot be read", "the rows that were half done are sampled again"]),
        (other_format, ["is of format=0, and now it is 1", "half done are sampled again"]),
        (file_of_no_state, ["00000.pt cannot be read", "half done are sampled again"]),
    ],
)
def test_a_checkpoint_without_a_state_that_can_be_read_samples_again(tmp_path, damage, said):
    strategy = STRATEGIES["partial"]
    Run(tmp_path / "saved", strategy, save_strategy="steps", save_steps=2, max_steps=2)
    checkpoint = tmp_path / "saved" / "checkpoint-2"
    damage(checkpoint)
    resumed, found = warned(tmp_path / "resumed", strategy, checkpoint)
    assert len(found) == len(said)
    for message, words in zip(found, said, strict=True):
        assert words in message
    assert [row.step for row in resumed.trained] == [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4


@pytest.mark.parametrize(
    "other", [OverSampling(num_extra_groups=3), PartialRollouts(num_extra_groups=2), Plain()]
)
def test_another_strategy_than_the_checkpoints_samples_again(tmp_path, other):
    Run(tmp_path / "saved", STRATEGIES["partial"], save_strategy="steps", save_steps=2, max_steps=2)
    resumed, found = warned(tmp_path / "resumed", other, tmp_path / "saved" / "checkpoint-2")
    # A run without a strategy leaves the rows out.
    expected = [] if isinstance(other, Plain) else [f"and is {type(other).__name__}(num_extra_"]
    assert len(found) == len(expected)
    for message, words in zip(found, expected, strict=True):
        assert "the checkpoint's strategy was PartialRollouts(num_extra_groups=3, " in message
        assert words in message
        assert message.endswith("the rows that were half done are sampled again, first of all.")
    assert {row.step for row in resumed.trained} == {2, 3, 4, 5}


def warned(folder, strategy, checkpoint):
    """Return a run that goes on from a checkpoint, and what cb_rollout warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(folder, strategy, resume=checkpoint)
    found = [str(warning.message) for warning in caught]
    return run, [message for message in found if "half done" in message]


def run_apart(*arguments):
    paths = [FOLDER.parents[1], FOLDER.parent, FOLDER]
    return subprocess.run(
        [sys.executable, str(FOLDER / "exact_runs.py"), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "partial"])
def test_a_process_that_is_killed_amid_a_rollout_goes_on_exactly(tmp_path, name):
    killed = run_apart("kill", name, tmp_path / "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    checkpoints = sorted(path.name for path in (tmp_path / "killed").glob("checkpoint-*"))
    assert checkpoints[-1] == f"checkpoint-{KILLED_AFTER}"
    for what in ("resume", "whole"):
        done = run_apart(what, name, tmp_path / "killed", tmp_path / f"{what}.json")
        assert done.returncode == 0, done.stderr[-3000:]
    resumed, whole = (
        json.loads((tmp_path / f"{what}.json").read_text()) for what in ("resume", "whole")
    )
    assert resumed["rows"] == [row for row in whole["rows"] if row["step"] >= KILLED_AFTER]
    assert len(resumed["rows"]) >= 8
    for name, values in whole["weights"].items():
        assert resumed["weights"][name] == pytest.approx(values, abs=1e-6)
