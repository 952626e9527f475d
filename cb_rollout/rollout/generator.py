"""Generate completions from a model in training: `RolloutGenerator` and `generate_batch`.

Owns one rollout from prompts to outputs and metrics, and the weight sync between rollouts. Steps
nothing itself: `ContinuousBatchingManager` runs the engine. Called from the training thread.
"""

import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import torch

from cb_rollout.compat.transformers import tensor_parallel_group, unwrap
from cb_rollout.config.checks import require_known
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import InFlight, ReleaseCache
from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.memory.plan import MemoryPlan
from cb_rollout.engine.memory.training import OptimizerOrName
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.interrupts import interrupts_deferred
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.metrics.registry import ROLLOUT, SLEEP, SYNC, rollout_metrics, status_metrics
from cb_rollout.rollout import batches
from cb_rollout.rollout.batches import BatchArguments
from cb_rollout.rollout.distributed import create_group_watch
from cb_rollout.rollout.progress import PROGRESS_SECONDS, ProgressBar
from cb_rollout.rollout.prompts import Prompt, require_tokenizer
from cb_rollout.rollout.verification import DriftReport, rollout_drift
from cb_rollout.types import GenerationOutput, SyncReport
from cb_rollout.weights import create_weight_sync, require_equal

if TYPE_CHECKING:
    from cb_rollout.server import ServerHandle

# The model's attribute that holds the generator of `persistent_manager=True`.
GENERATOR_ATTRIBUTE = "_cb_rollout_generator"


