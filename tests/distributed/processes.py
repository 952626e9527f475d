"""Starts the processes of a distributed run on the CPU, and ends them whatever happens.

They are forked from a server that has imported `preloaded` and has run nothing: each has a state of
its own, and none spends its first seconds on imports.

A run counts its processes: each notes the ids of all that joined its process group.
"""

import functools
import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState

from cb_rollout.compat.fsdp import default_store

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


def asked_for(
    request: pytest.FixtureRequest, names: Sequence[str], parameter: str = "way"
) -> list[str]:
    """Return the names that the selected tests read, in order; a run leaves out the others.

    A test reads its own value of the parameter, and the names of its mark `ways`.
    """
    read: set[str] = set()
    for item in request.session.items:
        if item.path != request.path or request.fixturename not in item.fixturenames:
            continue
        for mark in item.iter_markers("ways"):
            read.update(mark.args)
        if hasattr(item, "callspec") and parameter in item.callspec.params:
            read.add(item.callspec.params[parameter])
    unknown = read.difference(names)
    assert not unknown, f"{request.fixturename} has no {sorted(unknown)}"
    return [name for name in names if name in read]


def note_members() -> list[int]:
    """Return a list that gets the ids of the process group's processes once there is a group."""
    members: list[int] = []
    join = dist.init_process_group

    @functools.wraps(join)
    def joined(*arguments: Any, **settings: Any) -> None:
        join(*arguments, **settings)
        store = default_store()
        store.set(f"members/{dist.get_rank()}", str(os.getpid()))
        ranks = range(dist.get_world_size())
        for rank in ranks:
            members.append(int(store.get(f"members/{rank}")))
        # Rank 0 serves the store: it may end only once every other process has read it.
        store.set(f"has_read/{dist.get_rank()}", "")
        if dist.get_rank() == 0:
            store.wait([f"has_read/{rank}" for rank in ranks])

    dist.init_process_group = joined
    return members


def require_one_group(notes: list[dict[str, Any]]) -> None:
    """Fail unless the processes that wrote these notes, by rank, are one process group.

    Where a process has used accelerate, that must have counted all of them too: else each trained
    alone beside the others.
    """
    pids = [note["pid"] for note in notes]
    assert len(set(pids)) == len(notes), f"one process ran as several ranks: {pids}"
    for rank, note in enumerate(notes):
        assert note["members"] == pids, f"rank {rank} was in a group of {note['members']}"
        num_counted = note["num_by_accelerate"]
        assert num_counted in (None, len(pids)), f"accelerate counts {num_counted} on rank {rank}"


def run_script(
    script: Path,
    arguments: list[str],
    environment: dict[str, str],
    folder: Path,
    log: Path,
    errors: Path | None = None,
    note: Path | None = None,
) -> None:
    """Run a script as its own process does, with what it says in `log`.

    `note` gets what `require_one_group` reads.
    """
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
    members = note_members()
    runpy.run_path(str(script), run_name="__main__")
    if note is not None:
        num_by_accelerate = PartialState._shared_state.get("num_processes")
        found = {"pid": os.getpid(), "members": members, "num_by_accelerate": num_by_accelerate}
        note.write_text(json.dumps(found))


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


def run_processes(
    script: str, *arguments: str, num_processes: int = 2, num_machines: int = 1
) -> list[dict[str, Any]]:
    """Run `tests/<script>` as so many gloo processes.

    They are told that they are on so many machines, neighbouring ranks on one.

    Each gets `arguments` and, as its last one, a file to write a JSON object to. Returns the
    objects by rank; fails with what the processes said if any of them did, and where they were not
    one process group.
    """
    num_local = num_processes // num_machines
    shared = IMPORTABLE | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_local),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes: list[BaseProcess] = []
        logs = [folder / f"{rank}.log" for rank in range(num_processes)]
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            for rank in range(num_processes):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank % num_local)}
                processes.append(
                    script_process(
                        TESTS / script,
                        [*arguments, str(folder / f"{rank}.json")],
                        environment={**os.environ, **shared, **own},
                        folder=folder,
                        log=logs[rank],
                        note=folder / f"{rank}.note",
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
        notes = [folder / f"{rank}.note" for rank in range(num_processes)]
        require_one_group([json.loads(note.read_text()) for note in notes])
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
