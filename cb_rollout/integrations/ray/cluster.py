"""Start workers on a Ray cluster, call them, and put tensors into its object store.

Owns the connection to the cluster, and waits for the processes of one pool. The only file that
imports ray. Called from any thread.
"""

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import distributed

from cb_rollout.config.enums import InFlight
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.integrations.ray.weight_update import WeightUpdate
from cb_rollout.integrations.ray.worker import PoolWorker, WorkerDescription, WorkItem

# Methods of a worker that run at the same time: a report, a submission, an update, a cancellation.
MAX_CONCURRENCY = 6

# Names of resources in `resources_per_worker`, as Ray's own trainers take them, and in actors.
RESOURCES = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}

# Advice if an argument of a call cannot be sent.
PICKLABLE = (
    "what SamplingParams holds must be picklable, and its modules installed on every machine"
)

# Time for a killed process of this machine to end.
END_SECONDS = 20.0

# Calls that change an engine run one after the other where the processes of a worker must agree.
ORDERED = "ordered"


class WorkerLostError(Exception):
    """A worker's process or machine ended."""


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """The actors of a worker, one for each of its tensor-parallel processes, the leader first."""

    actors: Sequence[Any]
    placement: Any = None
    """Ray's placement group, which reserves several actors' resources; None: there is one actor."""


class RolloutWorker:
    """A worker, or one shard of it, inside an actor's process."""

    def listen(self) -> tuple[str, int]:
        """Open the store through which a worker's processes find each other; return its address."""
        host = _ray().util.get_node_ip_address()
        self._store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(
        self, arguments: tuple[Any, ...], rank: int, size: int, address: tuple[str, int] | None
    ) -> tuple[WorkerDescription, str]:
        """Create the worker; return its description and its node's id."""
        if address is not None:
            self._join_shards(rank, size, address)
        self._worker = PoolWorker(*arguments)
        return self._worker.description(), _ray().get_runtime_context().get_node_id()

    def _join_shards(self, rank: int, size: int, address: tuple[str, int]) -> None:
        """Join the process group of the worker's shards; `address`: of the first shard's store."""
        # transformers puts a shard on the GPU of this number; Ray shows a process its own only.
        os.environ["LOCAL_RANK"] = "0"
        if rank == 0:
            store = self._store
        else:
            host, port = address
            store = distributed.TCPStore(host, port)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)

    def submit(self, items: Sequence[WorkItem]) -> None:
        self._worker.submit(items)

    def update(
        self, update: WeightUpdate, in_flight: InFlight, seconds: float, are_deltas: bool
    ) -> None:
        """Fetch an update's tensors or deltas, each once per node, and give them to the worker."""
        references = update.deltas if are_deltas else update.references
        arrays = _ray().get(list(references), timeout=seconds)
        self._worker.update(update, arrays, in_flight, are_deltas=are_deltas)


