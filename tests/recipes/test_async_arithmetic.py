"""The asynchronous recipe: two steps of each trainer, from one start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 240
# A run that hangs is killed and fails the test.

LAST_LINES = re.compile(
    r"asynchronous +(\d+\.\d)% -> +\d+\.\d%  in +\d+ s\n"
    r"synchronous +(\d+\.\d)% -> +\d+\.\d%  in +\d+ s\n$"
)


@pytest.mark.slow
def test_both_trainers_run_two_steps_from_the_same_start(tmp_path):
    result = subprocess.run(
        [
            *(sys.executable, str(ROOT / "recipes" / "async_arithmetic.py")),
            *("--warmup-steps", "5", "--max-steps", "2", "--num-held-out", "20"),
            *("--output-dir", str(tmp_path)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = LAST_LINES.search(result.stdout)
    assert found, result.stdout
    assert found[1] == found[2]
