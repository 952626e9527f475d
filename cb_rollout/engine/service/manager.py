"""Offer transformers' `ContinuousBatchingManager` interface over an engine on a thread.

Every method may be called from any thread, and no wait is endless. Other folders reach the engine
and its loop as attributes, and use the engine itself only inside a pause.
"""

import asyncio
import math
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.torch import release_workers
from cb_rollout.config.enums import InFlight
from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.config.sampling import SamplingParams, resolved
from cb_rollout.engine.core import Engine
from cb_rollout.engine.memory.plan import MemoryPlan
from cb_rollout.engine.memory.training import OptimizerOrName
from cb_rollout.engine.model.precision import autocast_alone
from cb_rollout.engine.model.routers import Routers
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.input_processor import Input, InputProcessor, ServingLimits
from cb_rollout.engine.service.lockstep import EngineGroup
from cb_rollout.engine.service.loop import EngineLoop
from cb_rollout.engine.service.output_queue import CallbackSink, OutputQueue, OutputSink
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.errors import ConfigurationError, InvalidRequestError, RolloutError
from cb_rollout.metrics.registry import EngineStatus
from cb_rollout.types import CancelResult, GenerationOutput

# Longest wait of an iterator between two checks that a request is still in flight.
POLL_SECONDS = 0.1


