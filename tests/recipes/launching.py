"""Run recipes in processes of their own, and write their questions."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# A run that hangs is killed and fails the test.
RECIPES = Path(__file__).parents[2] / "recipes"
TIMEOUT_SECONDS = 240

ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes")


def run_recipe(
    name: str, *arguments: Any, launcher: tuple[str, ...] = (), **environment: str
) -> str:
    """Run a recipe and return its output; a failure shows the end of its stderr."""
    done = subprocess.run(
        [sys.executable, *launcher, str(RECIPES / f"{name}.py"), *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def write_questions(path: Path) -> Path:
    """Write eight rows in the format of GSM8K."""
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
