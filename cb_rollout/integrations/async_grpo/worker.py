"""Rollout worker and weight transfer of TRL's AsyncGRPOTrainer, without a server or network.

Owns the engine, unless a pool is given, and a thread that keeps groups in flight and scores them.
Implements both of the trainer's protocols, `rollout_worker` and `weight_transfer`. The engine runs
a copy of the weights, which the trainer writes while the engine is paused; so generation and
training overlap, and no forward reads half of an update. The trainer's thread calls the public
methods.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError, RolloutError, error_text
from cb_rollout.integrations.async_grpo.engines import LocalEngine, PooledEngine
from cb_rollout.integrations.async_grpo.prompts import PositionCallback, PromptSource
from cb_rollout.integrations.async_grpo.rollout_loop import (
    TRAINER_MODULE,
    RolloutLoop,
    SampleQueue,
    SharedNumber,
    VersionedSample,
)
from cb_rollout.integrations.async_grpo.settings import (
    create_generator,
    max_outstanding,
    own_tokenizer,
    require_data,
    require_settings,
    samples_per_step,
)
from cb_rollout.integrations.async_grpo.tree_attention import adapt_trainers
from cb_rollout.integrations.ray.pool import RolloutPool
from cb_rollout.integrations.ray.pooled_generator import PooledGenerator
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.strategies import Plain, Strategy


class AsyncRollouts:
    """Rollout worker and weight transfer of an `AsyncGRPOTrainer`, in process.

    Of several trainer processes the first one samples for all, as the trainer wants it; the others
    make this object too, which has no engine there.
    """

    def __init__(
        self,
        model: str | torch.nn.Module,
        args: Any,
        train_dataset: Any,
        reward_funcs: Callable[..., Any] | list[Callable[..., Any]],
        *,
        processing_class: Any = None,
        config: Any = None,
        pool: RolloutPool | None = None,
        strategy: Strategy | None = None,
        in_flight: Literal["keep", "recompute"] = "recompute",
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
    ) -> None:
        """Load the engine's model; generation starts with the trainer.

        Args:
            model: the trainer's checkpoint; or a module for the engine alone.
            args: the trainer's `AsyncGRPOConfig`, the same object.
            train_dataset: rows with a "prompt", text or a chat; iterated over endlessly. Chats are
                rendered with the trainer's `chat_template_kwargs`.
            reward_funcs: one or several functions with TRL's arguments: lists `prompts`,
                `completions`, `completion_ids` and the data set's other columns.
            processing_class: the tokenizer; None: the checkpoint's.
            config: a `RolloutConfig`; its seed defaults to the trainer's.
            pool: workers that sample instead of an engine of this process; made of the trainer's
                checkpoint, with a config of its own. It stays open. None: an engine is made.
            strategy: decides the groups to drop and retry; `max_staleness` bounds the number in
                flight. None: nothing is dropped.
            in_flight: treatment of unfinished completions when the weights change; see
                `ContinuousBatchingManager.pause`.
            tools: functions that a model may call, as `AsyncGRPOTrainer` takes them; prompts are
                chats then. TRL's own loop calls them and forms the rows to train on.
            environment_factory: makes an environment for each conversation, as
                `AsyncGRPOTrainer` takes it; its `get_reward` may take the place of `reward_funcs`.

        Raises:
            ConfigurationError: a setting needs a server, or cannot be honoured.
        """
        has_tools = bool(tools) or environment_factory is not None
        require_settings(args, in_flight, has_tools and strategy is not None)
        require_data(train_dataset, reward_funcs)
        if pool is not None and config is not None:
            raise ConfigurationError("a pool has a config already; leave config out.")
        if args.device.type != "cuda":
            adapt_trainers(TRAINER_MODULE)
        self._args, self._strategy = args, strategy or Plain()
        self._tokenizer = own_tokenizer(model, processing_class)
        self._source = PromptSource(train_dataset)
        self.callback = PositionCallback(self._source, samples_per_step(args))
        """For the trainer's `callbacks`: a resumed run then goes on with the next prompt."""
        self._max_outstanding = max_outstanding(args)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.rollout_buffer = SampleQueue(self._max_outstanding, self._report_age)
        self._loop_settings = {
            "reward_funcs": reward_funcs if isinstance(reward_funcs, list) else [reward_funcs],
            "tools": tools,
            "environment_factory": environment_factory,
            "processing_class": self._tokenizer,
            "metrics_queue": self.metrics_queue,
        }
        self._version = SharedNumber()
        self._first_version = 0
        self._loop: RolloutLoop | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last_progress = time.monotonic()
        self._engine: LocalEngine | PooledEngine | None = None
        if args.process_index == 0 and pool is not None:
            self._engine = PooledEngine(pool, in_flight)
        elif args.process_index == 0:
            generator = create_generator(model, args, config, self._tokenizer)
            self._engine = LocalEngine(generator, in_flight)

    @property
    def generator(self) -> RolloutGenerator | PooledGenerator:
        """The generator of the first process.

        Raises:
            ConfigurationError: another process asks.
        """
        return self._sampling_engine.generator

    @property
    def _sampling_engine(self) -> LocalEngine | PooledEngine:
        if self._engine is None:
            raise ConfigurationError(
                f"process {self._args.process_index} has no engine: the first process samples for "
                "all; ask it there."
            )
        return self._engine

    def start(self) -> None:
        """Start generating; the trainer has sent its weights."""
        self._error, self._last_progress = None, time.monotonic()
        self._loop = RolloutLoop(
            self.generator,
            self._params,
            self._source,
            self.rollout_buffer,
            self._args,
            strategy=self._strategy,
            version=self._version,
            first_version=lambda: self._first_version,
            num_groups_allowed=self._num_groups_allowed,
            max_outstanding=self._max_outstanding,
            tool_timeout_seconds=self.generator.config.tool_timeout_seconds,
            on_progress=self._note_progress,
            **self._loop_settings,
        )
        self._thread = threading.Thread(
            target=self._run, args=(self._loop,), name="cb_rollout async", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and the engine; may be called twice."""
        if self._engine is None:
            return
        if self._loop is not None:
            self._loop.stop()
        self._engine.resume()
        if self._thread is not None:
            self._thread.join()
        self._engine.close()

    def update_model_version(self, model_version: int) -> None:
        """Take the trainer's version of the weights that it has just sent."""
        self._version.value = model_version
        self._first_version = model_version - self.generator.policy_version
        if self._loop is not None:
            self._loop.note_version()

    def check_health(self, stale_after_s: float) -> None:
        """Check that completions still come.

        Raises:
            RolloutError: the thread ended, or no completion came for `stale_after_s` seconds.
        """
        if self._error is not None:
            raise RolloutError(
                f"the rollout thread ended on {error_text(self._error)}"
            ) from self._error
        if self.rollout_buffer.full():
            self._note_progress()
        silence = time.monotonic() - self._last_progress
        if silence > stale_after_s:
            raise RolloutError(
                f"no completion for {silence:.0f} s, heartbeat_stale_after_s={stale_after_s:g}; "
                "raise it where completions or rewards take that long."
            )

    def init_weight_transfer(self) -> None:
        """Do nothing: the engine is in this process."""

    def pause(self) -> None:
        """Pause the engine between two forwards."""
        self._sampling_engine.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the trainer's weights over the engine's.

        Raises:
            WeightSyncError: the two models do not have the same tensors.
        """
        self._sampling_engine.write(iterator)

    def resume(self) -> None:
        """Resume the engine under the new weights."""
        self._sampling_engine.resume()

    def destroy(self) -> None:
        """Stop; the run is over."""
        self.stop()

    def _num_groups_allowed(self) -> int:
        """Return the most groups in flight that can be trained on before they are too old."""
        # The trainer takes samples_per_step between two versions, first come first served.
        limit = self._max_outstanding - self.rollout_buffer.qsize()
        if self._args.max_inflight_tasks > 0:
            limit = min(limit, self._args.max_inflight_tasks)
        return max(1, limit // self._args.num_generations)

    @property
    def _params(self) -> SamplingParams:
        args = self._args
        return SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=max(0, args.top_k),
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
            max_new_tokens=args.max_completion_length,
            stop_token_ids=(self._tokenizer.eos_token_id,),
        )

    def _note_progress(self) -> None:
        self._last_progress = time.monotonic()

    def _run(self, loop: RolloutLoop) -> None:
        try:
            loop.run()
        except BaseException as error:  # noqa: BLE001  the trainer's thread raises it
            self._error = error

    def _report_age(self, sample: VersionedSample) -> None:
        """Report the age of a sample's tokens, on the trainer's thread, as it takes the sample."""
        self._source.take(sample.prompt_index)
        ages = [(self._version.value - version, n) for version, n in sample.token_versions]
        self.metrics_queue.put(
            {
                "rollout/staleness_mean": (
                    float(sum(age * n for age, n in ages)),
                    float(sum(n for _, n in ages)),
                ),
                "rollout/staleness_max": float(max(age for age, _ in ages)),
            }
        )
