"""Rollout worker and weight transfer of TRL's AsyncGRPOTrainer, without a server or network.

Owns the engine, unless there is a pool, and a thread that keeps groups in flight and scores them.
Implements the trainer's protocols `rollout_worker` and `weight_transfer`. The engine runs a copy of
the weights, which the trainer writes while the engine is paused; so generation and training
overlap. The trainer's thread calls the public methods.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cb_rollout.compat.accelerate import require_launched_together
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import RolloutDtype, WeightSync
from cb_rollout.config.hf import as_trainers_config
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import (
    ConfigurationError,
    InvalidRequestError,
    RolloutError,
    WeightSyncError,
    error_text,
)
from cb_rollout.integrations.async_grpo.conversations import ConversationLoop
from cb_rollout.integrations.async_grpo.prompts import PositionCallback, PromptSource
from cb_rollout.integrations.async_grpo.samples import (
    RolloutSample,
    SampleQueue,
    restored_sample,
    samples_of,
    saved_sample,
    summed_rewards,
)
from cb_rollout.integrations.async_grpo.tree_attention import adapt_trainers
from cb_rollout.integrations.ray.pool import PooledGenerator, RolloutPool
from cb_rollout.integrations.trl.images import images_in
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.strategies import Group, GroupCollector, Plain, RequestStream, Strategy
from cb_rollout.types import GenerationOutput

# Version of the layout of a `state_dict`.
STATE_FORMAT = 1

# Interval at which a wait checks whether the run is over.
POLL_SECONDS = 0.2


def _write(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in tensors:
            parameter = parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                shape = "none" if parameter is None else tuple(parameter.shape)
                raise WeightSyncError(
                    f"the trainer sends {name} {tuple(tensor.shape)}, and the engine's model has "
                    f"{shape}; create AsyncRollouts from the trainer's own checkpoint."
                )
            parameter.copy_(tensor)


class _Asynchronous(Strategy):
    """A strategy that carries all groups, and fills the allowed number in flight."""

    def __init__(
        self, strategy: Strategy, max_staleness: int, num_groups_allowed: Callable[[], int]
    ) -> None:
        """Keep and retry as another strategy does; submit as many groups as allowed.

        Args:
            strategy: decides what is kept and retried.
            max_staleness: maximum age of a group in policy versions.
            num_groups_allowed: returns the current maximum of groups in flight.
        """
        self.num_extra_members = strategy.num_extra_members
        self.max_dropped_groups = strategy.max_dropped_groups
        self.max_retries = strategy.max_retries
        self.min_group_size = strategy.min_group_size
        self.carries = True
        self.max_staleness = max_staleness
        self._strategy = strategy
        self._num_groups_allowed = num_groups_allowed

    @property
    def num_extra_groups(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of groups beyond the requested one for which the queue has room now."""
        return self._num_groups_allowed() - 1

    def keeps(self, group: Group) -> bool:
        return self._strategy.keeps(group)

    def decisions(self) -> dict[str, Any]:
        """Return the settings of the inner strategy, without the number of allowed groups."""
        return self._strategy.decisions() | {"max_staleness": self.max_staleness}


class _GroupsLock:
    """A lock that serves waiting threads before a thread that released it temporarily."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = threading.Lock()
        """Held by the thread that gets the lock next."""

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let other threads have the lock inside the block."""
        self._lock.release()
        try:
            yield
        finally:
            self.__enter__()


class _LockedStream(RequestStream):
    """A stream whose owner holds a lock, except while it waits for a sequence to end."""

    def __init__(self, generator: Any, params: SamplingParams, lock: _GroupsLock) -> None:
        super().__init__(generator, params)
        self._lock = lock

    def wait(self) -> None:
        """Wait, and let other threads read the state of all groups meanwhile."""
        self._manager.require_can_wait()
        with self._lock.released():
            self._output_queue.wait()


