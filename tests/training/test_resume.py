"""A run that was killed amid a rollout goes on from its checkpoint as if it had not been."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cb_rollout.metrics.run_records import list_runs

pytestmark = pytest.mark.slow

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
