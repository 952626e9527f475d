"""Offer transformers' `ContinuousBatchingManager` interface over an engine on a thread.

Every method may be called from any thread, and every wait ends. Other folders reach the engine and
its loop as attributes, and use the engine itself only inside a pause.
"""

import asyncio
import copy
import logging
import math
import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.torch import release_workers
from cb_rollout.config.call_arguments import require_arguments
from cb_rollout.config.checks import checked_timeout
from cb_rollout.config.compilation import require_compiled_so, with_compile_settings
from cb_rollout.config.enums import InFlight
from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import (
    SamplingParams,
    equal_group_warning,
    resolved,
    sequences_per_input,
)
from cb_rollout.engine.core import Engine
from cb_rollout.engine.decode.path import ExecutionPath
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import MemoryPlan
from cb_rollout.engine.memory.training import OptimizerOrName
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.model.precision import autocast_alone
from cb_rollout.engine.model.routers import Routers
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.input_processor import Input, InputProcessor, ServingLimits
from cb_rollout.engine.service.lockstep import EngineGroup
from cb_rollout.engine.service.loop import EngineLoop
from cb_rollout.engine.service.output_queue import CallbackSink, OutputQueue, OutputSink
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.engine.service.saved_requests import (
    restored_output,
    restored_request,
    saved_output,
    saved_request,
)
from cb_rollout.errors import ConfigurationError, InvalidRequestError, RolloutError
from cb_rollout.metrics.observer import observer
from cb_rollout.metrics.registry import EngineStatus
from cb_rollout.types import CancelResult, GenerationOutput

_LOGGER = logging.getLogger(__name__)

# Version of the layout of a `state_dict`.
STATE_FORMAT = 1

# Longest wait of an iterator between two checks that a request is still in flight.
POLL_SECONDS = 0.1


# The arguments that `add_request` takes besides its own.
_SAMPLING = {field.name for field in fields(SamplingParams)}


