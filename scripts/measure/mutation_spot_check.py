"""Break the package in places drawn at random, and print which of the faults the tests find.

`python scripts/measure/mutation_spot_check.py` draws four mutants in each of five rooms and runs
the fast tests of the room against each, until one fails. `--marks "not nightly"` runs the slow ones
too. One seed draws the same mutants as long as the package is the same, so that two states of the
tests can be compared: `--tests FOLDER` takes the tests of another checkout.

A mutant that no test finds is a hole in the tests, or computes what the code did.
"""

import argparse
import ast
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Every mutant is a fork of this process, and finds these imported.
import peft  # noqa: F401
import pytest
import torch
import transformers  # noqa: F401
import trl  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
# A mutant that never ends is found too.
TIMEOUT_SECONDS = 300
# Folders of the package, each with the tests that cover it.
ROOMS = {
    "engine/scheduler": ["tests/engine/scheduler", "tests/engine/service"],
    "engine/kv_cache": ["tests/engine/kv_cache"],
    "engine/sampling": ["tests/engine/sampling", "tests/invariants/test_sampling.py"],
    "packing": ["tests/packing", "tests/training/test_packed_batches.py"],
    "rollout/audit": ["tests/rollout/audit"],
}
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*"}


@dataclass(frozen=True)
class Mutant:
    """A change of one expression of a file."""

    path: Path
    line: int
    before: str
    after: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


def replacement(node: ast.AST) -> str | None:
    """Return what stands in place of an expression, or None where it stays."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            changed = COMPARISONS.get(type(operator))
            return changed and f"({ast.unparse(left)} {changed} {ast.unparse(right)})"
        case ast.BinOp(left=left, op=operator, right=right):
            changed = OPERATORS.get(type(operator))
            return changed and f"({ast.unparse(left)} {changed} {ast.unparse(right)})"
        case ast.BoolOp(op=operator, values=values):
            word = " or " if isinstance(operator, ast.And) else " and "
            return "(" + word.join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"bool({ast.unparse(operand)})"
    return None


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a file of the package."""
    text = (ROOT / path).read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(text)):
        after = replacement(node)
        if after is None:
            continue
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        # Types joined by | and texts joined by + are no arithmetic of the package.
        if '"' in text[start:end]:
            continue
        yield Mutant(path, node.lineno, text[start:end], after, start, end)


def draw(room: str, number: int, seed: int) -> list[Mutant]:
    """Return so many mutants of a room, each of another line."""
    files = sorted((ROOT / "cb_rollout" / room).rglob("*.py"))
    found = [mutant for path in files for mutant in mutants_of(path.relative_to(ROOT))]
    random.Random(f"{seed} {room}").shuffle(found)
    by_line = {(mutant.path, mutant.line): mutant for mutant in reversed(found)}
    return list(reversed(by_line.values()))[:number]


def run_tests(tree: Path, tests: list[str], marks: str, log: Path) -> int:
    """Run tests, and return pytest's exit code."""
    with log.open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.chdir(tree)
    sys.path[:0] = [str(tree), str(tree / "scripts"), str(tree / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
    torch.set_num_threads(1)
    arguments = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marks]
    # This process has imported what pytest would rewrite.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*arguments, *tests]))


def write(path: Path, text: str) -> None:
    """Write a module, and remove what was compiled of it within the same second."""
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def is_caught(mutant: Mutant, tree: Path, tests: list[str], marks: str, log: Path) -> bool:
    """Run tests against a mutant in a copy of the checkout."""
    own = (ROOT / mutant.path).read_text()
    write(tree / mutant.path, own[: mutant.start] + mutant.after + own[mutant.end :])
    pid = os.fork()
    if not pid:
        code = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            code = run_tests(tree, tests, f"({marks}) and not gpu and not multigpu", log)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            # What the parent has begun is not ended here.
            os._exit(code)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.2)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    write(tree / mutant.path, own)
    code = os.waitstatus_to_exitcode(status) if ended else 1
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise RuntimeError(f"pytest could not run:\n{log.read_text()[-2000:]}")
    return code != pytest.ExitCode.OK


def main() -> int:
    """Print each mutant with what became of it, and how many were found."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutants", type=int, default=4, help="how many a room")
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(ROOMS))
    parser.add_argument("--tests", type=Path, default=ROOT, help="the checkout that has the tests")
    parser.add_argument(
        "--marks",
        default="not slow and not nightly and not gpu and not multigpu",
        help="pytest's -m",
    )
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    num_caught = num_drawn = 0
    with tempfile.TemporaryDirectory() as name:
        tree, log = Path(name) / "checkout", Path(name) / "tests.log"
        unwanted = shutil.ignore_patterns(
            ".git", ".venv", ".compat", "build", "wandb", ".hypothesis"
        )
        shutil.copytree(options.tests, tree, ignore=unwanted)
        shutil.rmtree(tree / "cb_rollout")
        shutil.copytree(ROOT / "cb_rollout", tree / "cb_rollout")
        for room in options.rooms:
            for mutant in draw(room, options.mutants, options.seed):
                caught = is_caught(mutant, tree, ROOMS[room], options.marks, log)
                print("caught  " if caught else "survived", mutant, flush=True)
                num_drawn += 1
                num_caught += caught
    print(f"{num_caught} of {num_drawn} mutants are caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