class RolloutGenerator:
    """Sample completions and their log-probabilities from a model in training."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: Any = None,
        *,
        tokenizer: Any = None,
        generation_config: Any = None,
        accelerator: Any = None,
        optimizer: OptimizerOrName | None = None,
    ) -> None:
        """Probe the model and plan the memory.

        Args:
            model: a causal language model, plain or wrapped by PEFT, accelerate or torch.
            config: a `RolloutConfig`, or a transformers `ContinuousBatchingConfig`.
            tokenizer: allows strings, chats and stop strings; a processor also images.
            generation_config: defaults of every request; None: the model's own.
            accelerator: has the rank, and the precision of the trainer's forward; None: the rank is
                that of `torch.distributed`'s process group, else of the environment's `RANK`, or 0.
            optimizer: the model's optimizer, its class, or the name of a known one, for the memory
                of its states. None: as Adam's for a model in training mode, else 0.

        Raises:
            ConfigurationError: a setting or the model is not supported.
        """
        self.config = as_rollout_config(config)
        require_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self._generation_config = generation_config
        self._weights = create_weight_sync(model, self.config, accelerator, optimizer)
        if self.config.release_cache == ReleaseCache.WITH_WEIGHTS:
            # Refuses shared weights.
            self._weights.own_weights()
        self.manager = ContinuousBatchingManager(
            self._weights.module,
            generation_config,
            self.config,
            autocast_dtype=self._weights.autocast_dtype,
            rank=None if accelerator is None else accelerator.process_index,
            tokenizer=tokenizer,
            trained=self._weights.trained,
            optimizer=optimizer,
        )
        self.manager.weight_selection = self._weights.selection
        group = self.manager.group
        self._watch = None if group is None else create_group_watch(group)
        is_split = tensor_parallel_group(unwrap(model)) is not None
        # Processes that train one split model have equal prompts.
        self._gathers_over = None if is_split else group
        self._servers: list[ServerHandle] = []
        self._last_rollout: list[Request] = []
        self._last_metrics: dict[str, float] = {}

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
        warmup: bool = False,
    ) -> dict[str, GenerationOutput]:
        """Sample completions of many prompts together; prefill equal prompts once.

        Args:
            inputs: lists of token ids; with a tokenizer also strings, or chats (lists of messages).
                With a processor a chat may hold `{"type": "image", "image": ...}` parts, and
                `{"prompt": token ids or text, "images": [...]}` is an input too.
            generation_config: defaults of this call; None: the generator's.
            sampling_params: one, or one per input; None: the generation config's.
            num_return_sequences: completions of each input; None: the generation config's, else 1.
                Greedy ones are equal, which is warned of.
            max_new_tokens: one, or one per input; overrides the two above.
            progress_bar: draw a bar; None: in a terminal or a notebook, and erase it at the end.
            record_timestamps: record the time at which each token was sampled.
            on_error: "raise", or "return" failed sequences, those of a refused input (too long,
                empty, not encodable) among them, with `status=FAILED`.
            warmup: see `ContinuousBatchingManager.warmup`.

        Returns:
            Outputs by request id, in the order of `inputs`, the completions of one input adjacent.

        Raises:
            InvalidRequestError: an input or a sampling parameter is refused; nothing was generated.
            ConfigurationError: the model cannot run prompts with images.
            IncompleteRolloutError: a sequence failed; its `.outputs` holds all outputs.
            EngineDeadError: the engine stopped on an exception.
        """
        with batches.broadcast_refusal(self._gathers_over):
            batch = batches.batch_arguments(
                inputs,
                generation_config,
                tokenizer=self.tokenizer,
                defaults=self.manager.defaults,
                own_generation_config=self._generation_config,
                sampling_params=sampling_params,
                num_return_sequences=num_return_sequences,
                max_new_tokens=max_new_tokens,
                record_timestamps=record_timestamps,
                on_error=on_error,
            )
        with self.manager.durations.timed(ROLLOUT):
            of_ranks, rank = batches.gathered(self._gathers_over, batch)
            with interrupts_deferred():
                requests, outputs = self._roll_out(of_ranks, rank, progress_bar, warmup)
        if on_error == "raise":
            cause = next((r.cause for r in requests if r.cause is not None), None)
            batches.require_finished(outputs, cause)
        return outputs

    def _roll_out(
        self,
        of_ranks: Sequence[BatchArguments | None],
        rank: int,
        progress_bar: bool | None = False,
        warmup: bool = False,
    ) -> tuple[list[Request], dict[str, GenerationOutput]]:
        """Run the batches of all processes that share a copy; return this rank's outputs."""
        created = batches.create_requests(self.manager, of_ranks, self._gathers_over)
        served = batches.unfinished([created[rank]])
        self.wake()
        if warmup:
            self.manager.warmup()
        self.manager.start()
        watched = nullcontext() if self._watch is None else self._watch.watched()
        with watched, measured(self.manager) as metrics:
            finished = _run(self.manager, batches.unfinished(created), progress_bar)
        self._last_metrics = metrics
        if of_ranks[rank] is not None:
            self._last_rollout = served
        return created[rank], batches.outputs_of(created[rank], finished)

    def join(self) -> None:
        """Roll out with the other processes of a split copy until all of them have called this.

        Call it on every process after conversations, of which each may have other turns; `attach`
        does. Without `tensor_parallel_size` it does nothing.
        """
        if self._gathers_over is None:
            return
        while True:
            of_ranks, rank = batches.gathered(self._gathers_over, None)
            if not any(of_ranks):
                return
            self._roll_out(of_ranks, rank)

    @property
    def is_joint(self) -> bool:
        """True if other processes must roll out whenever this one does."""
        return self._gathers_over is not None

    @property
    def policy_version(self) -> int:
        return self.manager.policy_version

    def follow(self, model: torch.nn.Module) -> None:
        """Use this re-wrapped model as the weight source.

        Raises:
            ConfigurationError: the model's own forward computes something else than the module
                that generates.
            WeightSyncError: the weights are shared, and the model inside is another one.
        """
        self._weights.follow(model)
        self.manager.engine.follow(self._weights.trained)

    def is_of(self, model: torch.nn.Module) -> bool:
        """Return whether this generator generates with the module inside a model, or a copy."""
        return self._weights.is_of(model)

    def set_generation_config(self, generation_config: Any) -> None:
        """Take other defaults for all requests from now on.

        Raises:
            ConfigurationError: a setting of the config cannot be honoured.
        """
        self.manager.defaults = from_generation_config(generation_config)
        self._generation_config = generation_config

    def sync_weights(
        self, in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    ) -> SyncReport:
        """Generate from the model's new weights from now on, under a new policy version.

        Call it after every weight change; with a sharded model, on every process. `in_flight` is
        what becomes of unfinished sequences; see `ContinuousBatchingManager.pause`.

        Raises:
            WeightSyncError: the model and its copy no longer have the same tensors.
        """
        started = time.perf_counter()
        with (
            interrupts_deferred(),
            self.manager.durations.timed(SYNC),
            self.manager.paused(in_flight),
        ):
            num_bytes = self._weights.sync()
            self.manager.pauses.release(PauseReason.WEIGHTS)
            self.manager.loop.begin_policy_version(InFlight(in_flight))
            if self.config.verify_weight_sync:
                require_equal(self._weights)
        return SyncReport(self.policy_version, time.perf_counter() - started, num_bytes)

    @property
    def is_asleep(self) -> bool:
        return PauseReason.SLEEP in self.manager.pauses.reasons

    def sleep(self, level: int = 1, *, release_graphs: bool = False) -> None:
        """Release memory and pause the engine; unfinished sequences wait.

        Args:
            level: 1: release the KV memory. 2: release also CUDA graphs, and the weights that the
                training module does not hold. The next `sync_weights()` allocates and writes these;
                until then `wake()` and rollouts raise `RolloutError`.
            release_graphs: release CUDA graphs too; `wake()` takes seconds to capture them again.

        Raises:
            ConfigurationError: `level` is another, or the training module holds all weights.
        """
        if isinstance(level, bool) or level not in (1, 2):
            raise ConfigurationError(f"level={level!r} of sleep() is not 1 or 2.")
        if level == 1 and self.is_asleep:
            return
        with interrupts_deferred(), self.manager.durations.timed(SLEEP), self.manager.loop.paused():
            if level == 2:
                self._weights.release()
                self.manager.pauses.hold(PauseReason.WEIGHTS)
            self.manager.sleep(release_graphs or level == 2)

    def wake(self) -> None:
        """Resume the engine after `sleep()` or `lend_to_trainer()`; its next step allocates.

        `RolloutError`: after `sleep(level=2)`, before `sync_weights()`.
        """
        with interrupts_deferred():
            self.manager.wake()

    def lend_to_trainer(self) -> None:
        """Hold the engine until `wake()` or the next rollout, if it runs the module that trains.

        `attach` calls it for its trainer; `generate_batch` where the module is in training mode.
        """
        with interrupts_deferred():
            self.manager.lend_to_trainer()

    def memory_plan(self) -> MemoryPlan:
        """Return the size of the KV cache in blocks and bytes, with its derivation."""
        return self.manager.memory_plan

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last rollout and of the engine now, by name."""
        return self._last_metrics | status_metrics(self.manager.status())

    def verify(self, num_sequences: int) -> DriftReport:
        """Recompute log-probabilities of the last rollout with plain forwards, and compare.

        `num_sequences`, at least 1, are taken evenly over the rollout. Skipped are those of an
        older policy version, and of changed logits (`logprobs_mode="processed"`).
        """
        is_collective = self._weights.is_collective
        return rollout_drift(self.manager, self._last_rollout, num_sequences, is_collective)

    def stale_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that generate, by name, if a sync would change any of them.

        Empty: it would change none, or shards cannot be compared by one process.
        """
        return self._weights.stale_weights()

    def serve(self, **options: Any) -> "ServerHandle":
        """Serve the current policy to OpenAI clients, in a thread of this process.

        Requests share the engine with `generate_batch`, and continue through `sync_weights()`.
        An engine that runs a module in training mode is held from a rollout's end until the next
        rollout or `wake()`. At other times change shared weights inside `manager.pause()`.
        `options` are the fields of `cb_rollout.server.ServerOptions`: `host`, `port`, `api_key`...

        Returns:
            The server, with the `base_url` for its clients; it runs until its `close()`, or the
            generator's.

        Raises:
            ConfigurationError: an option is invalid, the generator has no tokenizer, or the
                address cannot be bound.
        """
        from cb_rollout.server import ServerOptions, start_server

        if self.manager.group is not None:
            raise refused("served, tensor parallel")
        trained, settings = self._weights.trained, ServerOptions(**options)
        server = start_server(self.manager, self.tokenizer, settings, trained, self.sync_weights)
        self._servers = [s for s in self._servers if s.is_running()] + [server]
        return server

    def close(self) -> None:
        """End the servers and the background thread, and free the cache.

        The next `generate_batch` starts the thread and allocates the cache again.
        """
        while self._servers:
            self._servers.pop().close()
        with interrupts_deferred():
            self.manager.close()

    def __reduce__(self) -> NoReturn:
        raise RolloutError(
            "a RolloutGenerator has a thread and a model in training, so it is neither pickled nor "
            "copied; pickle its config, and make another of it."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def measured(manager: Any) -> Iterator[dict[str, float]]:
    """Yield a dict that holds, after the block, the metrics of the engine's or pool's rollout."""
    before = manager.counters.copy()
    manager.counters.kv_blocks_peak = 0
    metrics: dict[str, float] = {}
    started = time.perf_counter()
    yield metrics
    seconds = time.perf_counter() - started
    metrics |= rollout_metrics(manager.counters.since(before), seconds)


def _run(
    manager: ContinuousBatchingManager, requests: list[Request], progress_bar: bool | None
) -> dict[str, GenerationOutput]:
    """Return the outputs by request id, in the order of `requests`; on an exception, abort all."""
    if not requests:
        return {}
    output_queue = OutputQueue()
    finished: dict[str, GenerationOutput] = {}
    manager.require_can_wait()
    with (
        ProgressBar(manager, requests, finished, progress_bar) as bar,
        interrupts_deferred() as interrupts,
    ):
        try:
            with manager.loop.stepping() as step_until:
                manager.submit(requests, output_queue)
                while len(finished) < len(requests):
                    interrupts.deliver()
                    refresh = time.monotonic() + PROGRESS_SECONDS
                    if step_until is not None:
                        step_until(
                            lambda at=refresh: output_queue.can_take or time.monotonic() > at,
                            PROGRESS_SECONDS,
                        )
                    output = output_queue.take(timeout=0.0 if step_until else PROGRESS_SECONDS)
                    if output is not None:
                        finished[output.request_id] = output
                        bar.update(1)
                    else:
                        bar.refresh()
        except BaseException:
            # The abort restores the model's training flags before the caller gets the exception.
            manager.loop.abort([request.request_id for request in requests])
            raise
        finally:
            manager.lend_to_trainer(in_training_only=True)
    return {request.request_id: finished[request.request_id] for request in requests}


def generate_batch(
    model: torch.nn.Module,
    inputs: Sequence[Prompt],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool | None = True,
    persistent_manager: bool = False,
    warmup: bool = False,
    tokenizer: Any = None,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Sample completions of many prompts together, in one call.

    `continuous_batching_config` is a `RolloutConfig`, or transformers' own. `persistent_manager`
    keeps the manager on the model for the next call, which syncs the weights and reads no keys of
    this one. For the other arguments see `RolloutGenerator`, and its `generate_batch` for the
    outputs, by request id, and the errors.

    Raises:
        ConfigurationError: `kwargs` has an unknown name.
    """
    known = list(inspect.signature(RolloutGenerator.generate_batch).parameters)[3:]
    require_known(kwargs, known, "generate_batch has no argument", ConfigurationError)
    config = as_rollout_config(continuous_batching_config)
    with (
        nullcontext(_kept_generator(model, config, tokenizer))
        if persistent_manager
        else RolloutGenerator(model, config, tokenizer=tokenizer)
    ) as generator:
        return generator.generate_batch(
            inputs,
            generation_config,
            record_timestamps=record_timestamps,
            progress_bar=progress_bar,
            warmup=warmup,
            **kwargs,
        )


class _PersistentGenerator:
    """Hold a model's generator; a copied or pickled model gets an empty holder."""

    def __init__(self, generator: RolloutGenerator | None = None) -> None:
        self.generator = generator

    def __reduce__(self) -> tuple[type["_PersistentGenerator"], tuple[()]]:
        return _PersistentGenerator, ()


def _kept_generator(
    model: torch.nn.Module, config: RolloutConfig, tokenizer: Any
) -> RolloutGenerator:
    """Return the generator kept on the model, or keep a new one.

    It is kept if its settings are equal, and if the wrapper still has the same module inside.
    """
    holder = vars(model).setdefault(GENERATOR_ATTRIBUTE, _PersistentGenerator())
    generator = holder.generator
    has_settings = generator and generator.config == config and generator.tokenizer is tokenizer
    if has_settings and generator.is_of(model):
        generator.sync_weights()
        return generator
    if generator:
        generator.close()
    holder.generator = RolloutGenerator(model, config, tokenizer=tokenizer)
    return holder.generator