class ContinuousBatchingManager:
    """Generate requests from any thread together, by continuous batching.

    If you create a manager yourself, it keeps its cache until `stop()`, and refuses settings that
    only affect a `RolloutGenerator` or an attached trainer.
    """

    weight_selection: str = ""
    """Phrase for `decode_path` that says how adapters run, and why."""

    def __init__(
        self,
        model: torch.nn.Module,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        *,
        autocast_dtype: torch.dtype | None = None,
        rank: int | None = None,
        tokenizer: Any = None,
        trained: torch.nn.Module | None = None,
        optimizer: OptimizerOrName | None = None,
    ) -> None:
        """Check the model and plan the memory; nothing runs before `start()`.

        Args:
            model: a causal language model, wrapped or not; never copied.
            generation_config: defaults of every request; None: the model's own. Each request
                samples its `num_return_sequences` sequences. Its engine settings apply to fields
                that `continuous_batching_config` leaves at their defaults.
            continuous_batching_config: a `RolloutConfig`, or transformers' own config; None: the
                one in the generation config.
            workload_hints: transformers' `WorkloadHints`. At most its `num_requests` sequences run
                together, unless `max_requests_per_batch` is set; its lengths have no effect.
            autocast_dtype: run forwards under autocast to this dtype; None: without `trained`, as
                `rollout_dtype` says, otherwise the model's dtype.
            rank: data-parallel rank, so that processes sample with different seeds; None: the rank
                in `torch.distributed`'s process group, else the environment's `RANK`, else 0.
            tokenizer: decodes tokens for stop strings, which are refused without it. A processor
                also encodes images.
            trained: the training model that `model` is a copy of; None: `model` itself.
            optimizer: the training model's optimizer, its class or known name; None: unknown.

        Raises:
            ConfigurationError: a setting cannot be honoured, or the model is not supported.
        """
        facts = ModelFacts.of(model)
        module = facts.module
        hf_compat.refuse_what_cannot_generate(module)
        hf_compat.refuse_sharded(module)
        holder = model if trained is None else trained
        config_in_use = _config_in_use(generation_config, holder)
        asked = as_rollout_config(continuous_batching_config, config_in_use)
        hinted = _with_hints(asked, workload_hints, next(module.parameters()).device)
        self.config = with_compile_settings(hinted, config_in_use)
        if trained is None:
            autocast_dtype = autocast_dtype or autocast_alone(self.config, module)
        self.set_generation_config(config_in_use)
        self.group = _create_group(facts, self.config)
        """The processes that share the model's layers; None: this process has all layers."""
        self.engine = engine = Engine(
            module,
            self.config,
            autocast_dtype,
            holder,
            optimizer,
            all_reduce_min=self.group and self.group.all_reduce_min,
        )
        # Not standalone: a generator starts its manager with the next rollout.
        self._is_standalone = trained is None
        self._follows_model = generation_config is None
        limits = _serving_limits(engine, holder)
        seed = self.config.seed
        if self.group is not None:
            # The processes of a group draw the same numbers.
            rank = self.group.data_parallel_rank
            if seed is None:
                seed = secrets.randbits(63)
            seed = self.group.gather(seed)[0]
        self.input_processor = InputProcessor(limits, seed, rank, tokenizer)
        self.loop = loop = EngineLoop(engine, self.group)
        self.pauses = loop.pauses
        self.durations = loop.durations
        self.counters = engine.counters
        self.warmed_up = False
        """True once `warmup()` was called, or found to be useless."""
        self.is_served = False
        """True while a server submits requests, so that the background thread computes."""
        self._output_queue = OutputQueue()
        # Ends the thread when nothing refers to the manager any more, or at the interpreter's exit.
        weakref.finalize(self, _halt, weakref.ref(self.loop))

    def __reduce__(self) -> NoReturn:
        raise RolloutError(
            "a ContinuousBatchingManager owns a thread and a live model, so it cannot be pickled "
            "or copied; pickle its config and make a new manager from it."
        )

    def warmup(self, num_steps: float = math.inf) -> None:
        """Trace and compile decode steps now, and capture CUDA graphs that were missing.

        On a CPU, compiling takes seconds, and happens only if it pays off in the `num_steps` decode
        steps to come. On a GPU, steps of long sequences, or without a shared prompt, may need other
        graphs than those that were captured first. No other thread may train during this call.
        """
        with self.loop.paused():
            self.pauses.require_weights()
            self.engine.warm_up(num_steps)
        self.warmed_up = True

    def set_generation_config(self, generation_config: Any) -> None:
        """Set the defaults of all requests that are added from now on.

        Raises:
            ConfigurationError: a setting of the config cannot be honoured.
            InvalidRequestError: `num_return_sequences` is not a whole number of at least 1.
        """
        require_compiled_so(self.config, generation_config)
        count = sequences_per_input(getattr(generation_config, "num_return_sequences", None))
        self.defaults = from_generation_config(generation_config, self.config)
        self.generation_config = generation_config
        self.num_return_sequences = count
        self._read_settings = copy.deepcopy(vars(generation_config))
        self._follows_model = False

    def follow_generation_config(self) -> None:
        """Read the generation config again if it was edited in place.

        If none was passed, the model's current generation config is used. The model's
        end-of-sequence ids are read again too.

        Raises:
            ConfigurationError, InvalidRequestError: as `set_generation_config`.
        """
        follows_model = self._follows_model
        config = self.generation_config
        if follows_model:
            config = hf_compat.generation_config_of(self.engine.training_model.module) or config
        if config is not self.generation_config or vars(config) != self._read_settings:
            self.set_generation_config(config)
            self._follows_model = follows_model
        limits = self.input_processor.limits
        model_eos = hf_compat.model_eos_token_ids(self.engine.training_model.module)
        if model_eos != limits.model_eos:
            self.input_processor.limits = replace(limits, model_eos=model_eos)

    @property
    def continuous_batching_config(self) -> RolloutConfig:
        """Return the config with the sizes that the memory plan and the device chose."""
        limits = self.engine.limits
        return replace(
            self.config,
            num_blocks=self.memory_plan.num_blocks,
            max_batch_tokens=limits.max_batch_tokens,
            max_requests_per_batch=limits.max_requests,
        )

    def start(self) -> None:
        """Start the background thread; an engine that died starts again with an empty queue."""
        self.loop.start()
        self._output_queue.reopen()

    def is_running(self) -> bool:
        """Return whether the background thread is alive."""
        return self.loop.is_running()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the background thread once the requests in flight are done.

        Args:
            block: wait for the thread to end.
            timeout: maximum wait in seconds; after it, unfinished requests are cancelled, and
                deliver their tokens so far. None: no limit.
            keep_for_next_session: keep the KV cache for the next `start()`.
            hard_stop: cancel requests in flight at once; they deliver their tokens so far.

        Raises:
            RolloutError: this thread paused the engine, or requests in flight cannot finish
                because the engine is asleep.
        """
        limit = checked_timeout(timeout)
        if self.is_running():
            self.pauses.require_not_paused_here("its thread cannot end")
        if self.loop.is_live() and not hard_stop:
            self.require_can_wait()
        self.loop.stop(drain=not hard_stop)
        if not block:
            return
        self.loop.join(limit)
        if self.is_running():
            self.loop.halt()
        if not keep_for_next_session and not self.is_running():
            self.engine.release_cache()

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait for the background thread to end, and log whether it did.

        Args:
            stop_trigger_time: `time.perf_counter()` at the request to stop, from which the logged
                seconds count; None: now.
            timeout: maximum wait in seconds; None: no limit.
        """
        began = time.perf_counter() if stop_trigger_time is None else stop_trigger_time
        self.loop.join(checked_timeout(timeout))
        if self.is_running():
            _LOGGER.warning("the thread still runs after a join of timeout=%s seconds", timeout)
        else:
            _LOGGER.info("the thread ended after %.2f seconds", time.perf_counter() - began)

    def destroy(self) -> None:
        """Finish the requests in flight, end the thread and free the KV memory.

        Raises:
            RolloutError: as `stop` does.
        """
        if self.is_running():
            self.stop()
        self.close()

    @contextmanager
    def pause(
        self, in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    ) -> Iterator[None]:
        """Pause the engine between two forwards; requests stay in flight.

        Inside the block, you may change the weights; one thread at a time can be inside. Entering
        waits for at most one forward. Unless a copy of the model generates, leaving begins a new
        policy version: later tokens carry the new version, and cached prefixes of older versions
        are not reused.

        Args:
            in_flight: what happens to unfinished sequences. "recompute": continue, with keys
                recomputed under the new weights; "keep": continue with the current keys; "abort":
                end, and deliver the tokens so far with `status=CANCELLED`.

        Raises:
            ConfigurationError: `in_flight` is none of these.
            RolloutError: called inside a step, for example by a logits processor; or the manager
                was not started.
            EngineDeadError: the engine stopped on an exception.
        """
        self.loop.require_alive()
        if self._is_standalone and not self.is_running():
            raise RolloutError(
                "the manager is not running, so there is nothing to pause; call start() first."
            )
        with self.paused(in_flight):
            yield

    def add_request(
        self,
        input_ids: Input,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **sampling: Any,
    ) -> str:
        """Queue a request; return its id.

        With `num_return_sequences` above 1 in the generation config, the request delivers that many
        outputs: the first has the request's id, the next `ID__child#0`, and so on.

        Args:
            input_ids: the prompt's token ids. With a processor as `tokenizer=`, also
                `{"prompt": token ids or text, "images": [...]}`.
            request_id: unique among unfinished requests; None: generated.
            max_new_tokens: maximum tokens to generate; None: as in the sampling parameters, else
                the generation config, else as many as the model and the cache can hold.
            streaming: deliver an output after every token.
            record_timestamps: record the time of each token.
            eos_token_id: end-of-sequence id, or several; None: as in the sampling parameters, else
                the model's own; -1: none.
            sampling_params: parameters of this request; None: the generation config's.
            **sampling: single fields of `SamplingParams` to change for this request, such as
                `temperature`. Greedy decoding stays greedy unless you pass `do_sample=True`.

        Raises:
            InvalidRequestError: the request can never be served.
            ConfigurationError: the model cannot run prompts with images.
            QueueFullError: `max_queue_size` requests are already waiting.
            EngineDeadError: the engine stopped on an exception.
        """
        self.follow_generation_config()
        params = resolved(sampling_params, self.defaults, max_new_tokens, eos_token_id)
        options = {"is_streaming": streaming, "records_timestamps": record_timestamps}
        return self._add([input_ids], params, sampling, request_id=request_id, **options)[0]

    def add_requests(
        self,
        inputs: Sequence[Input],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        *,
        sampling_params: SamplingParams | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Queue many requests, all or none; equal prompts are computed once.

        Args:
            inputs: the prompts, each as in `add_request`.
            max_new_tokens: see `add_request`.
            streaming: see `add_request`.
            record_timestamps: see `add_request`.
            sampling_params: parameters of all requests; see `add_request`.
            sampling: see `add_request`.

        Returns:
            The id of each request.

        Raises:
            InvalidRequestError: as `add_request`.
            QueueFullError: as `add_request`.
            EngineDeadError: as `add_request`.
        """
        self.follow_generation_config()
        params = resolved(sampling_params, self.defaults, max_new_tokens)
        options = {"is_streaming": streaming, "records_timestamps": record_timestamps}
        return self._add(inputs, params, sampling, **options)

    def _add(
        self, inputs: Sequence[Input], params: SamplingParams, changes: Any, **options: Any
    ) -> list[str]:
        if changes:
            require_arguments(changes, _SAMPLING, "add_request", InvalidRequestError)
            params = replace(params, **changes)
        _require_sequences(inputs)
        count = self.num_return_sequences
        if warning := equal_group_warning(params, count):
            warnings.warn(warning, stacklevel=3)
        requests = self.create_requests(
            inputs, [params] * len(inputs), members=range(count), **options
        )
        self.submit(requests, self._output_queue)
        return [request.request_id for request in requests[::count]]

    def cancel_request(self, request_id: str) -> CancelResult:
        """End a request early; it delivers its tokens so far with `status=CANCELLED`.

        Returns its state before the call. Cancelling twice has no further effect.
        """
        _require_id(request_id, "cancel_request takes one id")
        return self.cancel_requests([request_id])[0]

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Return the next output, of one request or of any, in order of delivery.

        Returns None after `timeout` seconds, or if no such request is in flight.

        Raises:
            EngineDeadError: the engine stopped on an exception.
            InvalidRequestError: `request_id` is not a string.
            RolloutError: requests are waiting, but the manager was never started.
        """
        if request_id is not None:
            _require_id(request_id, "a longest wait in seconds is get_result(timeout=...)")
        if (output := self._output_queue.take(request_id, 0.0)) is not None:
            return output
        self.loop.require_alive()
        if self._is_standalone and (num_waiting := self.loop.num_not_started):
            raise RolloutError(
                f"the manager is not running and has {num_waiting} waiting in its queue; call "
                "start() first."
            )
        limit = checked_timeout(timeout)
        if limit is not None:
            return self._output_queue.take(request_id, limit)
        self.require_can_wait()
        while (output := self._output_queue.take(request_id, POLL_SECONDS)) is None:
            if not self.loop.is_live(request_id):
                return self._output_queue.take(request_id, 0.0)
        return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield outputs in order of delivery, until nothing is in flight."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield a request's outputs, the final one last."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], None]
    ) -> None:
        """Call `callback` on the running asyncio loop with each further output of a request.

        Outputs that nobody has read yet come first. You may add the request later. If the engine
        stops on an exception, the callback gets an output with `status=FAILED`.

        Raises:
            RolloutError: no asyncio loop is running in this thread.
            InvalidRequestError: the request has ended, and all of its outputs were delivered; or
                `request_id` is not a string.
        """
        _require_id(request_id, "the callback is the second argument")
        try:
            asyncio_loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise RolloutError(
                "result handlers run on an asyncio loop, and none is running in this thread; call "
                "register_result_handler() inside a coroutine, or read outputs with "
                "request_id_iter()."
            ) from error
        sink = CallbackSink(request_id, callback, asyncio_loop)
        self.loop.redirect(request_id, sink, self._output_queue)

    @property
    def model(self) -> PreTrainedModel:
        """Return the model that generates: the training module, or its copy."""
        return self.engine.model

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return the plan from which the KV cache is allocated."""
        return self.engine.memory_plan

    @property
    def policy_version(self) -> int:
        """Return the policy version of new tokens."""
        return self.engine.policy_version

    @property
    def paths(self) -> list[ExecutionPath]:
        """Return how prefill and decode steps run now, and what was proved about it."""
        return self.engine.paged_model.paths

    @property
    def decode_path(self) -> str:
        """Return one line about how decode steps run, with the reason if a faster path is off."""
        decoding = self.engine.paged_model.describe_decoding()
        return "; ".join(filter(None, (decoding, self.weight_selection)))

    @property
    def routers(self) -> Routers | None:
        return self.engine.runner.routers

    @property
    def limits(self) -> ServingLimits:
        return self.input_processor.limits

    def status(self) -> EngineStatus:
        return self.engine.status()

    def require_can_wait(self) -> None:
        self.pauses.require_can_wait()

    def create_requests(
        self,
        inputs: Sequence[Input | InvalidRequestError],
        params: Sequence[SamplingParams],
        **options: Any,
    ) -> list[Request]:
        """Validate sequences without queueing them; see `InputProcessor.requests`."""
        requests = self.input_processor.requests(inputs, params, **options)
        self.check_images(requests)
        self.check_adapters(request.params.adapter for request in requests)
        return requests

    def check_images(self, requests: Sequence[Request]) -> None:
        """Raise `ConfigurationError` if the model cannot run the images of a prompt.

        The first prompt with one image, and the first with several, are compared with a plain
        forward.
        """
        for request in requests:
            images = request.images
            if images is not None and self.engine.request_checks.images.is_due(images):
                with self.loop.paused(runs_module=True):
                    self.pauses.require_weights()
                    self.engine.request_checks.check_images(request)

    def check_adapters(self, adapters: Iterable[str | None]) -> None:
        """Raise `ConfigurationError` if the model cannot run an adapter; None entries are skipped.

        The first use of an adapter pauses the engine for plain forwards, once the trainer is not
        using the model. Where a copy generates, it also reads the adapter's weights, and begins a
        policy version.
        """
        names = self.engine.request_checks.unchecked_adapters(adapters)
        if not names:
            return
        with self.loop.paused(runs_module=True):
            self.pauses.require_weights()
            if self.engine.request_checks.check_adapters(names):
                self.loop.begin_policy_version(InFlight.RECOMPUTE)

    def submit(self, requests: Sequence[Request], sink: OutputSink) -> None:
        self.loop.submit(requests, sink)

    def cancel_requests(self, request_ids: Sequence[str]) -> list[CancelResult]:
        return self.loop.cancel(request_ids)

    def state_dict(self) -> dict[str, Any]:
        """Return unfinished requests, outputs that nobody has read, and the random state.

        See `RolloutGenerator.state_dict`.
        """
        with self.loop.paused():
            return {
                "format": STATE_FORMAT,
                "policy_version": self.policy_version,
                "draws": self.input_processor.state_dict(),
                **self._saved_requests(self._saves),
                "outputs": [saved_output(output) for output in self._output_queue.untaken()],
            }

    def load_state_dict(
        self, state: Mapping[str, Any], sync_weights: Callable[[], bool] = lambda: False
    ) -> None:
        """Continue from a `state_dict`; see `RolloutGenerator.load_state_dict`.

        Args:
            state: what `state_dict` returned.
            sync_weights: writes the weights that generate, and returns whether they may be others
                than before; called while the engine is paused.
        """
        _require_state(state)
        with self.loop.paused():
            if unfinished := self.loop.unfinished():
                raise RolloutError(
                    f"{len(unfinished)} requests are in flight ({unfinished[0].request_id}, ...), "
                    "and their ids may clash with those in the state; load the state before the "
                    "first request."
                )
            self.input_processor.load_state_dict(state["draws"])
            version = state["policy_version"]
            if sync_weights():
                # No two weights have one number.
                version = max(version, self.policy_version + 1)
            self.raise_policy_version(version)
        self.restore_requests(state, self._output_queue)

    def raise_policy_version(self, policy_version: int) -> None:
        """Raise the policy version to another run's number; a higher present version stays."""
        with self.loop.paused():
            if policy_version > self.policy_version:
                self.loop.begin_policy_version(InFlight.RECOMPUTE, policy_version)

    def saved_requests(self, output_queue: OutputQueue) -> dict[str, Any]:
        """Return the unfinished requests that deliver to a queue, and the outputs in it.

        Plain data, as in `state_dict`, for `restore_requests`.
        """
        with self.loop.paused():
            outputs = [saved_output(output) for output in output_queue.untaken()]
            saved = self._saved_requests(lambda sink: sink is output_queue)
            return {**saved, "outputs": outputs}

    def _saves(self, sink: OutputSink) -> bool:
        """Return whether a state saves a receiver's requests; other queues' owners save theirs."""
        return sink is self._output_queue or not isinstance(sink, OutputQueue)

    def _saved_requests(self, is_wanted: Callable[[OutputSink], bool]) -> dict[str, Any]:
        """Return the unfinished requests of some receivers; called inside a pause."""
        requests = self.loop.unfinished(is_wanted)
        request_ids = {request.request_id for request in requests}
        cancelled = [i for i in self.loop.cancelled() if i in request_ids]
        for request in requests:
            self.engine.keep_routes(request)
        return {
            "requests": [saved_request(request) for request in requests],
            "cancelled": cancelled,
        }

    def restore_requests(
        self, state: Mapping[str, Any], output_queue: OutputQueue, num_versions: int = 0
    ) -> None:
        """Submit saved requests again, and deliver the saved outputs.

        Args:
            state: what `saved_requests` returned.
            output_queue: receives the outputs.
            num_versions: added to the number of each policy version.
        """
        # The group numbers in a state come from another process.
        new_groups: dict[int, int] = {}
        requests: list[Request] = []
        for saved in state["requests"]:
            request = restored_request(saved, self.input_processor, num_versions)
            if request.group is not None:
                if request.group not in new_groups:
                    new_groups[request.group] = self.input_processor.new_group()
                request.group = new_groups[request.group]
            requests.append(request)
        for saved in state["outputs"]:
            output_queue.put(restored_output(saved, num_versions))
        if requests:
            self.check_images(requests)
            self.check_adapters(request.params.adapter for request in requests)
            self.submit(requests, output_queue)
            self.cancel_requests(state["cancelled"])

    @contextmanager
    def paused(
        self, in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    ) -> Iterator[None]:
        """Pause as `pause()` does, whether anything runs or not."""
        if in_flight not in list(InFlight):
            words = ", ".join(InFlight)
            raise ConfigurationError(f"in_flight={in_flight!r} is not one of {words}.")
        with self.loop.paused():
            version = self.engine.policy_version
            try:
                yield
            finally:
                # A sync inside the block has begun a version already. If the weights were released,
                # a sync must begin it. A copy changes only by a sync.
                is_due = (
                    self.engine.policy_version == version
                    and not self.engine.training_model.is_copied
                )
                if is_due and PauseReason.WEIGHTS not in self.pauses.reasons:
                    self.loop.begin_policy_version(InFlight(in_flight))
                if self.is_served:
                    release_workers()

    def sleep(self, release_graphs: bool = False) -> None:
        """Free the KV memory and pause the engine until `wake()`; requests stay in flight.

        `release_graphs` frees CUDA graphs too, which `wake()` captures again, in seconds.
        """
        with self.loop.paused():
            self.engine.release_cache()
            if release_graphs:
                self.engine.paged_model.release_graphs()
            self.pauses.hold(PauseReason.SLEEP)

    def wake(self) -> None:
        """Resume the engine, which allocates the KV memory with its next step.

        Graphs that `sleep` released are captured in the calling thread, which is the one that
        trains.

        Raises:
            RolloutError: the rollout weights were released, and not synced since.
        """
        self.pauses.require_weights()
        if PauseReason.SLEEP in self.pauses.reasons:
            with observer().span("wake"), self.loop.paused():
                self.engine.paged_model.capture_released()
        self.pauses.release(PauseReason.SLEEP, PauseReason.TRAINING)

    def lend_to_trainer(self, *, in_training_only: bool = False) -> None:
        """Hold the engine until `wake()`, if it runs the training module itself.

        Requests stay in flight. An engine that runs a copy is not held. With `in_training_only`,
        the engine is held only if other callers' requests would run a module in training mode.
        """
        # Processes that share a model serve nobody besides their rollouts.
        if self.engine.training_model.is_copied or self.group is not None:
            return
        if in_training_only and not (self.is_served or self.loop.is_live()):
            return
        with self.loop.paused():
            # Inside a pause, the module's own training flags are restored.
            trains = any(module.training for module in self.engine.training_model.module.modules())
            if trains or not in_training_only:
                self.pauses.hold(PauseReason.TRAINING)

    def close(self) -> None:
        """Cancel the requests in flight, end the thread and free the KV memory."""
        self.loop.halt()
        if not self.is_running():
            self.engine.release_cache()
        self.pauses.release(*set(PauseReason) - {PauseReason.WEIGHTS})