class ContinuousBatchingManager:
    """Generate requests from any thread together, by continuous batching.

    A manager that no generator or trainer made keeps its cache until `stop()`, and refuses settings
    that only a `RolloutGenerator` or an attached trainer acts on.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        *,
        autocast_dtype: torch.dtype | None = None,
        rank: int | None = None,
        tokenizer: Any = None,
        trained: torch.nn.Module | None = None,
        optimizer: OptimizerOrName | None = None,
    ) -> None:
        """Probe the model and plan the memory; nothing runs before `start()`.

        Args:
            model: a causal language model, wrapped or not; never copied.
            generation_config: defaults of every request; None: the model's own.
            continuous_batching_config: a `RolloutConfig`, or transformers' own.
            autocast_dtype: run forwards under autocast to this dtype; None: by `rollout_dtype`
                without `trained`, else the model's dtype.
            rank: data-parallel rank, which keeps the seeds of processes apart; None: of
                `torch.distributed`'s process group, else the environment's `RANK`, else 0.
            tokenizer: decodes tokens for stop strings, which are refused without it. A processor
                also encodes images.
            trained: the training model that `model` is a copy of; None: `model` itself.
            optimizer: the training model's optimizer, its class or known name; None: unknown.

        Raises:
            ConfigurationError: a setting or the model cannot be honoured.
        """
        self.config = as_rollout_config(continuous_batching_config)
        module = hf_compat.unwrap(model)
        if trained is None:
            autocast_dtype = autocast_dtype or autocast_alone(self.config, module)
        hf_compat.refuse_what_cannot_generate(module)
        hf_compat.refuse_sharded(module)
        self.defaults = from_generation_config(
            module.generation_config if generation_config is None else generation_config
        )
        split_over = hf_compat.tensor_parallel_group(module)
        self.group = None if split_over is None else EngineGroup(split_over)
        """The processes that share the model's layers; None: this one has them whole."""
        self.engine = engine = Engine(
            module,
            self.config,
            autocast_dtype,
            model if trained is None else trained,
            optimizer,
            all_reduce_min=self.group and self.group.all_reduce_min,
        )
        # A generator starts its manager with the next rollout.
        self._is_standalone, self.weight_selection = trained is None, ""
        limits = ServingLimits(
            vocab_size=lambda: hf_compat.vocab_size(engine.model),
            max_positions=hf_compat.max_positions(module),
            max_cached_tokens=lambda: engine.max_sequence_tokens,
            model_eos=hf_compat.model_eos_token_ids(module),
            placeholders=multimodal.placeholder_token_ids(module),
        )
        seed = self.config.seed
        if self.group is not None:
            # The processes of a group draw the same numbers.
            rank = self.group.data_parallel_rank
            (seed, *_) = self.group.gather(secrets.randbits(63) if seed is None else seed)
        self.input_processor = InputProcessor(limits, seed, rank, tokenizer)
        self.loop = loop = EngineLoop(engine, self.group)
        self.pauses, self.durations, self.counters = loop.pauses, loop.durations, engine.counters
        self.is_served = False
        """True while a server submits requests, so that the background thread computes."""
        self._output_queue = OutputQueue()
        # Ends the thread when nothing refers to the manager any more, or at the interpreter's exit.
        weakref.finalize(self, _halt, weakref.ref(self.loop))

    def __reduce__(self) -> NoReturn:
        raise RolloutError(
            "a ContinuousBatchingManager has a thread and a model in training, so it is neither "
            "pickled nor copied; pickle its config, and make another of it."
        )

    def warmup(self, num_steps: float = math.inf) -> None:
        """Trace and compile decode steps now, and capture those that ran without their own graph.

        `num_steps` are to come: on a CPU steps are compiled, for seconds, where that pays off. On a
        GPU steps of long sequences, or without a shared prompt, may want another graph than those
        captured at first. A thread that trains must not compute at the same time.
        """
        with self.loop.paused():
            self.pauses.require_weights()
            self.engine.warm_up(num_steps)

    def start(self) -> None:
        """Start the background thread; a dead engine starts over with nothing queued."""
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
            timeout: longest wait in seconds, after which unfinished requests are cancelled and
                deliver their tokens so far; None: no limit.
            keep_for_next_session: keep the KV cache for the next `start()`.
            hard_stop: cancel the requests in flight at once; they deliver their tokens so far.

        Raises:
            RolloutError: this thread paused the engine; or requests in flight cannot finish,
                because the engine is asleep.
        """
        if self.is_running():
            self.pauses.require_not_paused_here("its thread cannot end")
        if self.loop.is_live() and not hard_stop:
            self.require_can_wait()
        self.loop.stop(drain=not hard_stop)
        if not block:
            return
        self.loop.join(timeout)
        if self.is_running():
            self.loop.halt()
        if not keep_for_next_session and not self.is_running():
            self.engine.release_cache()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the background thread to end, at most `timeout` seconds."""
        self.loop.join(timeout)

    @contextmanager
    def pause(
        self, in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    ) -> Iterator[None]:
        """Pause the engine between two forwards; requests stay in flight.

        One thread at a time is inside, and may change the weights. Entering waits for at most one
        forward. Leaving begins a policy version, unless a copy of the model generates: later tokens
        are stamped with it, and cached prefixes of older versions are never matched.

        Args:
            in_flight: fate of unfinished sequences. "recompute": continue, with keys computed again
                under the new weights; "keep": continue with the present keys; "abort": end, and
                deliver the tokens so far with `status=CANCELLED`.

        Raises:
            ConfigurationError: `in_flight` is none of these.
            RolloutError: called inside a step, as by a result handler; or nothing runs, and no
                generator would start it.
            EngineDeadError: the engine stopped on an exception.
        """
        self.loop.require_alive()
        if self._is_standalone and not self.is_running():
            raise RolloutError(
                "the manager is not running, so there is nothing to pause; start() it first."
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
        """Queue a sequence; return the request's id.

        Args:
            input_ids: the prompt's token ids; with a processor as `tokenizer=` also
                `{"prompt": token ids or text, "images": [...]}`.
            request_id: unique among live requests; None: generated.
            max_new_tokens: None: the sampling parameters', else the generation config's, else as
                many as the model and the cache can hold.
            streaming: deliver an output after every token.
            record_timestamps: record the time of each token.
            eos_token_id: None: the sampling parameters', else the model's own; -1: none.
            sampling_params: None: the generation config's.
            **sampling: fields of `SamplingParams` that differ for this request, as `temperature`,
                `top_k` and `top_p`. A greedy request stays so unless `do_sample=True` is one.

        Raises:
            InvalidRequestError: the request could never be served.
            ConfigurationError: the model cannot run prompts with images.
            QueueFullError: `max_queue_size` requests wait already.
            EngineDeadError: the engine stopped on an exception.
        """
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
        """Queue many sequences, all or none; equal prompts are computed once. See `add_request`."""
        params = resolved(sampling_params, self.defaults, max_new_tokens)
        options = {"is_streaming": streaming, "records_timestamps": record_timestamps}
        return self._add(inputs, params, sampling, **options)

    def _add(
        self, inputs: Sequence[Input], params: SamplingParams, changes: Any, **options: Any
    ) -> list[str]:
        params = replace(params, **changes) if changes else params
        requests = self.create_requests(inputs, [params] * len(inputs), **options)
        self.submit(requests, self._output_queue)
        return [request.request_id for request in requests]

    def cancel_request(self, request_id: str) -> CancelResult:
        """End a request early; it delivers its tokens so far with `status=CANCELLED`.

        Returns its state before the call. Cancelling twice has no further effect.
        """
        return self.cancel_requests([request_id])[0]

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Take the next output, of one request or of any, first delivered first.

        Returns None after `timeout` seconds, or when no such request is in flight.

        Raises:
            EngineDeadError: the engine stopped on an exception.
        """
        if (output := self._output_queue.take(request_id, 0.0)) is not None:
            return output
        self.loop.require_alive()
        if timeout is not None:
            return self._output_queue.take(request_id, timeout)
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

        Outputs not taken yet come first. The request may be added later. When the engine
        stops on an exception, the callback gets an output with `status=FAILED`.

        Raises:
            RolloutError: no asyncio loop runs in this thread.
            InvalidRequestError: the request ended, and all of its outputs were delivered.
        """
        try:
            asyncio_loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise RolloutError(
                "a result handler is called on the running asyncio loop, and none runs in this "
                "thread; call register_result_handler() in a coroutine, or take outputs by "
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
        """Return the plan that the KV cache is allocated by."""
        return self.engine.memory_plan

    @property
    def policy_version(self) -> int:
        """Return the policy version that new tokens are stamped with."""
        return self.engine.policy_version

    @property
    def decode_path(self) -> str:
        """Return how decode steps run at present, in one line, with the reason for what is off."""
        return "; ".join(filter(None, (self.engine.decode_path, self.weight_selection)))

    @property
    def routers(self) -> Routers | None:
        return self.engine.routers

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
        return requests

    def check_images(self, requests: Sequence[Request]) -> None:
        """Raise `ConfigurationError` where the model cannot run the images of a prompt.

        The first prompt with an image, and the first with several, also runs by a plain forward.
        """
        for request in requests:
            checked = self.engine.runner.cuts_images
            if request.images is not None and request.images.kind not in checked:
                with self.loop.paused():
                    self.pauses.require_weights()
                    self.engine.check_images(request)

    def submit(self, requests: Sequence[Request], sink: OutputSink) -> None:
        self.loop.submit(requests, sink)

    def cancel_requests(self, request_ids: Sequence[str]) -> list[CancelResult]:
        return self.loop.cancel(request_ids)

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
                # A sync inside has begun one already, or is needed; a copy changes by a sync only.
                is_due = self.engine.policy_version == version and not self.engine.runs_a_copy
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
                self.engine.release_graphs()
            self.pauses.hold(PauseReason.SLEEP)

    def wake(self) -> None:
        """Resume the engine, which allocates the KV memory with its next step.

        Graphs that `sleep` released are captured in the calling thread, the one that trains.

        Raises:
            RolloutError: the weights that generate were released, and not synced since.
        """
        self.pauses.require_weights()
        if PauseReason.SLEEP in self.pauses.reasons:
            with self.loop.paused():
                self.engine.capture_released()
        self.pauses.release(PauseReason.SLEEP, PauseReason.TRAINING)

    def lend_to_trainer(self, *, in_training_only: bool = False) -> None:
        """Keep the engine from stepping the module that trains, until `wake()`.

        Requests stay in flight. An engine that runs a copy goes on. With `in_training_only`, only
        where others' requests would run a module in training mode.
        """
        # Processes that share a model serve nobody beside their rollouts.
        if self.engine.runs_a_copy or self.group is not None:
            return
        if in_training_only and not (self.is_served or self.loop.is_live()):
            return
        with self.loop.paused():
            # Inside a pause the module has its own flags.
            trains = any(module.training for module in self.engine.trained.modules())
            if trains or not in_training_only:
                self.pauses.hold(PauseReason.TRAINING)

    def close(self) -> None:
        """Cancel the requests in flight, end the thread and free the KV memory."""
        self.loop.halt()
        if not self.is_running():
            self.engine.release_cache()
        self.pauses.release(*set(PauseReason) - {PauseReason.WEIGHTS})


def _halt(reference: "weakref.ref[EngineLoop]") -> None:
    if (loop := reference()) is not None:
        loop.halt()
