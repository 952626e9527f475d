"""Sample rollouts on workers of a Ray cluster, with the interface of `RolloutGenerator`.

Owns request ids, seeds and policy versions. Called from training code, on any thread.
"""

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, Self

import torch

from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import InFlight, ReleaseCache, WeightSync
from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.input_processor import InputProcessor
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import ConfigurationError, EngineDeadError, RolloutError
from cb_rollout.integrations.ray.cluster import Cluster
from cb_rollout.integrations.ray.manager import PoolManager
from cb_rollout.integrations.ray.weight_update import WeightUpdate, new_values
from cb_rollout.metrics.registry import status_metrics
from cb_rollout.rollout.batches import batch_arguments, require_finished
from cb_rollout.rollout.generator import measured
from cb_rollout.rollout.progress import PROGRESS_SECONDS, ProgressBar
from cb_rollout.rollout.prompts import Prompt, require_tokenizer
from cb_rollout.types import GenerationOutput, SyncReport


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
        timeout_seconds: float = 120.0,
        start_timeout_seconds: float = 600.0,
    ) -> None:
        """Ask Ray for the workers, and wait for the first; the others join when they run.

        Args:
            model_name_or_path: a checkpoint that every machine can read: a name on the Hub, or a
                path of a shared file system.
            config: a `RolloutConfig`, or a transformers `ContinuousBatchingConfig`, of each worker.
            num_workers: workers that should run.
            tokenizer: allows prompts that are strings or chats, and stop strings.
            resources_per_worker: as `{"CPU": 4, "GPU": 1}`, other names being the cluster's own;
                None: one GPU where the cluster has GPUs, else one CPU.
            timeout_seconds: longest wait for a worker's answer, for its fetch of new weights and
                its write of them, or for a forward while it has work; then it is replaced.
            start_timeout_seconds: longest start of a worker, and longest time in which work waits
                and no worker runs.

        Raises:
            ImportError: ray is not installed.
            ConfigurationError: a setting or the model is not supported.
            EngineDeadError: no worker ran in time.
        """
        self.config = as_rollout_config(config)
        require_tokenizer(tokenizer)
        if self.config.weight_sync == WeightSync.SHARED:
            raise refused("pool, shared weights")
        _require_workers(num_workers)
        limits = {
            "timeout_seconds": timeout_seconds,
            "start_timeout_seconds": start_timeout_seconds,
        }
        for name, seconds in limits.items():
            if not seconds > 0:
                raise ConfigurationError(f"{name}={seconds!r} is not above 0.")
        self.tokenizer = tokenizer
        self._cluster = Cluster(resources_per_worker)
        arguments = (model_name_or_path, self.config, tokenizer)
        self.manager = PoolManager(self._cluster, arguments, num_workers, *limits.values())
        self._finalizer = weakref.finalize(self, _close, self.manager)
        try:
            worker = self.manager.first_description()
        except BaseException:
            self.close()
            raise
        self._worker_tensors = worker.tensors
        self.defaults = self.manager.defaults = worker.defaults
        serving = replace(worker.limits, max_cached_tokens=self.manager.max_cached_tokens)
        self.manager.input_processor = InputProcessor(serving, self.config.seed, None, tokenizer)

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
        the sequence came to its worker.

        Raises:
            InvalidRequestError: an input or a sampling parameter is refused; nothing was generated.
            ConfigurationError: an input has images.
            IncompleteRolloutError: a sequence failed; its `.outputs` holds all outputs.
            EngineDeadError: no worker can run, or the pool was closed.
        """
        batch = batch_arguments(
            inputs,
            generation_config,
            tokenizer=self.tokenizer,
            defaults=self.defaults,
            sampling_params=sampling_params,
            num_return_sequences=num_return_sequences,
            max_new_tokens=max_new_tokens,
            on_error=on_error,
        )
        requests = self.manager.create_requests(
            batch.prompts,
            batch.params,
            members=range(batch.count),
            records_timestamps=record_timestamps,
            keeps_refused=on_error == "return",
        )
        served = [request for request in requests if not request.status.is_final]
        finished = self._run(served, progress_bar)
        outputs = {r.request_id: finished.get(r.request_id) or r.output() for r in requests}
        if on_error == "raise":
            require_finished(outputs)
        return outputs

    @property
    def policy_version(self) -> int:
        """The version recorded with every new token; 0: the checkpoint's weights."""
        return self.manager.policy_version

    @property
    def num_alive(self) -> int:
        """The number of workers that run with the current weights."""
        return self.manager.num_alive

    def resize(self, num_workers: int) -> None:
        """Change the number of workers that should run; nothing that is sampled is lost.

        Raises:
            ConfigurationError: `num_workers` is below 1.
            EngineDeadError: no worker can run, or the pool was closed.
        """
        _require_workers(num_workers)
        self.manager.resize(num_workers)

    def sync_weights(
        self,
        weights: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        in_flight: Literal["keep", "recompute", "abort"] = "recompute",
    ) -> SyncReport:
        """Sample from these weights from now on, under the next policy version.

        Weights go to the object store once, and from there to each machine once. A worker writes
        them between two forwards, so that none samples from a mixture; one that does not take them
        is replaced. A call of another thread waits. Each trainer needs a pool of its own.

        Args:
            weights: the training module, wrapped or not, with its adapters added out of place; or a
                state dict of the plain model. On its way each tensor is cast to the workers' dtype.
            in_flight: treatment of unfinished sequences; see `ContinuousBatchingManager.pause`.

        Returns:
            The new policy version, the duration in seconds and the bytes put into the object store.

        Raises:
            ConfigurationError: the module is sharded over processes, or `in_flight` is unknown.
            WeightSyncError: the tensors are not the workers', or no worker took them. The pool
                keeps its weights and its version.
            EngineDeadError: no worker can run, or the pool was closed.
        """
        started = time.perf_counter()
        if in_flight not in list(InFlight):
            raise ConfigurationError(
                f"in_flight={in_flight!r} is not one of {', '.join(InFlight)}."
            )
        with self.manager.updating() as version:
            sent = [
                (tensor, self._cluster.put(array))
                for tensor, array in new_values(weights, self._worker_tensors)
            ]
            update = WeightUpdate(version, *map(list, zip(*sent, strict=True)))
            self.manager.update(update, InFlight(in_flight))
        return SyncReport(version, time.perf_counter() - started, update.num_bytes)

    def close(self) -> None:
        """End all workers, and wait for their processes on this machine."""
        self._finalizer()

    def __reduce__(self) -> NoReturn:
        raise RolloutError(
            "a RolloutPool has a thread and workers, so it is neither pickled nor copied; make "
            "another of its arguments."
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


class PooledGenerator:
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
            model: the training module, whose weights `sync_weights` sends; None: another way does.
            generation_config: defaults of every request; None: the checkpoint's.
        """
        self.config, self.tokenizer = pool.config, pool.tokenizer
        is_released = self.config.release_cache == ReleaseCache.WITH_WEIGHTS
        for fault, advice, is_so in (
            ("return_logprobs=False", "leave it True", not self.config.return_logprobs),
            ("release_cache='with_weights'", "use 'between_steps'", is_released),
            ("router_replay=True", "attach a RolloutConfig instead", self.config.router_replay),
        ):
            if is_so:
                raise refused("pool, trainer's needs", fault=fault, advice=advice)
        self.pool, self._model = pool, model
        self.manager = pool.manager
        if generation_config is not None:
            self.manager.defaults = from_generation_config(generation_config)
        self._generation_config = generation_config
        self._last_metrics: dict[str, float] = {}

    @property
    def policy_version(self) -> int:
        return self.pool.policy_version

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

    def sleep(self, level: int = 1) -> None:
        """Do nothing: the workers' memory and models are not the trainer's."""

    wake = lend_to_trainer = sleep

    def close(self) -> None:
        """Give the pool its own sampling parameters back; it stays open."""
        self.manager.defaults = self.pool.defaults

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_workers(num_workers: int) -> None:
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        raise ConfigurationError(f"num_workers={num_workers!r} is not a whole number >= 1.")


def _close(manager: PoolManager) -> None:
    manager.close(EngineDeadError("the pool was closed; make another one."))