def _config_in_use(given: Any, holder: torch.nn.Module) -> Any:
    """Return the caller's generation config, or else that of the trained model object."""
    if given is None:
        return hf_compat.generation_config_of(holder)
    return given


def _serving_limits(engine: Engine, holder: torch.nn.Module) -> ServingLimits:
    """Return the bounds on a request.

    Args:
        engine: holds the KV cache.
        holder: the object that trains, which names the tokens that end a sequence.
    """
    return ServingLimits(
        vocab_size=lambda: hf_compat.vocab_size(engine.model),
        max_positions=hf_compat.max_positions(engine.model),
        max_cached_tokens=partial(_max_cached_tokens, engine),
        max_model_len=engine.config.max_model_len,
        model_eos=hf_compat.model_eos_token_ids(holder),
        placeholders=multimodal.placeholder_token_ids(engine.model),
        # A copy replaces the source of adapters once the engine is made.
        adapters=lambda: engine.runner.adapters.names(),
    )


def _max_cached_tokens(engine: Engine) -> int:
    """Return the tokens of the longest sequence that the cache and `max_model_len` allow."""
    num_tokens = engine.memory_plan.num_tokens
    return min(num_tokens, engine.config.max_model_len or num_tokens)


def _create_group(facts: ModelFacts, config: RolloutConfig) -> EngineGroup | None:
    if facts.split_group is None:
        return None
    return EngineGroup(facts.split_group, config.cpu_group_timeout)


