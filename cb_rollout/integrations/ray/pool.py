"""Sample rollouts on workers of a Ray cluster, with the interface of `RolloutGenerator`.

Owns request ids, seeds and policy versions. Called from training code, on any thread.
"""

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Self

import torch
from tqdm.auto import tqdm

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import InFlight, WeightSync
from cb_rollout.config.hf import as_rollout_config
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.input_processor import InputProcessor, ServingLimits
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import ConfigurationError, EngineDeadError, RolloutError, WeightSyncError
from cb_rollout.integrations.ray.cluster import Cluster
from cb_rollout.integrations.ray.manager import PoolManager
from cb_rollout.integrations.ray.supervisor import PublishedWeights, WorkerSupervisor
from cb_rollout.integrations.ray.weight_update import PackedWeights
from cb_rollout.rollout.batches import batch_arguments, require_finished
from cb_rollout.rollout.generator import PROGRESS_SECONDS
from cb_rollout.rollout.prompts import Prompt, require_tokenizer
from cb_rollout.types import GenerationOutput, SyncReport


class RolloutPool:
    """Sample completions and their log-probabilities on several workers.

    Each worker is a Ray actor with an engine and a copy of the weights. A sequence's tokens depend
    on its seed and the weights, not on its worker. A worker that ends is replaced, and its
    sequences go on elsewhere after the tokens that it reported.
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
        for name, seconds in (
            ("timeout_seconds", timeout_seconds),
            ("start_timeout_seconds", start_timeout_seconds),
        ):
            if not seconds > 0:
                raise ConfigurationError(f"{name}={seconds!r} is not above 0.")
        self.tokenizer = tokenizer
        self._cluster = Cluster(resources_per_worker)
        self._supervisor = WorkerSupervisor(
            self._cluster,
            (model_name_or_path, self.config, tokenizer),
            num_workers,
            timeout_seconds,
            start_timeout_seconds,
        )
        self._finalizer = weakref.finalize(self, _close, self._supervisor)
        try:
            found = self._supervisor.first_description()
        except BaseException:
            self.close()
            raise
        self._held = found.tensors
        limits = ServingLimits(
            vocab_size=lambda: found.vocab_size,
            max_positions=found.max_positions,
            max_cached_tokens=self._supervisor.max_cached_tokens,
            model_eos=found.model_eos,
            placeholders=found.placeholders,
            never_sampled=found.never_sampled,
        )
        self.manager = PoolManager(
            self._supervisor,
            InputProcessor(limits, self.config.seed, None, tokenizer),
            found.defaults,
        )
        self._trained: weakref.ref[torch.nn.Module] | None = None

    def generate_batch(
        self,
        inputs: Iterable[Prompt],
        generation_config: Any = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_return_sequences: int | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
        progress_bar: bool = False,
        record_timestamps: bool = False,
        on_error: Literal["raise", "return"] = "raise",
    ) -> dict[str, GenerationOutput]:
        """Sample completions of many prompts; see `RolloutGenerator.generate_batch`.

        Several threads may call it at once. `timestamps` are `created_time` plus the seconds since
        the sequence came to its worker.

        Args:
            inputs: lists of token ids; with a tokenizer also strings, or chats.
            generation_config: defaults of this call; None: the checkpoint's.
            sampling_params: one, or one per input; None: the generation config's.
            num_return_sequences: completions of each input; None: the generation config's, else 1.
            max_new_tokens: one, or one per input; overrides the two above.
            progress_bar: show sequences done.
            record_timestamps: record the time at which each token was sampled. A sequence of a
                worker that ends is then sampled again from its start.
            on_error: "raise", or "return" failed sequences with `status=FAILED`.

        Returns:
            Outputs by request id, in the order of `inputs`, the completions of one input adjacent.

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
            defaults=self.manager.defaults,
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
        """Return the version recorded with every new token; 0: the checkpoint's weights."""
        return self._supervisor.policy_version

    @property
    def num_alive(self) -> int:
        """Return the number of workers that run with the current weights."""
        return self._supervisor.num_alive

    def resize(self, num_workers: int) -> None:
        """Change the number of workers that should run; nothing that is sampled is lost.

        Raises:
            ConfigurationError: `num_workers` is below 1.
            EngineDeadError: no worker can run, or the pool was closed.
        """
        _require_workers(num_workers)
        self._supervisor.resize(num_workers)

    def follow(self, model: torch.nn.Module | None) -> None:
        """Let another module update the pool from now on; None: whichever comes next."""
        self._trained = None if model is None else weakref.ref(hf_compat.unwrap(model))

    def sync_weights(
        self,
        weights: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        policy_version: int | None = None,
        in_flight: Literal["keep", "recompute", "abort"] = "recompute",
    ) -> SyncReport:
        """Sample from these weights from now on, under the next policy version.

        Weights go to the object store once, and from there to each machine once. No worker samples
        from a mixture: it checks all bytes before it writes the first, between two forwards. A
        worker that does not take them samples nothing until it has them, or is replaced.

        Args:
            weights: the training module, wrapped or not, with its adapters added out of place; or a
                state dict of the plain model. On its way each tensor is cast to the workers' dtype.
            policy_version: the version that these weights become, for a trainer that counts its
                own; None: the next.
            in_flight: treatment of unfinished sequences; see `ContinuousBatchingManager.pause`.

        Returns:
            The new policy version, the duration in seconds and the bytes put into the object store.

        Raises:
            ConfigurationError: the module is sharded over processes, or `in_flight` is unknown.
            WeightSyncError: the tensors are not the workers'; another trainer updates the pool;
                or all workers refused. The pool keeps its weights and its version.
            EngineDeadError: no worker can run, or the pool was closed.
        """
        started = time.perf_counter()
        if in_flight not in list(InFlight):
            raise ConfigurationError(
                f"in_flight={in_flight!r} is not one of {', '.join(InFlight)}."
            )
        version = self.policy_version + 1 if policy_version is None else policy_version
        with self._supervisor.updating(version):
            self._require_same_trainer(weights)
            packed = PackedWeights(weights, self._held)
            references = [self._cluster.put(buffer) for buffer in packed.buffers()]
            update = packed.update(version)
            self._supervisor.update(
                PublishedWeights(version, update, references), InFlight(in_flight)
            )
            if isinstance(weights, torch.nn.Module):
                self.follow(weights)
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

    def _require_same_trainer(self, weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        known = None if self._trained is None else self._trained()
        if known is None or not isinstance(weights, torch.nn.Module):
            return
        if hf_compat.unwrap(weights) is not known:
            raise WeightSyncError(
                f"version {self.policy_version} came from another module than these weights: two "
                "trainers update one pool. Give each a pool; or call follow(model) first, if this "
                "module takes over."
            )

    def _run(self, requests: list[Request], progress_bar: bool) -> dict[str, GenerationOutput]:
        output_queue = OutputQueue()
        finished: dict[str, GenerationOutput] = {}
        with tqdm(total=len(requests), desc="rollout", unit="seq", disable=not progress_bar) as bar:
            try:
                self.manager.submit(requests, output_queue)
                while len(finished) < len(requests):
                    output = output_queue.take(timeout=PROGRESS_SECONDS)
                    if output is not None:
                        finished[output.request_id] = output
                        bar.update(1)
            except BaseException:
                self.manager.cancel_requests([request.request_id for request in requests])
                raise
        return finished


def _require_workers(num_workers: int) -> None:
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        raise ConfigurationError(f"num_workers={num_workers!r} is not a whole number >= 1.")


def _close(supervisor: WorkerSupervisor) -> None:
    supervisor.close(EngineDeadError("the pool was closed; make another one."))
