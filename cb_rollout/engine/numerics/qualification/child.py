"""Run a function in a spawned process that may crash or hang, and read its answer.

The child is a new interpreter, not a fork: it has none of the parent's threads, locks or CUDA
context, and it does not run the parent's `__main__`. It imports the module of the function and
nothing else, so this module imports only the standard library. Any thread may call.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Run by the child with `-c`. Its standard input is a request.
ENTRY = """\
import json, sys
request = json.loads(sys.stdin.read())
sys.path[:] = request["sys_path"]
from cb_rollout.engine.numerics.qualification.child import answer
answer(request)
"""

# The child ends itself this much later, in case its parent is gone.
SECONDS_AFTER_LIMIT = 5

# Marks of the lines that the child writes.
BEGAN, RETURNED, RAISED, UNTRIED = "began", "returned", "raised", "untried"


class CannotTryError(Exception):
    """Raised by a function in a child that lacks what it needs; the tried code is not at fault."""


@dataclass(frozen=True, slots=True)
class ChildResult:
    """The end of a child process."""

    answer: Any = None
    """The JSON value that the function returned."""
    fault: str = ""
    """The way in which it failed: it raised, hung, or ended the process; "": it returned."""
    obstacle: str = ""
    """Why the function could not be tried, which says nothing about it; "": it was tried."""
    ran_out_of_time: bool = False
    """True if the fault is the time limit alone, as on a machine that was overloaded."""
    seconds: float = 0.0
    """From the start of the process to its end."""


def run_in_child(
    function: str,
    argument: Mapping[str, Any],
    *,
    limit_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> ChildResult:
    """Call a function in a child process, and wait for it.

    Args:
        function: "package.module:name"; takes `argument` and returns a JSON value.
        argument: JSON values.
        limit_seconds: the process is killed after this time.
        environment: variables of the child besides those of this process.
    """
    if not sys.executable:
        return ChildResult(obstacle="the path of this Python interpreter is not known")
    request = {
        "sys_path": [str(entry) for entry in sys.path],
        "function": function,
        "argument": dict(argument),
        "limit_seconds": limit_seconds,
    }
    begun = time.perf_counter()
    try:
        child = subprocess.Popen(
            # Without the working directory, where a file may be named like a module.
            [sys.executable, "-P", "-c", ENTRY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            # Its own group, so that what it starts can be killed with it.
            start_new_session=True,
        )
    except OSError as error:
        return ChildResult(obstacle=f"no process can be started ({error})")
    with child:
        is_late = False
        try:
            output, errors = child.communicate(json.dumps(request).encode(), limit_seconds)
        except subprocess.TimeoutExpired:
            is_late = True
            _kill(child)
            output, errors = child.communicate()
        except BaseException:
            _kill(child)
            raise
    seconds = time.perf_counter() - begun
    lines = _lines(output)
    return _result(lines, child.returncode, errors, is_late=is_late, seconds=seconds)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and every process that it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        child.kill()


def _lines(output: bytes) -> dict[str, Any]:
    """Return the lines that a child wrote, by their marks."""
    lines: dict[str, Any] = {}
    for line in output.splitlines():
        try:
            mark, value = json.loads(line)
        except ValueError:
            # It was killed in the middle of a line.
            continue
        lines[mark] = value
    return lines


def _result(
    lines: Mapping[str, Any], code: int, errors: bytes, *, is_late: bool, seconds: float
) -> ChildResult:
    """Return the outcome of a child process that ended.

    Args:
        lines: what it wrote, by mark.
        code: its exit code; negative: the signal that ended it.
        errors: what it wrote to stderr.
        is_late: True if it was ended because its time was up.
        seconds: how long it ran.
    """
    if RETURNED in lines:
        return ChildResult(answer=lines[RETURNED], seconds=seconds)
    if UNTRIED in lines:
        return ChildResult(obstacle=lines[UNTRIED], seconds=seconds)
    if RAISED in lines:
        return ChildResult(fault=f"raised {lines[RAISED]}", seconds=seconds)
    if BEGAN not in lines:
        last_words = errors.decode(errors="replace").strip().splitlines()[-1:]
        reason = "it took too long to start" if is_late else f"it ended with code {code}"
        return ChildResult(
            obstacle=": ".join([f"a child process did not run ({reason})", *last_words]),
            seconds=seconds,
        )
    if is_late or code == -signal.SIGALRM:
        fault = f"did not end within {seconds:.0f} s"
        return ChildResult(fault=fault, ran_out_of_time=True, seconds=seconds)
    if code == -signal.SIGKILL:
        # No function raises this signal. The system sends it to processes that use too much memory.
        reason = "a child process was killed from outside, as where memory runs out"
        return ChildResult(obstacle=reason, seconds=seconds)
    if code < 0:
        name = signal.Signals(-code).name
        return ChildResult(fault=f"was killed by {name}", seconds=seconds)
    return ChildResult(fault=f"ended the process with code {code}", seconds=seconds)


def answer(request: Mapping[str, Any]) -> None:
    """Call a request's function, in the child, and write its answer."""
    # A crash is an answer here: it leaves no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The signal ends the process even while C code runs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(request["limit_seconds"]) + SECONDS_AFTER_LIMIT)
    # Whatever prints to standard output must not mix with the answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(mark: str, value: Any) -> None:
        answers.write(f"{json.dumps([mark, value])}\n")
        answers.flush()

    module, _, name = request["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    write(BEGAN, None)
    try:
        returned = function(request["argument"])
    except (CannotTryError, MemoryError) as error:
        write(UNTRIED, f"{error}" or "a child process had no memory")
    except Exception as error:  # noqa: BLE001  it is the answer
        first_line, *_ = f"{error}".splitlines() or [""]
        write(RAISED, f"{type(error).__name__}: {first_line}")
    else:
        write(RETURNED, returned)