def _with_hints(config: RolloutConfig, workload_hints: Any, device: torch.device) -> RolloutConfig:
    """Return a config whose number of rows, if unset, is limited to the expected requests."""
    num_requests = getattr(workload_hints, "num_requests", 0)
    if config.max_requests_per_batch is not None or num_requests <= 0:
        return config
    num_rows = min(num_requests, devices.max_requests_per_batch(device))
    return replace(config, max_requests_per_batch=num_rows)


def _halt(reference: "weakref.ref[EngineLoop]") -> None:
    if (loop := reference()) is not None:
        loop.halt()


def _require_state(state: Any) -> None:
    """Raise `InvalidRequestError` unless this is a `state_dict` that this version reads."""
    found = state.get("format") if isinstance(state, Mapping) else None
    if found != STATE_FORMAT:
        raise InvalidRequestError(
            f"the state has format {found!r}, but this version of cb_rollout reads format "
            f"{STATE_FORMAT}; pass a state that state_dict() of this version returned."
        )


def _require_id(request_id: Any, advice: str) -> None:
    """Raise `InvalidRequestError` unless a request's id is text."""
    if not isinstance(request_id, str):
        raise InvalidRequestError(
            f"request_id={request_id!r:.60} is not a string; pass the id that add_request "
            f"returned; {advice}."
        )


def _require_sequences(inputs: Any) -> None:
    """Raise `InvalidRequestError` if one prompt, or a tokenizer's dict, is passed for several."""
    if isinstance(inputs, str | Mapping):
        raise InvalidRequestError(
            f"inputs is a {type(inputs).__name__}; pass a list of token-id sequences, such as "
            "tokenizer(texts)['input_ids']."
        )
