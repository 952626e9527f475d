"""Run recipes in processes of their own, and write their questions."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import IMPORTABLE, script_process

# A run that hangs is killed and fails the test.
RECIPES = Path(__file__).parents[2] / "recipes"
TIMEOUT_SECONDS = 240

# Of these two, the one that starts several processes on a CPU, and the one that starts one.
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
ACCELERATE = ("-m", "accelerate.commands.launch")


def run_recipe(
    name: str, *arguments: Any, launcher: tuple[str, ...] | None = None, **environment: str
) -> str:
    """Run a recipe and return its output; a failure shows the end of its stderr.

    Without a launcher it runs in a process that has the libraries imported; with one, which may be
    empty, in an interpreter of its own.
    """
    if launcher is None:
        script, words = RECIPES / f"{name}.py", list(map(str, arguments))
        return run_forked(script, words, os.environ | IMPORTABLE | environment)
    done = launched(name, *arguments, launcher=launcher, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def launched(
    name: str, *arguments: Any, launcher: tuple[str, ...], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a recipe by a launcher, and return how it ended."""
    return subprocess.run(
        [sys.executable, *launcher, str(RECIPES / f"{name}.py"), *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def run_forked(script: Path, arguments: list[str], environment: dict[str, str]) -> str:
    """Run a script in a process of `processes` and return its output."""
    with tempfile.TemporaryDirectory() as name:
        output, errors = Path(name) / "output", Path(name) / "errors"
        process = script_process(
            script, arguments, environment=environment, folder=Path.cwd(), log=output, errors=errors
        )
        process.join(TIMEOUT_SECONDS)
        process.kill()
        process.join()
        assert process.exitcode == 0, errors.read_text()[-3000:]
        return output.read_text()


def write_questions(path: Path) -> Path:
    """Write eight rows in the format of GSM8K."""
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
