"""Start workers on a Ray cluster, call them, and put buffers into its object store.

Owns the connection to the cluster and the processes of one pool. The only file that imports ray.
Called from any thread.
"""

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from cb_rollout.config.enums import InFlight
from cb_rollout.errors import ConfigurationError, RolloutError, WeightSyncError
from cb_rollout.integrations.ray.weight_update import WeightUpdate
from cb_rollout.integrations.ray.worker import PoolWorker, WorkerDescription

# Methods of a worker that run at the same time: a report, a submission, an update, a cancellation.
MAX_CONCURRENCY = 6

# Ray's words, which its own trainers take in `resources_per_worker`, and those of its actors.
RESOURCES = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}

# Advice where an argument of a call cannot travel.
PICKLABLE = (
    "what SamplingParams holds must be picklable, and its modules installed on every machine"
)

# Time for a killed process of this machine to end.
END_SECONDS = 20.0


class WorkerLostError(Exception):
    """A worker's process or machine ended."""


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """A worker's actor."""

    actor: Any


class RolloutWorker:
    """A worker inside of its actor's process."""

    def __init__(self) -> None:
        self._worker: PoolWorker | None = None

    def start(self, arguments: tuple[Any, ...]) -> tuple[WorkerDescription, str]:
        """Make the worker; return its description and its node."""
        self._worker = PoolWorker(*arguments)
        node = _ray().get_runtime_context().get_node_id()
        return self._worker.description(), node

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        assert self._worker is not None, "not started"
        return getattr(self._worker, method)(*arguments)

    def update(
        self, update: WeightUpdate, references: Sequence[Any], in_flight: InFlight, seconds: float
    ) -> None:
        """Fetch an update's buffers, each once per node, and give them to the worker."""
        assert self._worker is not None, "not started"
        ray = _ray()
        try:
            buffers = ray.get(list(references), timeout=seconds)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ObjectLostError) as error:
            raise WeightSyncError(
                f"weights of version {update.version} are cut off: {type(error).__name__} while "
                f"their {update.num_bytes} bytes were fetched in {seconds:g} s. Nothing was "
                "written; raise timeout_seconds, or give Ray a larger object store."
            ) from error
        self._worker.update(update, buffers, in_flight)


class Cluster:
    """A connection to the Ray cluster, for the workers of one pool."""

    def __init__(self, resources_per_worker: Mapping[str, float] | None) -> None:
        """Connect: to the cluster that this process is in or `RAY_ADDRESS` names, else a new one.

        Args:
            resources_per_worker: as `{"CPU": 4, "GPU": 1}`, other names being the cluster's own;
                None: one GPU where the cluster has GPUs, else one CPU.

        Raises:
            ImportError: ray is not installed.
            ConfigurationError: a resource is no number >= 0.
        """
        ray = _ray()
        # Before a cluster is made, which nobody would end.
        options = _actor_options(resources_per_worker or {})
        self._is_own = not ray.is_initialized()
        if self._is_own:
            ray.init(include_dashboard=False, log_to_driver=False)
        if resources_per_worker is None:
            kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
            options = _actor_options({kind: 1})
        self._options = options
        self._actors = ray.remote(RolloutWorker)
        self._processes: list[psutil.Process] = []
        self._handles: list[WorkerHandle] = []

    def start_worker(self, *arguments: Any) -> tuple[WorkerHandle, Any]:
        """Ask for a worker; return its handle, and the reference of its description and node."""
        actor = self._actors.options(**self._options).remote()
        handle = WorkerHandle(actor)
        self._handles.append(handle)
        return handle, actor.start.remote(arguments)

    def note_process(self, process_id: int, node: str) -> None:
        """Note a worker's process, whose end is waited for if it is on this machine."""
        if node == _ray().get_runtime_context().get_node_id():
            self._processes = [one for one in self._processes if one.is_running()]
            with suppress(psutil.NoSuchProcess):
                self._processes.append(psutil.Process(process_id))

    def call(self, handle: WorkerHandle, method: str, *arguments: Any) -> Any:
        """Call a method of a worker; return the reference of its result."""
        return handle.actor.call.remote(method, *arguments)

    def update(
        self,
        handle: WorkerHandle,
        update: WeightUpdate,
        references: Sequence[Any],
        in_flight: InFlight,
        seconds: float,
    ) -> Any:
        """Have a worker fetch and take weights; return the reference of its result."""
        return handle.actor.update.remote(update, list(references), in_flight, seconds)

    def put(self, buffer: np.ndarray) -> Any:
        """Put a buffer into the object store of this node; return its reference."""
        return _ray().put(buffer)

    def finished(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Wait for a result, at most `seconds`; return the references of all that are there."""
        ray = _ray()
        found, rest = ray.wait(list(references), num_returns=1, timeout=seconds, fetch_local=True)
        if found and rest:
            found += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return found

    def result(self, reference: Any) -> Any:
        """Return the result of a finished call.

        Raises:
            WorkerLostError: the worker ended before or during the call.
            RolloutError: the worker could not read the call's arguments.
            Exception: the exception that the call raised.
        """
        ray = _ray()
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RaySystemError):
                reason = str(error.cause).splitlines()[0]
                raise RolloutError(f"{reason}; {PICKLABLE}.") from error
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise WorkerLostError(str(error).splitlines()[0]) from error

    def resources(self) -> dict[str, float]:
        """Return the cluster's resources."""
        return dict(_ray().cluster_resources())

    def kill(self, handle: WorkerHandle) -> None:
        """End a worker's process."""
        _ray().kill(handle.actor, no_restart=True)
        if handle in self._handles:
            self._handles.remove(handle)

    def close(self) -> None:
        """End all workers and wait for their processes here; leave a cluster that was made here."""
        ray = _ray()
        if ray.is_initialized():
            for handle in list(self._handles):
                self.kill(handle)
        psutil.wait_procs(self._processes, END_SECONDS)
        if self._is_own and ray.is_initialized():
            ray.shutdown()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            "RolloutPool needs ray and xxhash: pip install 'cb_rollout[ray]'."
        ) from error


def _actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    for name, value in resources.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigurationError(
                f"resources_per_worker={dict(resources)!r}: {name} is no number >= 0; write "
                "{'CPU': 4, 'GPU': 1}."
            )
    own = {name: value for name, value in resources.items() if name not in RESOURCES}
    known = {RESOURCES[name]: value for name, value in resources.items() if name in RESOURCES}
    # An actor without a CPU here would be placed anywhere.
    known.setdefault("num_cpus", 0 if known or own else 1)
    return known | {
        "resources": own or None,
        "max_concurrency": MAX_CONCURRENCY,
        "max_restarts": 0,
        "max_task_retries": 0,
    }
