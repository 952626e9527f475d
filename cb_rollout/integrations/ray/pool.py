"""Sample rollouts on workers of a Ray cluster, with the interface of `RolloutGenerator`.

Owns request ids, seeds and policy versions. Called from training code, on any thread; if several
processes share a pool, on the training thread of each.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, Self, TypeVar

import torch
from torch import distributed

from cb_rollout.config.combinations import refused
from cb_rollout.config.compilation import require_compiled_so
from cb_rollout.config.enums import InFlight, ReleaseCache, WeightSync
from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.input_processor import InputProcessor
from cb_rollout.engine.service.lockstep import EngineGroup
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import ConfigurationError, EngineDeadError, RolloutError
from cb_rollout.integrations.ray.cluster import Cluster
from cb_rollout.integrations.ray.manager import PoolManager
from cb_rollout.integrations.ray.weight_update import (
    DeltaCodec,
    WeightUpdate,
    WorkerTensor,
    bytes_of,
    new_values,
    require_base,
)
from cb_rollout.integrations.ray.worker import WorkerDescription
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.observer import observer
from cb_rollout.metrics.registry import EngineCounters, EngineStatus, status_metrics
from cb_rollout.rollout.batches import (
    BatchArguments,
    batch_arguments,
    broadcast_refusal,
    create_requests,
    gathered,
    outputs_of,
    require_finished,
    unfinished,
)
from cb_rollout.rollout.generator import measured
from cb_rollout.rollout.progress import PROGRESS_SECONDS, ProgressBar
from cb_rollout.rollout.prompts import Prompt, padding_of, require_tokenizer
from cb_rollout.rollout.sampler import Sampler, SamplesByManager, TrainingRun
from cb_rollout.types import GenerationOutput, SyncReport

T = TypeVar("T")


def _nothing() -> None: ...


class PoolMember:
    """The manager of a shared pool in a process other than the main one."""

    group = None

    def __init__(self, description: WorkerDescription, seed: int | None, tokenizer: Any) -> None:
        """Stand for a pool, with the description of its first worker."""
        self.limits = description.limits
        self.defaults = description.defaults
        self.routers = description.routers
        self.input_processor = InputProcessor(description.limits, seed, None, tokenizer)
        self.policy_version = 0
        self.counters = EngineCounters()

    def status(self) -> EngineStatus:
        return EngineStatus(
            requests_running=0,
            requests_waiting=0,
            kv_blocks_used=0,
            kv_blocks=0,
            kv_bytes=0,
            policy_version=self.policy_version,
        )


class RolloutPool:
    """Sample completions and their log-probabilities on several workers.

    Each worker is a Ray actor with an engine and a copy of the weights. A sequence's tokens depend
    on its seed and the weights, not on its worker. A worker that ends is replaced, and its
    sequences are sampled again elsewhere.
    """

    def __init__(
        self,
        model_name_or_path: str,
        config: Any = None,
        *,
        num_workers: int,
        tokenizer: Any = None,
        resources_per_worker: Mapping[str, float] | None = None,
        accelerator: Any = None,
        weight_deltas: bool = False,
        peft_config: Any = None,
        timeout_seconds: float = 120.0,
        start_timeout_seconds: float = 600.0,
    ) -> None:
        """Ask Ray for the workers, and wait for the first; the others join when they run.

        With an `accelerator`, all processes of a training share the pool. Each of them creates it,
        and all call `generate_batch`, `sync_weights`, `resize` and `close` in the same order.

        Args:
            model_name_or_path: a checkpoint that every machine can read: a name on the Hub, or a
                path of a shared file system.
            config: a `RolloutConfig`, or a transformers `ContinuousBatchingConfig`, of each worker.
                A `tensor_parallel_size` above 1 splits each worker over that many actors.
            num_workers: number of workers to run.
            tokenizer: allows prompts that are strings or chats, and stop strings.
            resources_per_worker: resources of each actor, such as `{"CPU": 4, "GPU": 1}` or the
                cluster's custom resources. None: one GPU if the cluster has GPUs, otherwise one
                CPU.
            accelerator: the trainer's accelerator. Its main process asks for the workers, and all
                processes share them. None: the workers belong to this process.
            weight_deltas: send workers only the changed bits of the weights, compressed; useful on
                a slow network. Whole weights are sent if a delta is not smaller, and to late
                workers.
            peft_config: the trainer's PEFT config: workers run adapters unmerged, and a sync sends
                only the adapters. None: a sync merges adapters, and sends whole weights.
            timeout_seconds: maximum wait for a worker to answer, to fetch or write new weights, or
                to compute a forward while it has work; then it is replaced.
            start_timeout_seconds: maximum time for a worker to start, and maximum time that work
                waits while no worker runs.

        Raises:
            ImportError: ray, or zstandard for deltas, is not installed.
            ConfigurationError: a setting or the model is not supported.
            EngineDeadError: no worker ran in time.
        """
        self.config = as_rollout_config(config)
        require_tokenizer(tokenizer)
        if self.config.weight_sync == WeightSync.SHARED:
            raise refused("pool, shared weights")
        _require_workers(num_workers)
        _require_above_0("timeout_seconds", timeout_seconds)
        _require_above_0("start_timeout_seconds", start_timeout_seconds)
        self.tokenizer = tokenizer
        if peft_config is not None and not hasattr(peft_config, "peft_type"):
            raise ConfigurationError(
                f"peft_config={peft_config!r} is not a PEFT config; pass the trainer's own, such "
                "as LoraConfig(r=16)."
            )
        if peft_config is not None and self.config.tensor_parallel_size > 1:
            raise refused("pool, adapters split", size=self.config.tensor_parallel_size)
        self._codec = DeltaCodec() if weight_deltas else None
        self._group: EngineGroup | None = None
        if accelerator is not None and accelerator.num_processes > 1:
            assert distributed.group.WORLD is not None, "accelerate made a process group"
            self._group = EngineGroup(distributed.group.WORLD)
        self._finalizer: Callable[[], Any] = _nothing
        start = partial(
            self._start,
            resources=resources_per_worker,
            arguments=(model_name_or_path, self.config, tokenizer, peft_config),
            num_workers=num_workers,
            timeout_seconds=timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
        )
        try:
            worker = self._on_main(start)
        except BaseException:
            self.close()
            raise
        self._worker_tensors = worker.tensors
        self.defaults = worker.defaults
        self._generation_config = worker.generation_config
        self._special_tokens = worker.special_tokens
        self._engine = worker.config or self.config
        self._base = worker.base
        self._merges_adapters = peft_config is None
        if not self._is_main:
            self.manager: Any = PoolMember(worker, self.config.seed, tokenizer)

    def _start(
        self,
        resources: Mapping[str, float] | None,
        arguments: tuple[Any, ...],
        num_workers: int,
        timeout_seconds: float,
        start_timeout_seconds: float,
    ) -> WorkerDescription:
        """Ask for the workers, and wait for the first.

        Args:
            resources: of each actor; None: one GPU or one CPU.
            arguments: those of `PoolWorker`.
            num_workers: number of workers to run.
            timeout_seconds: longest wait for a worker's answer.
            start_timeout_seconds: longest start of a worker.
        """
        self._cluster = Cluster(resources, self.config.tensor_parallel_size)
        manager = PoolManager(
            self._cluster, arguments, num_workers, timeout_seconds, start_timeout_seconds
        )
        self.manager = manager
        self._finalizer = weakref.finalize(
            self, manager.close, EngineDeadError("the pool was closed; make another one.")
        )
        worker = manager.first_description()
        manager.defaults = worker.defaults
        manager.routers = worker.routers
        serving = replace(worker.limits, max_cached_tokens=manager.max_cached_tokens)
        manager.input_processor = InputProcessor(serving, self.config.seed, None, self.tokenizer)
        return worker

    @property
    def is_shared(self) -> bool:
        """True if several processes roll out together."""
        return self._group is not None

    def sampler_for(self, run: TrainingRun) -> "PooledGenerator":
        """Return the sampler of a trainer, whose weights it sends; see `attach`."""
        return PooledGenerator(self, run.model, run.generation_config)

    def require_own(self, sampler: str) -> None:
        """Raise `ConfigurationError` if processes share the pool but each would sample alone."""
        if self.is_shared:
            raise refused("pool, several processes", sampler=sampler)

    @property
    def _is_main(self) -> bool:
        return self._group is None or self._group.group_rank == 0

    def _on_main(self, work: Callable[[], T], others: Callable[[], Any] = _nothing) -> T:
        """Run one call in the main process and `others` in the rest; all get result or error."""
        if self._group is None:
            return work()
        try:
            result: Any = work() if self._is_main else others()
        except Exception as error:  # noqa: BLE001  raised below
            result = error
        results = self._group.gather(result)
        for error in results:
            if isinstance(error, Exception):
                raise error
        return results[0]

    def generate_batch(
        self,
        inputs: Iterable[Prompt],
        generation_config: Any = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_return_sequences: int | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
        progress_bar: bool | None = False,
        record_timestamps: bool = False,
        on_error: Literal["raise", "return"] = "raise",
    ) -> dict[str, GenerationOutput]:
        """Sample completions of many prompts, as `RolloutGenerator.generate_batch` does.

        Several threads may call it at once. `timestamps` are `created_time` plus the seconds since
        the sequence reached its worker.

        Args:
            inputs: prompts; with a tokenizer also texts and chats.
            generation_config: defaults of this call; None: the checkpoint's, or the trainer's.
            sampling_params: one for all inputs, or one per input; None: the generation config's.
            num_return_sequences: completions per input; None: the generation config's, else 1.
            max_new_tokens: one for all inputs, or one per input; overrides `sampling_params` and
                `generation_config`.
            progress_bar: draw a bar; None: in a terminal or a notebook.
            record_timestamps: record the time at which each token was sampled.
            on_error: "raise", or "return" failed sequences among the outputs.

        Raises:
            InvalidRequestError: an input or a sampling parameter is refused; nothing was generated.
            IncompleteRolloutError: a sequence failed; its `.outputs` holds all outputs.
            EngineDeadError: no worker can run, or the pool was closed.
        """
        with broadcast_refusal(self._group):
            require_compiled_so(self._engine, generation_config)
            batch = batch_arguments(
                inputs,
                generation_config,
                tokenizer=self.tokenizer,
                defaults=self.manager.defaults,
                engine=self.config,
                padding=padding_of(
                    generation_config,
                    self.tokenizer,
                    self._generation_config,
                    self._special_tokens,
                ),
                own_generation_config=self._generation_config,
                sampling_params=sampling_params,
                num_return_sequences=num_return_sequences,
                max_new_tokens=max_new_tokens,
                record_timestamps=record_timestamps,
                on_error=on_error,
            )
        with observer().span("rollout", policy_version=self.policy_version) as span:
            batches, rank = gathered(self._group, batch)
            outputs = self._on_main(partial(self._roll_out, batches, progress_bar))[rank]
            span.set(sequences=len(outputs))
            if on_error == "raise":
                require_finished(outputs)
        return outputs

    def join(self) -> None:
        """Roll out with the other processes until all of them have called this.

        See `RolloutGenerator.join`. Does nothing if the pool is not shared.
        """
        while self.is_shared:
            batches, _ = gathered(self._group, None)
            if not any(batches):
                return
            self._on_main(partial(self._roll_out, batches))

    def _roll_out(
        self, batches: Sequence[BatchArguments | None], is_shown: bool | None = False
    ) -> list[dict[str, GenerationOutput]]:
        """Run the batches of all processes; return the outputs of each."""
        created = create_requests(self.manager, batches, self._group)
        finished = self._run(unfinished(created), is_shown)
        return [outputs_of(requests, finished) for requests in created]

    @property
    def policy_version(self) -> int:
        """The version recorded with every new token; 0: the checkpoint's weights."""
        return self.manager.policy_version

    @property
    def num_alive(self) -> int:
        """The number of workers that run with the current weights; read it on every process."""
        return self._on_main(lambda: self.manager.num_alive)

    def resize(self, num_workers: int) -> None:
        """Change the number of workers; sequences in flight are not lost.

        Raises:
            ConfigurationError: `num_workers` is below 1.
            EngineDeadError: no worker can run, or the pool was closed.
        """
        _require_workers(num_workers)
        self._on_main(lambda: self.manager.resize(num_workers))

    def sync_weights(
        self,
        weights: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        in_flight: Literal["keep", "recompute", "abort"] = "recompute",
    ) -> SyncReport:
        """Sample from these weights from now on, under the next policy version.

        Weights go to the object store once, and from there to each machine once. A worker writes
        them between two forwards, so it never samples from partly updated weights. A worker that
        fails to take them is replaced. Calls from other threads wait. Each trainer needs its own
        pool.

        Args:
            weights: the training module, wrapped or not; its adapters are merged out of place, or
                with a `peft_config` only they are sent. Or a state dict of the workers' model. Each
                tensor is cast to the workers' dtype. If FSDP or ZeRO-3 shards the module, all
                processes gather one bucket at a time.
            in_flight: treatment of unfinished sequences; see `ContinuousBatchingManager.pause`.

        Returns:
            The new policy version, the duration in seconds and the bytes that a machine fetches.

        Raises:
            ConfigurationError: `in_flight` is unknown.
            WeightSyncError: the tensors do not match the workers' model, or no worker took them.
                The pool keeps its weights and its version.
            EngineDeadError: no worker can run, or the pool was closed.
        """
        started = time.perf_counter()
        if in_flight not in list(InFlight):
            raise ConfigurationError(
                f"in_flight={in_flight!r} is not one of {', '.join(InFlight)}."
            )
        if self._base is not None and isinstance(weights, torch.nn.Module):
            require_base(weights, self._base)
            # Checked once: the base stays frozen from now on.
            self._base = None
        values = new_values(weights, self._worker_tensors, merges_adapters=self._merges_adapters)

        def send() -> WeightUpdate:
            with self.manager.updating() as last:
                try:
                    update = self._stored(values, last)
                finally:
                    # The other processes gather every weight.
                    deque(values, maxlen=0)
                self.manager.update(update, InFlight(in_flight))
            # The references belong to the main process.
            return replace(update, references=(), deltas=())

        with observer().span("sync", in_flight=str(in_flight)) as span:
            update = self._on_main(send, lambda: deque(values, maxlen=0))
            span.set(policy_version=update.version, bytes_copied=update.num_bytes)
        if not self._is_main:
            self.manager.policy_version = update.version
        return SyncReport(update.version, time.perf_counter() - started, update.num_bytes)

    def _stored(
        self, values: Iterable[tuple[WorkerTensor, torch.Tensor]], last: WeightUpdate
    ) -> WeightUpdate:
        """Put weights into the object store, and their deltas to the last version if enabled."""
        last_references = dict(zip(last.tensors, last.references, strict=True))
        tensors = []
        references = []
        deltas = []
        delta_bytes = 0
        for tensor, value in values:
            array = bytes_of(value, tensor.dtype)
            tensors.append(tensor)
            references.append(self._cluster.put(array))
            if self._codec is not None and tensor in last_references:
                last_array = self._cluster.get(last_references[tensor])
                delta = self._codec.delta(tensor, array, last_array)
                deltas.append(self._cluster.put(delta))
                delta_bytes += delta.nbytes
        # Whole weights, for workers that join late or do not have the version before.
        update = WeightUpdate(last.version + 1, tensors, references)
        has_all_deltas = len(deltas) == len(tensors)
        if not has_all_deltas or delta_bytes >= update.num_bytes:
            return update
        return replace(update, deltas=deltas, delta_bytes=delta_bytes)

    def close(self) -> None:
        """End all workers, and wait for their processes on this machine."""
        self._finalizer()

    def __reduce__(self) -> NoReturn:
        raise RolloutError(
            "a RolloutPool owns a thread and workers, so it cannot be pickled or copied; make a "
            "new pool with the same arguments."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, requests: list[Request], is_shown: bool | None) -> dict[str, GenerationOutput]:
        output_queue = OutputQueue()
        finished: dict[str, GenerationOutput] = {}
        with ProgressBar(self.manager, requests, finished, is_shown) as bar:
            try:
                self.manager.submit(requests, output_queue)
                while len(finished) < len(requests):
                    output = output_queue.take(timeout=PROGRESS_SECONDS)
                    if output is not None:
                        finished[output.request_id] = output
                        bar.update(1)
                    else:
                        bar.refresh()
            except BaseException:
                self.manager.cancel_requests([request.request_id for request in requests])
                raise
        return finished