class Cluster:
    """A connection to the Ray cluster, for the workers of one pool."""

    def __init__(
        self, resources_per_worker: Mapping[str, float] | None, tensor_parallel_size: int = 1
    ) -> None:
        """Connect to this process's cluster, `RAY_ADDRESS`'s, a local one, or a new one.

        A worker is `tensor_parallel_size` actors, each with `resources_per_worker`.

        Raises:
            ImportError: ray is not installed.
            ConfigurationError: a resource is not a number >= 0.
        """
        self._ray = _ray()
        self._size = tensor_parallel_size
        self._processes: list[psutil.Process] = []
        # Checked before a cluster is made, because after an error nobody would end it.
        _require_amounts(resources_per_worker or {})
        self._is_own = not self._ray.is_initialized()
        if self._is_own:
            self._ray.init(include_dashboard=False, log_to_driver=False)
        if resources_per_worker is None and self._ray.cluster_resources().get("GPU"):
            resources: Mapping[str, float] = {"GPU": 1}
        else:
            resources = resources_per_worker or {"CPU": 1}
        self._resources = {name: amount for name, amount in resources.items() if amount}
        self._actors = self._actor_class(resources)

    def _actor_class(self, resources: Mapping[str, float]) -> Any:
        """Return Ray's class of actors that have these resources each."""
        # Without a number of CPUs, Ray would place an actor anywhere.
        rays_own: dict[str, float] = {"num_cpus": 0}
        of_cluster: dict[str, float] = {}
        for name, amount in resources.items():
            if name in RESOURCES:
                rays_own[RESOURCES[name]] = amount
            else:
                of_cluster[name] = amount
        make_actor_class = self._ray.remote(
            resources=of_cluster or None,
            max_concurrency=MAX_CONCURRENCY,
            concurrency_groups={ORDERED: 1},
            max_restarts=0,
            max_task_retries=0,
            **rays_own,
        )
        return make_actor_class(RolloutWorker)

    def start_worker(self, *arguments: Any) -> tuple[WorkerHandle, list[Any]]:
        """Ask for a worker; return it, and references of each process's description and node."""
        if self._size == 1:
            handle = WorkerHandle([self._actors.remote()])
            address = None
        else:
            handle = self._placed_together()
            address = handle.actors[0].listen.remote()
        started = []
        for rank, actor in enumerate(handle.actors):
            started.append(actor.start.remote(arguments, rank, self._size, address))
        return handle, started

    def _placed_together(self) -> WorkerHandle:
        """Ask for the actors of a split worker, all or none, on one machine if any has room."""
        placement = self._ray.util.placement_group([self._resources] * self._size, strategy="PACK")
        at_index = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actors = []
        for index in range(self._size):
            placed = self._actors.options(scheduling_strategy=at_index(placement, index))
            actors.append(placed.remote())
        return WorkerHandle(actors, placement)

    def record_process(self, process_id: int, node: str) -> None:
        """Make `close` wait for the end of a worker's process, if it is on this machine."""
        if node == self._ray.get_runtime_context().get_node_id():
            self._processes = [process for process in self._processes if process.is_running()]
            with suppress(psutil.NoSuchProcess):
                self._processes.append(psutil.Process(process_id))

    def call(self, handle: WorkerHandle, method: str, *arguments: Any) -> list[Any]:
        """Call the leading process of a worker; return the reference of its result."""
        return [handle.actors[0].call.remote(method, *arguments)]

    def call_all(self, handle: WorkerHandle, method: str, *arguments: Any) -> list[Any]:
        """Call `submit` or `update` on each process of a worker; split workers keep the call order.

        Return the references of their answers.
        """
        methods = [getattr(actor, method) for actor in handle.actors]
        if len(methods) > 1:
            methods = [method.options(concurrency_group=ORDERED) for method in methods]
        return [method.remote(*arguments) for method in methods]

    def get(self, reference: Any) -> np.ndarray:
        return self._ray.get(reference)

    def put(self, array: np.ndarray) -> Any:
        return self._ray.put(array)

    async def results(self, references: Sequence[Any]) -> list[Any]:
        """Wait for a call's results; raise an exception of a process here.

        Raises:
            WorkerLostError: the worker ended before or during the call.
            RolloutError: the worker could not read the call's arguments.
        """
        errors = self._ray.exceptions
        try:
            return await asyncio.gather(*references)
        except errors.RayTaskError as error:
            if isinstance(error.cause, errors.RaySystemError):
                reason = str(error.cause).splitlines()[0]
                raise RolloutError(f"{reason}; {PICKLABLE}.") from error
            raise error.cause from error
        except errors.RayError as error:
            raise WorkerLostError(str(error).splitlines()[0]) from error

    def resources(self) -> str:
        """Return the resources that a worker requests, and the cluster's total and free amounts."""
        asked = self._resources
        total = self._ray.cluster_resources()
        free = self._ray.available_resources()
        amounts = []
        for name in asked or ["CPU"]:
            amounts.append(f"{total.get(name, 0):g} {name}, {free.get(name, 0):g} of them free")
        return f"a worker asks for {self._size} x {asked}, the cluster has {'; '.join(amounts)}"

    def kill(self, handle: WorkerHandle) -> None:
        if not self._ray.is_initialized():
            return
        for actor in handle.actors:
            self._ray.kill(actor)
        if handle.placement is not None:
            self._ray.util.remove_placement_group(handle.placement)

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


def _require_amounts(resources: Mapping[str, float]) -> None:
    for name, value in resources.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigurationError(
                f"resources_per_worker={resources!r}: {name} is no number >= 0; write "
                "{'CPU': 4, 'GPU': 1}."
            )
