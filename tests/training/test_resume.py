"""A run that was killed amid a rollout goes on from its checkpoint as if it had not been."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from tiny_trainer import PROBLEMS, share_of_sevens, tiny_trainer

from cb_rollout import attach, detach
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.metrics.run_records import list_runs
from cb_rollout.strategies import DynamicSampling, Plain

FOLDER = Path(__file__).parent
TIMEOUT_SECONDS = 240


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [FOLDER.parents[1], FOLDER.parent, FOLDER]
    return subprocess.run(
        [sys.executable, str(FOLDER / "resumed_training.py"), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def sampled(output_dir, strategy, resumes=None, **settings):
    """The completions of each training rollout."""
    completions_of = []
    trainer = None

    def reward(completions, **_):
        if trainer.model.training:
            completions_of.append(list(completions))
        return share_of_sevens(completions)

    data = Dataset.from_list(PROBLEMS)
    trainer = tiny_trainer(
        output_dir,
        reward=reward,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        trainer_arguments={"eval_dataset": data.select(range(4))},
        num_hidden_layers=1,
        num_generations_eval=1,
        **settings,
    )
    attach(trainer)
    use_strategy(trainer, strategy)
    trainer.train(resume_from_checkpoint=resumes)
    detach(trainer)
    return completions_of


@pytest.mark.parametrize("eval_steps", [1, 2, 3])
@pytest.mark.parametrize("strategy", [Plain(), DynamicSampling()], ids=["plain", "dynamic"])
def test_an_evaluation_before_the_checkpoint_leaves_the_draws_after_it(
    tmp_path, strategy, eval_steps
):
    settings = {"eval_strategy": "steps", "eval_steps": eval_steps}
    whole = sampled(tmp_path, strategy, **settings)
    resumed = sampled(tmp_path, strategy, str(tmp_path / "checkpoint-2"), **settings)
    assert len(resumed) >= 2
    assert resumed == whole[-len(resumed) :]


@pytest.mark.slow
def test_prompts_come_in_the_same_order_and_no_policy_is_stale(tmp_path):
    killed = run("kill", str(tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert sorted(p.name for p in (tmp_path / "killed").glob("checkpoint-*"))[-1] == "checkpoint-2"
    done = run("resume", str(tmp_path), str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    resumed, whole = results["resumed"], results["whole"]
    assert len(whole["prompts"]) == 4
    assert resumed["prompts"] == whole["prompts"][2:]
    assert whole["prompts"][2] != whole["prompts"][0]
    assert resumed["completions"] == whole["completions"][2:]
    assert whole["completions"][2] != whole["completions"][0]
    # The log holds the steps before the checkpoint too.
    assert resumed["steps"] == [1, 2, 3, 4]
    first, second = list_runs(tmp_path / "killed")
    assert (second.continues, second.steps) == ({first.run_id: 2}, [1, 2, 3, 4])
    assert max(resumed["differences"] + resumed["drifts"]) <= 1e-5
