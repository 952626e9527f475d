"""Starts the processes of a distributed run on the CPU, and ends them whatever happens."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
TIMEOUT_SECONDS = 300
# A process that hangs in a collective is killed and fails the test; a sound run takes seconds.


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(script: str, *arguments: str, num_processes: int = 2) -> list[dict[str, Any]]:
    """Run `tests/<script>` as so many gloo processes.

    Each gets `arguments` and, as its last one, a file to write a JSON object to. Returns the
    objects by rank; fails with what the processes said if any of them did.
    """
    folders = [TESTS.parent, TESTS, *(TESTS / n for n in ("training", "distributed", "families"))]
    paths = [*folders, os.environ.get("PYTHONPATH", "")]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes, logs = [], []
        try:
            for rank in range(num_processes):
                logs.append((folder / f"{rank}.log").open("w+"))
                command = [sys.executable, str(TESTS / script), *arguments]
                processes.append(
                    subprocess.Popen(
                        [*command, str(folder / f"{rank}.json")],
                        env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=logs[-1],
                        stderr=subprocess.STDOUT,
                        cwd=folder,
                    )
                )
            deadline = time.monotonic() + TIMEOUT_SECONDS
            for process in processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = []
        for rank, log in enumerate(logs):
            log.seek(0)
            said.append(f"rank {rank} ended with {processes[rank].returncode}:\n{log.read()}")
            log.close()
        assert all(process.returncode == 0 for process in processes), "\n".join(said)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
