"""Start workers on a Ray cluster, call them, and put tensors into its object store.

Owns the connection to the cluster, and waits for the processes of one pool. The only file that
imports ray. Called from any thread.
"""

import importlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import psutil

from cb_rollout.config.enums import InFlight
from cb_rollout.errors import ConfigurationError, RolloutError
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


class RolloutWorker:
    """A worker inside of its actor's process."""

    def start(self, arguments: tuple[Any, ...]) -> tuple[WorkerDescription, str]:
        """Make the worker; return its description and its node's id."""
        self._worker = PoolWorker(*arguments)
        return self._worker.description(), _ray().get_runtime_context().get_node_id()

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)

    def update(
        self, update: WeightUpdate, in_flight: InFlight, seconds: float, are_deltas: bool
    ) -> None:
        """Fetch an update's tensors or deltas, each once per node, and give them to the worker."""
        references = update.deltas if are_deltas else update.references
        arrays = _ray().get(list(references), timeout=seconds)
        self._worker.update(update, arrays, in_flight, are_deltas=are_deltas)


class Cluster:
    """A connection to the Ray cluster, for the workers of one pool."""

    def __init__(self, resources_per_worker: Mapping[str, float] | None) -> None:
        """Connect to a cluster: this process's, `RAY_ADDRESS`'s, one that runs here, or a new one.

        Raises:
            ImportError: ray is not installed.
            ConfigurationError: a resource is no number >= 0.
        """
        self._ray = ray = _ray()
        # Before a cluster is made, which nobody would end.
        options = _actor_options(resources_per_worker or {})
        self._is_own = not ray.is_initialized()
        if self._is_own:
            ray.init(include_dashboard=False, log_to_driver=False)
        if resources_per_worker is None:
            options = _actor_options({"GPU" if self.resources().get("GPU") else "CPU": 1})
        self._actors = ray.remote(**options)(RolloutWorker)
        self._processes: list[psutil.Process] = []

    def start_worker(self, *arguments: Any) -> tuple[Any, Any]:
        """Ask for a worker; return its actor, and the reference of its description and node."""
        actor = self._actors.remote()
        return actor, actor.start.remote(arguments)

    def record_process(self, process_id: int, node: str) -> None:
        """Have `close` wait for the end of a worker's process, if it is on this machine."""
        if node == self._ray.get_runtime_context().get_node_id():
            self._processes = [process for process in self._processes if process.is_running()]
            with suppress(psutil.NoSuchProcess):
                self._processes.append(psutil.Process(process_id))

    def call(self, actor: Any, method: str, *arguments: Any) -> Any:
        return actor.call.remote(method, *arguments)

    def update(
        self,
        actor: Any,
        update: WeightUpdate,
        in_flight: InFlight,
        seconds: float,
        are_deltas: bool,
    ) -> Any:
        """Have a worker fetch and take weights; return the reference of its result."""
        return actor.update.remote(update, in_flight, seconds, are_deltas)

    def get(self, reference: Any) -> np.ndarray:
        return self._ray.get(reference)

    def put(self, array: np.ndarray) -> Any:
        return self._ray.put(array)

    async def result(self, reference: Any) -> Any:
        """Wait for a call's result; an exception that the call raised is raised here.

        Raises:
            WorkerLostError: the worker ended before or during the call.
            RolloutError: the worker could not read the call's arguments.
        """
        errors = self._ray.exceptions
        try:
            return await reference
        except errors.RayTaskError as error:
            if isinstance(error.cause, errors.RaySystemError):
                reason = str(error.cause).splitlines()[0]
                raise RolloutError(f"{reason}; {PICKLABLE}.") from error
            raise error.cause from error
        except errors.RayError as error:
            raise WorkerLostError(str(error).splitlines()[0]) from error

    def resources(self) -> dict[str, float]:
        return dict(self._ray.cluster_resources())

    def kill(self, actor: Any) -> None:
        if self._ray.is_initialized():
            self._ray.kill(actor)

    def close(self) -> None:
        """Wait for the killed processes here; leave a cluster that was made here."""
        psutil.wait_procs(self._processes, END_SECONDS)
        if self._is_own and self._ray.is_initialized():
            self._ray.shutdown()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError("RolloutPool needs ray: pip install 'cb_rollout[ray]'.") from error


def _actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    for name, value in resources.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigurationError(
                f"resources_per_worker={dict(resources)!r}: {name} is no number >= 0; write "
                "{'CPU': 4, 'GPU': 1}."
            )
    own = {name: value for name, value in resources.items() if name not in RESOURCES}
    of_ray = {RESOURCES[name]: value for name, value in resources.items() if name in RESOURCES}
    # An actor without a CPU here would be placed anywhere.
    of_ray.setdefault("num_cpus", 0 if of_ray or own else 1)
    return of_ray | {
        "resources": own or None,
        "max_concurrency": MAX_CONCURRENCY,
        "max_restarts": 0,
        "max_task_retries": 0,
    }
