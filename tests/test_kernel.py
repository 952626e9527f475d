"""The kernel runs rollouts and scores them, whichever other rooms of the package are missing."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kernel_alone
import pytest

import cb_rollout

PACKAGE = Path(cb_rollout.__file__).parent
TESTS = Path(__file__).parent

# A rollout and its loss need these rooms, whole or in part. Whatever else is in the tree is a
# guest: a new file of such a room, or a new room, has to be one too, or it is listed here.
WHOLE_ROOMS = {"engine", "weights", "packing", "compat", "config", "errors", "types"}
PARTS = {
    "rollout": {
        *("generator", "batches", "prompts", "distributed", "kept"),
        *("progress", "verification"),
    },
    "metrics": {"registry", "observer", "live_metrics"},
}


def children(folder: Path) -> list[str]:
    """Names of the modules and rooms in a folder."""
    names: list[str] = []
    for entry in folder.iterdir():
        is_room = entry.is_dir() and (entry / "__init__.py").exists()
        is_module = entry.suffix == ".py" and entry.stem != "__init__"
        if is_room or is_module:
            names.append(entry.stem)
    return sorted(names)


def guests() -> list[str]:
    """Modules and rooms of the package that no rollout needs; of most rooms each entry."""
    found: list[str] = []
    for room in children(PACKAGE):
        if room in WHOLE_ROOMS:
            continue
        if room not in PARTS:
            found.append(f"cb_rollout.{room}")
        if (PACKAGE / room).is_dir():
            others = set(children(PACKAGE / room)) - PARTS.get(room, set())
            found += (f"cb_rollout.{room}.{name}" for name in sorted(others))
    return found


GUESTS = guests()


def loaded_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run where a module is imported, in order."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_typing = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
        if is_typing:
            continue
        yield statement
        yield from loaded_statements(getattr(statement, "body", []))


def file_of(name: str) -> Path | None:
    """The file of a module of the package; None: the name is something in a module."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.exists():
            return file
    return None


def imports_of(name: str) -> set[str]:
    """Modules of the package that an import of this one loads directly, and their rooms."""
    file = file_of(name)
    assert file is not None, name
    named: set[str] = set()
    for statement in loaded_statements(ast.parse(file.read_text()).body):
        if isinstance(statement, ast.Import):
            named.update(alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            named.add(statement.module)
            named.update(f"{statement.module}.{alias.name}" for alias in statement.names)
    found: set[str] = set()
    for module in named:
        parts = module.split(".")
        if parts[0] == "cb_rollout" and file_of(module) is not None:
            found.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return found


@cache
def loaded_with_the_kernel() -> frozenset[str]:
    """Modules that an import of the kernel loads, by the texts of the modules."""
    loaded: set[str] = set()
    pending = [f"cb_rollout.{name}" for name in kernel_alone.KERNEL]
    pending += [f"cb_rollout.{name}" for name in ("rollout", "packing")]
    while pending:
        name = pending.pop()
        if name not in loaded:
            loaded.add(name)
            pending += imports_of(name)
    return frozenset(loaded)


@pytest.mark.parametrize("guest", GUESTS)
def test_the_kernel_imports_no_guest(guest):
    assert guest not in loaded_with_the_kernel()


def test_imports_are_followed_through_the_modules_of_the_kernel():
    loaded = loaded_with_the_kernel()
    assert {"cb_rollout.engine.service.loop", "cb_rollout.engine.attention.cpu.regions"} <= loaded
    assert {"cb_rollout.weights.source", "cb_rollout.metrics.live_metrics"} <= loaded


@pytest.fixture(scope="module")
def alone():
    """What one process found that could import no guest."""
    paths = [str(PACKAGE.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, str(TESTS / "kernel_alone.py"), *GUESTS],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_kernel_samples_and_scores_alone_what_it_does_among_its_guests(alone):
    expected = kernel_alone.rolled_out()
    assert alone["tokens"] == expected["tokens"]
    for name in ("logprobs", "scored"):
        for ours, theirs in zip(alone[name], expected[name], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("guest", GUESTS)
def test_a_rollout_asks_for_no_guest(guest, alone):
    assert guest not in alone["asked"]
    # The test could fail: whoever asks is refused.
    assert guest in alone["refused"]


def test_the_guests_are_those_that_the_tree_has():
    assert {"cb_rollout.server", "cb_rollout.integrations.ray", "cb_rollout.tools"} <= set(GUESTS)
    assert {"cb_rollout.rollout.saved", "cb_rollout.metrics.wandb"} <= set(GUESTS)
    for room, names in PARTS.items():
        assert names <= set(children(PACKAGE / room)), "listed, and not in the tree"