class AsyncRollouts:
    """Rollout worker and weight transfer of an `AsyncGRPOTrainer`, in process.

    With several trainer processes, the first one samples for all, as the trainer expects. The
    others create this object too, but without an engine.
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
            model: the trainer's checkpoint; or a module that only the engine uses.
            args: the trainer's `AsyncGRPOConfig`, the same object.
            train_dataset: rows with a "prompt", text or a chat; iterated over endlessly. Chats are
                rendered with the trainer's `chat_template_kwargs`.
            reward_funcs: one or several functions with TRL's arguments.
            processing_class: the tokenizer; None: the checkpoint's.
            config: a `RolloutConfig`; its seed defaults to the trainer's.
            pool: workers of the trainer's checkpoint, which sample instead of an engine in this
                process. The pool has its own config, and stays open.
            strategy: decides the groups to drop and retry; `max_staleness` bounds the number in
                flight. None: nothing is dropped.
            in_flight: what happens to unfinished completions when the weights change; see
                `ContinuousBatchingManager.pause`.
            tools: as for `AsyncGRPOTrainer`; prompts must be chats. TRL's own loop calls them and
                builds the training rows.
            environment_factory: as for `AsyncGRPOTrainer`; its `get_reward` may replace
                `reward_funcs`.

        Raises:
            ConfigurationError: a setting needs a server, or cannot be honoured, or the trainer has
                fewer processes than the launcher was asked to start.
        """
        require_launched_together(args.world_size)
        has_conversations = bool(tools) or environment_factory is not None
        _require_settings(args, in_flight, has_conversations and strategy is not None)
        _require_data(train_dataset, reward_funcs)
        self._tools = tools
        self._environment_factory = environment_factory
        self._has_conversations = has_conversations
        if pool is not None:
            if config is not None:
                raise ConfigurationError("a pool has a config already; leave config out.")
            pool.require_own("AsyncRollouts")
        self._args = args
        self._reward_funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        if args.device.type != "cuda":
            adapt_trainers()
        if processing_class is None:
            processing_class = _tokenizer_of(model)
        self._tokenizer = processing_class
        self._source = PromptSource(train_dataset, processing_class, args.chat_template_kwargs)
        self.callback = PositionCallback(self._source, _samples_per_step(args))
        """For the trainer's `callbacks`: a resumed run then goes on with the next prompt."""
        self._max_outstanding = _max_outstanding(args)
        self._max_in_flight = _max_in_flight(args, self._max_outstanding)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.rollout_buffer = SampleQueue(self._max_outstanding, self._report_age)
        self._strategy = _Asynchronous(
            strategy or Plain(), args.max_staleness, self._num_groups_allowed
        )
        self._version = SimpleNamespace(value=0, first=0)
        """The trainer's version of the weights, and the one that is the engine's version 0."""
        self._begin_idle()
        self._pool = pool
        self._in_flight: Literal["keep", "recompute"] = in_flight
        self._pause = ExitStack()
        self._is_paused = False
        self.generator: Any = None
        """Samples in the first process, with an engine or a pool; None in the other processes."""
        if not args.process_index and pool is not None:
            self.generator = PooledGenerator(pool)
        elif not args.process_index:
            self.generator = _create_generator(model, args, config, processing_class)

    def _begin_idle(self) -> None:
        """Start without a thread, groups or samples."""
        self._conversations: ConversationLoop | None = None
        self._stream: RequestStream | None = None
        self._collector: GroupCollector | None = None
        self._groups_lock = _GroupsLock()
        """Held by the rollout thread while it changes groups, and samples that it has scored."""
        self._unqueued: deque[RolloutSample] = deque()
        """Samples of the last group, for which the queue has no room yet."""
        self._loaded: Mapping[str, Any] | None = None
        """A state to go on from at the next start; None: begin anew."""
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last_progress = time.monotonic()

    def start(self) -> None:
        self._begin_groups()
        self._is_stopping.clear()
        self._error = None
        self._last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="cb_rollout async", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and the engine; may be called twice."""
        self._is_stopping.set()
        for rollouts in (self._conversations, self._stream):
            if rollouts is not None:
                rollouts.stop()
        self.resume()
        if self._thread is not None:
            self._thread.join()
        # A pool stays open.
        if self.generator is not None and self._pool is None:
            self.generator.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is not consumed yet, for `torch.save`; rollouts continue.

        It has the samples in the queue, the groups in flight with their tokens, log-probabilities
        and versions, the remaining prompts, and the random state. Call it between `start` and
        `stop`, in the process that samples.

        Raises:
            RolloutError: a pool samples, tools are called, nothing was started, or this thread
                paused the engine.
        """
        if self._has_conversations or self._pool is not None:
            raise RolloutError(
                "conversations with tools, and sequences of a pool, cannot be saved before they "
                "end; resume by AsyncRollouts.callback, which keeps the position in the data."
            )
        collector = self._collector
        if collector is None or self._is_paused:
            raise RolloutError(
                "state_dict() is taken between start() and stop(), and not amid a weight update; "
                "call resume() first."
            )
        with self._groups_lock:
            groups = collector.state_dict()
            groups["prompts"] = [prompt["index"] for prompt in groups["prompts"]]
            samples = [*self.rollout_buffer.waiting(), *self._unqueued]
            return {
                "format": STATE_FORMAT,
                "rollouts": self.generator.state_dict(),
                "model_version": self._version.value,
                "first_version": self._version.first,
                "prompts": self._source.state(),
                "groups": groups,
                "samples": [saved_sample(sample) for sample in samples],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` at the next `start`; load the weights of that step first.

        The queue has its samples again. Sequences continue from their last tokens with the same
        random draws as without the stop.

        Raises:
            InvalidRequestError: the state is from another version of cb_rollout, or another
                strategy.
            RolloutError: rollouts have started, or a pool samples, or tools are called.
        """
        found = state.get("format") if isinstance(state, Mapping) else None
        if found != STATE_FORMAT:
            raise InvalidRequestError(
                f"the state of AsyncRollouts has format {found!r}, and {STATE_FORMAT} is read; "
                "begin anew, or load it with the version of cb_rollout that saved it."
            )
        if self._has_conversations or self._pool is not None or self._collector is not None:
            raise RolloutError(
                "a state of AsyncRollouts is loaded before start(), without tools and without a "
                "pool."
            )
        obstacle = self._create_collector().obstacle_to(state["groups"])
        if obstacle is not None:
            raise InvalidRequestError(f"{obstacle}; make AsyncRollouts as it was, or begin anew.")
        self._loaded = state

    def _create_collector(self) -> GroupCollector:
        self._stream = _LockedStream(self.generator, self._params, self._groups_lock)
        return GroupCollector(
            self._stream,
            iter(self._source),
            self._reward,
            self._strategy,
            num_generations=self._args.num_generations,
            runs_while_training=True,
        )

    def _begin_groups(self) -> None:
        """Create the collector of a run, with the groups and samples of a loaded state."""
        if self._has_conversations:
            return
        self._collector = collector = self._create_collector()
        state = self._loaded
        self._loaded = None
        if state is None:
            return
        rollouts = state["rollouts"]
        self.generator.load_state_dict(rollouts)
        num_more = self.generator.policy_version - rollouts["policy_version"]
        self._version.value = state["model_version"]
        self._version.first = state["first_version"] - num_more
        self._source.go_on(state["prompts"])
        self._unqueued.extend(restored_sample(saved) for saved in state["samples"])
        groups = dict(state["groups"])
        groups["prompts"] = self._source.at(groups["prompts"])
        collector.load_state_dict(groups)

    def update_model_version(self, model_version: int) -> None:
        self._version.value = model_version
        self._version.first = model_version - self.generator.policy_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise `RolloutError` if the thread ended, or made no progress for `stale_after_s` s."""
        if self._error is not None:
            raise RolloutError(
                f"the rollout thread ended on {error_text(self._error)}"
            ) from self._error
        if self.rollout_buffer.full():
            self._note_progress()
        silence = time.monotonic() - self._last_progress
        if silence > stale_after_s:
            raise RolloutError(
                f"no completion for {silence:.0f} s (heartbeat_stale_after_s={stale_after_s:g}); "
                "raise it if completions or rewards take that long."
            )

    def init_weight_transfer(self) -> None:
        """Do nothing: the engine is in this process."""

    def pause(self) -> None:
        """Pause the engine between two forwards; a pool's workers pause while they write."""
        if self._pool is None:
            self._pause.enter_context(self.generator.manager.pause(self._in_flight))
            self._is_paused = True

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the trainer's weights over the engine's, or send them to the pool's workers."""
        if self._pool is None:
            _write(self.generator.manager.model, iterator)
        else:
            self._pool.sync_weights(dict(iterator), in_flight=self._in_flight)

    def resume(self) -> None:
        self._pause.close()
        self._is_paused = False

    destroy = stop

    def _num_groups_allowed(self) -> int:
        """Return the maximum of groups in flight that can be trained on before they are stale."""
        num_allowed = self._max_outstanding - self.rollout_buffer.qsize()
        return max(1, min(num_allowed, self._max_in_flight) // self._args.num_generations)

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

    def _run(self) -> None:
        try:
            if self._has_conversations:
                self._roll_out_conversations()
            else:
                self._roll_out_groups()
        except BaseException as error:  # noqa: BLE001  the trainer's thread raises it
            if not self._is_stopping.is_set():
                self._error = error

    def _roll_out_conversations(self) -> None:
        self._conversations = ConversationLoop(
            generator=self.generator,
            params=self._params,
            source=self._source,
            samples=self.rollout_buffer,
            args=self._args,
            max_inflight_tasks=self._max_in_flight,
            version=self._version,
            on_progress=self._note_progress,
            reward_funcs=self._reward_funcs,
            processing_class=self._tokenizer,
            metrics_queue=self.metrics_queue,
            tools=self._tools,
            environment_factory=self._environment_factory,
        )
        if not self._is_stopping.is_set():
            self._conversations.run()

    def _note_progress(self) -> None:
        self._last_progress = time.monotonic()

    def _roll_out_groups(self) -> None:
        collector = self._collector
        assert collector is not None
        with self._groups_lock:
            try:
                # Queue the samples of a loaded state.
                self._put_samples()
                while not self._is_stopping.is_set():
                    (group,) = collector.collect(1)
                    self._note_progress()
                    self._put(group, collector.metrics())
            finally:
                # Otherwise a pool would go on sampling.
                collector.close()
                self._collector = None

    def _put(self, group: Group, metrics: dict[str, float]) -> None:
        lengths = [len(output.generated_tokens) for output in group.outputs]
        self._source.queue(group.prompt["index"], len(group.outputs))
        texts = self._texts(group.outputs)
        self._unqueued.extend(samples_of(group, texts, self._version.first))
        self._put_samples()
        self.metrics_queue.put(
            {
                "completions/mean_length": (float(sum(lengths)), float(len(lengths))),
                "completions/max_length": float(max(lengths)),
                "rollout/groups_dropped_total": metrics["rollout/groups_dropped"],
                "rollout/groups_cancelled_total": metrics["rollout/groups_cancelled"],
                "rollout/tokens_total": float(sum(lengths)),
            }
        )

    def _put_samples(self) -> None:
        """Queue a group's samples; while the queue is full, other threads may read the state."""
        while self._unqueued and not self._is_stopping.is_set():
            try:
                self.rollout_buffer.put_nowait(self._unqueued[0])
            except queue.Full:
                with self._groups_lock.released():
                    self.rollout_buffer.wait_for_room(POLL_SECONDS)
                continue
            self._unqueued.popleft()

    def _report_age(self, sample: RolloutSample) -> None:
        self._source.take(sample.group_id)
        ages = []
        sum_of_ages = 0
        num_tokens = 0
        for version, num_of_version in sample.token_versions:
            age = self._version.value - version
            ages.append(age)
            sum_of_ages += age * num_of_version
            num_tokens += num_of_version
        self.metrics_queue.put(
            {
                "rollout/staleness_mean": (float(sum_of_ages), float(num_tokens)),
                "rollout/staleness_max": float(max(ages)),
            }
        )

    def _texts(self, outputs: Sequence[GenerationOutput]) -> list[str]:
        tokens = [output.generated_tokens for output in outputs]
        return self._tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def _reward(self, taken: Any, outputs: list[GenerationOutput]) -> list[float | None]:
        texts = self._texts(outputs)
        rewards = summed_rewards(self._reward_funcs, taken["row"], outputs, texts)
        # A group that is kept is queued at once.
        self._source.drop(taken["index"])
        return rewards


def _tokenizer_of(model: str | torch.nn.Module) -> Any:
    if not isinstance(model, str):
        raise ConfigurationError("a model object brings no tokenizer; pass processing_class too.")
    return AutoTokenizer.from_pretrained(model)


def _require_settings(args: Any, in_flight: str, is_strategy_ignored: bool = False) -> None:
    """Refuse settings that need a server, or that would be ignored."""
    if is_strategy_ignored:
        raise refused("async trainer, strategy and tools")
    if args.token_budget is None:
        raise ConfigurationError(
            "token_budget=None asks a vLLM server for its limit, and there is no such server; set "
            "it to the maximum tokens of one forward, or to 0 for batches of "
            "per_device_train_batch_size completions."
        )
    if in_flight not in ("keep", "recompute"):
        raise ConfigurationError(f"in_flight={in_flight!r} is not 'keep' or 'recompute'.")
    if not args.temperature > 0:
        raise ConfigurationError(
            f"temperature={args.temperature}: all completions of a group would be the same; raise "
            "it."
        )


def _samples_per_step(args: Any) -> int:
    """Return the number of completions per optimizer step, over all processes."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size


def _max_outstanding(args: Any) -> int:
    """Return the maximum of completions in flight or queued so that none becomes stale."""
    num_samples = _samples_per_step(args)
    limit = max(1, args.max_staleness) * num_samples
    if limit < args.num_generations:
        raise ConfigurationError(
            f"a group of num_generations={args.num_generations} is larger than "
            f"max_staleness={args.max_staleness} steps of {num_samples} completions, so part of "
            "the group would be too old; raise gradient_accumulation_steps or max_staleness."
        )
    return limit


def _max_in_flight(args: Any, max_outstanding: int) -> int:
    """Return the maximum of completions sampled at a time; the trainer's setting comes first."""
    if args.max_inflight_tasks > 0:
        return min(args.max_inflight_tasks, max_outstanding)
    return max_outstanding


def _require_data(train_dataset: Any, reward_funcs: Any) -> None:
    """Refuse data and rewards that would fail at the first completion."""
    for reward in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if not callable(reward):
            raise ConfigurationError(
                f"reward_funcs holds {reward!r:.60}, which cannot be called; pass functions that "
                "take prompts and completions."
            )
    if not isinstance(train_dataset, Iterable):
        raise ConfigurationError(
            f"train_dataset is a {type(train_dataset).__name__}; pass the trainer's own."
        )
    columns = getattr(train_dataset, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise ConfigurationError(
            f"train_dataset has no column 'prompt', only {', '.join(columns)}; rename the one that "
            "holds it."
        )
    # An iterator's first row would be lost.
    reads_row = not isinstance(train_dataset, Iterator)
    where = images_in(train_dataset, "train_dataset", reads_row=reads_row)
    if where:
        raise refused("async trainer, images", where=where)


def _create_generator(
    model: str | torch.nn.Module, args: Any, config: Any, tokenizer: Any
) -> RolloutGenerator:
    """Create a generator on its own copy of the weights, on the trainer's device, in its dtype."""
    settings = as_trainers_config(config, args.seed)
    if settings.weight_sync == WeightSync.COPY:
        raise refused("async trainer, copy")
    if settings.router_replay:
        raise refused("async trainer, router replay")
    dtype = settings.rollout_dtype
    if dtype == RolloutDtype.AUTO and args.bf16:
        dtype = RolloutDtype.BFLOAT16
    elif dtype == RolloutDtype.AUTO and args.fp16:
        dtype = RolloutDtype.FLOAT16
    settings = replace(settings, weight_sync=WeightSync.SHARED, rollout_dtype=dtype)
    if not isinstance(model, torch.nn.Module):
        loading = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
        loading |= args.model_init_kwargs or {}
        model = AutoModelForCausalLM.from_pretrained(model, **loading)
    return RolloutGenerator(model.to(args.device), settings, tokenizer=tokenizer)
