"""Starts the processes of a distributed run on the CPU, and ends them whatever happens.

They are forked from a server that has imported `preloaded` and has run nothing: each has a state of
its own, and none spends its first seconds on imports.
"""

import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

TESTS = Path(__file__).parent.parent
TIMEOUT_SECONDS = 300
# A process that hangs in a collective is killed and fails the test; a sound run takes seconds.

PATHS = [
    *(TESTS.parent, TESTS.parent / "scripts"),
    *(TESTS, *(TESTS / n for n in ("training", "distributed", "families"))),
    os.environ.get("PYTHONPATH", ""),
]
IMPORTABLE = {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["preloaded"])


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_script(
    script: Path,
    arguments: list[str],
    environment: dict[str, str],
    folder: Path,
    log: Path,
    errors: Path | None = None,
) -> None:
    """Run a script as its own process does, with what it says in `log`."""
    with log.open("a") as written, (errors or log).open("a") as failed:
        os.dup2(written.fileno(), 1)
        os.dup2(failed.fileno(), 2)
    assert "preloaded" in sys.modules, "the server could not import what it was to"
    os.environ.clear()
    os.environ.update(environment)
    # The server has read it already.
    datasets.config.HF_DATASETS_CACHE = Path(
        environment.get("HF_DATASETS_CACHE", datasets.config.HF_DATASETS_CACHE)
    )
    os.chdir(folder)
    sys.path[:0] = [str(script.parent), *environment["PYTHONPATH"].split(os.pathsep)]
    sys.argv = [str(script), *arguments]
    torch.set_num_threads(1)
    runpy.run_path(str(script), run_name="__main__")


def script_process(script: Path, arguments: list[str], **settings: Any) -> BaseProcess:
    """Start `run_script` in a new process."""
    with pytest.MonkeyPatch.context() as patch:
        # The server of Python 3.11 is not told this process's path.
        patch.setenv("PYTHONPATH", IMPORTABLE["PYTHONPATH"])
        forkserver.ensure_running()
    settings |= {"script": script, "arguments": arguments}
    process = SERVER.Process(target=run_script, kwargs=settings)
    process.start()
    return process


def run_processes(script: str, *arguments: str, num_processes: int = 2) -> list[dict[str, Any]]:
    """Run `tests/<script>` as so many gloo processes.

    Each gets `arguments` and, as its last one, a file to write a JSON object to. Returns the
    objects by rank; fails with what the processes said if any of them did.
    """
    shared = IMPORTABLE | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes: list[BaseProcess] = []
        logs = [folder / f"{rank}.log" for rank in range(num_processes)]
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            for rank in range(num_processes):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(
                    script_process(
                        TESTS / script,
                        [*arguments, str(folder / f"{rank}.json")],
                        environment={**os.environ, **shared, **own},
                        folder=folder,
                        log=logs[rank],
                    )
                )
            for process in processes:
                process.join(max(0.1, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
        said = [
            f"rank {rank} ended with {process.exitcode}:\n{log.read_text() if log.exists() else ''}"
            for rank, (process, log) in enumerate(zip(processes, logs, strict=True))
        ]
        assert all(process.exitcode == 0 for process in processes), "\n".join(said)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