class PooledGenerator(SamplesByManager, Sampler):
    """A pool as the generator of one model in training."""

    def __init__(
        self,
        pool: RolloutPool,
        model: torch.nn.Module | None = None,
        generation_config: Any = None,
    ) -> None:
        """Check that the pool can serve a trainer; the pool is not closed here.

        Args:
            pool: samples.
            model: the training module, whose weights `sync_weights` sends; None: the caller sends
                them.
            generation_config: defaults of every request; None: the checkpoint's.
        """
        self._config = pool.config
        self.tokenizer = pool.tokenizer
        _require_trainers_needs(self._config)
        self.pool = pool
        self._model = model
        self._generation_config: Any = None
        if generation_config is not None:
            self.set_generation_config(generation_config)
        self._last_metrics: dict[str, float] = {}
        self._durations = Durations()

    @property
    def manager(self) -> Any:
        return self.pool.manager

    @property
    def config(self) -> RolloutConfig:
        return self._config

    @property
    def durations(self) -> Durations:
        """Durations in the trainer's process; workers have different clocks."""
        return self._durations

    def require_strategy_support(self) -> None:
        """Refuse a pool that several processes share."""
        self.pool.require_own("a strategy")

    def set_generation_config(self, generation_config: Any) -> None:
        """Set the defaults of all requests from now on."""
        self.manager.defaults = from_generation_config(generation_config, self.config)
        self._generation_config = generation_config

    @property
    def policy_version(self) -> int:
        return self.pool.policy_version

    @property
    def is_joint(self) -> bool:
        """True if other processes must roll out whenever this one does."""
        return self.pool.is_shared

    def join(self) -> None:
        """Roll out with the other processes until all have called this; see `RolloutPool.join`."""
        self.pool.join()

    def generate_batch(
        self, inputs: Iterable[Prompt], generation_config: Any = None, **more: Any
    ) -> dict[str, GenerationOutput]:
        """Sample completions with the trainer's settings; see `RolloutPool.generate_batch`."""
        chosen = generation_config or self._generation_config
        with measured(self.manager) as metrics:
            outputs = self.pool.generate_batch(inputs, chosen, **more)
        self._last_metrics = metrics
        return outputs

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last rollout and of the pool now, by name."""
        return self._last_metrics | status_metrics(self.manager.status())

    def follow(self, model: torch.nn.Module) -> None:
        self._model = model

    def sync_weights(
        self, in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    ) -> SyncReport:
        """Send the model's weights to the workers; see `RolloutPool.sync_weights`."""
        assert self._model is not None, "no module to send"
        return self.pool.sync_weights(self._model, in_flight=in_flight)

    def close(self) -> None:
        """Restore the pool's own sampling parameters; the pool stays open."""
        self.manager.defaults = self.pool.defaults

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_above_0(name: str, seconds: float) -> None:
    if not seconds > 0:
        raise ConfigurationError(f"{name}={seconds!r} is not above 0.")


def _require_trainers_needs(config: RolloutConfig) -> None:
    """Raise `ConfigurationError` for a setting with which a pool cannot sample for a trainer."""
    if not config.return_logprobs:
        fault = "return_logprobs=False"
        advice = "leave it True"
    elif config.release_cache == ReleaseCache.WITH_WEIGHTS:
        fault = "release_cache='with_weights'"
        advice = "use 'between_steps'"
    else:
        return
    raise refused("pool, trainer's needs", fault=fault, advice=advice)


def _require_workers(num_workers: int) -> None:
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        raise ConfigurationError(f"num_workers={num_workers!r} is not a whole number >= 1.")
