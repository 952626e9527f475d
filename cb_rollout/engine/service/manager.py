"""The persistent manager: the reference's interface, over an engine that runs in the background.

Owns which thread may ask what, and who gets which output. Every method may be called from any
thread; none waits without an end.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.torch import release_workers
from cb_rollout.config.enums import InFlight
from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.config.sampling import SamplingParams, resolved
from cb_rollout.engine.core import Engine
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.memory.plan import MemoryPlan
from cb_rollout.engine.model.precision import autocast_alone
from cb_rollout.engine.model.runner import BatchLayout
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.input_processor import InputProcessor, ServingLimits
from cb_rollout.engine.service.loop import EngineLoop, StepUntil
from cb_rollout.engine.service.output_queue import CallbackSink, OutputQueue, OutputSink
from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.observers import Observers
from cb_rollout.metrics.registry import EngineCounters, EngineStatus
from cb_rollout.types import CancelResult, GenerationOutput

POLL_SECONDS = 0.1
# How long an iterator waits before it looks whether anything is still in flight.


class ContinuousBatchingManager:
    """Takes requests from any thread and generates them together, continuously.

    Made by itself it knows no trainer's steps: it keeps its cache until `stop()`, and settings that
    only a `RolloutGenerator` or an attached trainer acts on are refused.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        *,
        autocast_dtype: torch.dtype | None = None,
        rank: int = 0,
        tokenizer: Any = None,
        trained: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | str | None = None,
    ) -> None:
        """Probe the model and plan the memory; nothing runs before `start()`.

        Args:
            model: a causal language model, wrapped or not; used as it is, never copied.
            generation_config: defaults of every request; None: the model's own.
            continuous_batching_config: a `RolloutConfig`, or transformers' own.
            autocast_dtype: run forwards under autocast to this dtype; None: as `rollout_dtype`
                says, where no trainer's model is given, else as the model is.
            rank: keeps the random draws of data-parallel processes apart.
            tokenizer: allows stop strings.
            trained: the model that trains, where `model` is a copy of it; None: `model` itself.
            optimizer: what will step it, or its name; None: not known.

        Raises:
            ConfigurationError: a setting or the model cannot be honoured.
        """
        self.config = as_rollout_config(continuous_batching_config)
        module = hf_compat.unwrap(model)
        if trained is None:
            autocast_dtype = autocast_dtype or autocast_alone(self.config, module)
        hf_compat.refuse_what_cannot_generate(module)
        hf_compat.refuse_sharded(module)
        if generation_config is None:
            generation_config = module.generation_config
        self.defaults = from_generation_config(generation_config)
        self._engine = Engine(module, self.config, autocast_dtype, trained, optimizer)
        self._runs_a_copy = self._engine.trained is not module
        engine = self._engine
        limits = ServingLimits(
            vocab_size=hf_compat.vocab_size(module),
            max_positions=hf_compat.max_positions(module),
            max_cached_tokens=lambda: engine.max_sequence_tokens,
            model_eos=hf_compat.model_eos_token_ids(module),
        )
        self._input_processor = InputProcessor(limits, self.config.seed, rank, tokenizer)
        self._loop = EngineLoop(
            self._engine,
            max_queue_size=self.config.max_queue_size,
            return_logprobs=self.config.return_logprobs,
        )
        self.is_served = False
        """Whether requests come from outside, so that the background thread is who computes."""
        self._output_queue = OutputQueue()
        # The thread holds the loop and not the manager, so a forgotten manager still ends it; the
        # finalizer also runs when the interpreter exits.
        weakref.finalize(self, self._loop.halt)

    def start(self) -> None:
        """Start the background thread; a dead engine starts over with nothing queued."""
        self._loop.start()
        self._output_queue.reopen()

    def is_running(self) -> bool:
        """Whether the background thread is alive."""
        return self._loop.is_running()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
    ) -> None:
        """Stop the background thread once the requests in flight are done.

        Args:
            block: wait for that.
            timeout: longest wait, in seconds; what is not done by then is cancelled, and delivers
                what it has. None: no limit.
            keep_for_next_session: keep the KV cache for the next `start()`.

        Raises:
            RolloutError: this thread paused the engine, or it is asleep with requests in flight,
                which cannot finish then.
        """
        if self._loop.is_live():
            self.require_can_wait()
        self._loop.stop(drain=True)
        if not block:
            return
        self._loop.join(timeout)
        if self.is_running():
            self._loop.halt()
        if not keep_for_next_session and not self.is_running():
            self._engine.release_cache()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the background thread to end, at most `timeout` seconds."""
        self._loop.join(timeout)

    @contextmanager
    def pause(
        self, in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    ) -> Iterator[None]:
        """Hold the engine still between two forwards, with requests staying in flight.

        Inside, the caller may change weights, and only one thread is inside at a time. The wait for
        it is at most one forward. Leaving it begins a policy version, unless a copy of the model
        generates: every token from then on is stamped with it, and no older key is matched again.

        Args:
            in_flight: what becomes of unfinished sequences. "recompute": they go on, their keys
                computed anew under the new weights; "keep": they go on with the keys they have;
                "abort": they end, delivering what they have with `status=CANCELLED`.

        Raises:
            ConfigurationError: `in_flight` is none of these.
            RolloutError: called by a result handler, on the thread that it would hold still.
        """
        if in_flight not in list(InFlight):
            raise ConfigurationError(
                f"in_flight={in_flight!r} is not one of {', '.join(InFlight)}."
            )
        with self._loop.paused():
            version = self._engine.policy_version
            try:
                yield
            finally:
                # A sync inside has begun one already; a copy changes by a sync only.
                if self._engine.policy_version == version and not self._runs_a_copy:
                    self._loop.begin_policy_version(InFlight(in_flight))
                if self.is_served:
                    release_workers()

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        sampling_params: SamplingParams | None = None,
    ) -> str:
        """Queue one sequence.

        Args:
            input_ids: the prompt's token ids.
            request_id: unique among live requests; None: made here.
            max_new_tokens: None: the sampling parameters', else the generation config's, else as
                many as the model and the cache can hold.
            streaming: deliver an output after every token.
            record_timestamps: note when each token was sampled.
            eos_token_id: None: the sampling parameters', else the model's own; -1: none.
            sampling_params: None: what the generation config says.

        Returns:
            The request's id.

        Raises:
            InvalidRequestError: it could never be served.
            QueueFullError: `max_queue_size` requests wait already.
            EngineDeadError: the engine stopped on an exception.
        """
        params = resolved(sampling_params, self.defaults, max_new_tokens, eos_token_id)
        requests = self.create_requests(
            [input_ids],
            [params],
            request_id=request_id,
            is_streaming=streaming,
            records_timestamps=record_timestamps,
        )
        self.submit(requests, self._output_queue)
        return requests[0].request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        *,
        sampling_params: SamplingParams | None = None,
    ) -> list[str]:
        """Queue many sequences, all or none; equal prompts are computed once. See `add_request`."""
        params = resolved(sampling_params, self.defaults, max_new_tokens)
        requests = self.create_requests(
            inputs,
            [params] * len(inputs),
            is_streaming=streaming,
            records_timestamps=record_timestamps,
        )
        self.submit(requests, self._output_queue)
        return [request.request_id for request in requests]

    def cancel_request(self, request_id: str) -> CancelResult:
        """End a request early; it delivers what it has, with `status=CANCELLED`.

        Returns:
            Whether it was live, had finished, or is unknown. Asking again changes nothing.
        """
        return self.cancel_requests([request_id])[0]

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Take one output: of one request, or of any, first delivered first.

        Args:
            request_id: whose; None: any.
            timeout: longest wait, in seconds; None: until it comes.

        Returns:
            The output; None when the time is over, or when nothing is in flight that could come.

        Raises:
            EngineDeadError: the engine stopped on an exception.
        """
        if (output := self._output_queue.take(request_id, 0.0)) is not None:
            return output
        self._loop.require_alive()
        if timeout is not None:
            return self._output_queue.take(request_id, timeout)
        self.require_can_wait()
        while (output := self._output_queue.take(request_id, POLL_SECONDS)) is None:
            if not self._loop.is_live(request_id):
                return self._output_queue.take(request_id, 0.0)
        return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield outputs as they come, until nothing is in flight."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield one request's outputs until its last."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], None]
    ) -> None:
        """Call `callback` on the running asyncio loop with each further output of a request.

        Outputs that wait to be taken go to it first. It may be registered before the request is
        added. Should the engine die, it is called with `status=FAILED`.

        Raises:
            InvalidRequestError: the request ended, and all of it was delivered.
        """
        sink = CallbackSink(request_id, callback, asyncio.get_running_loop())
        self._loop.redirect(request_id, sink, self._output_queue)

    # The package's other rooms use what follows, and never the loop or the engine.

    @property
    def model(self) -> PreTrainedModel:
        """Return the model that generates: the training module, or its copy."""
        return self._engine.model

    @property
    def policy_version(self) -> int:
        """Return the version that tokens are stamped with."""
        return self._engine.policy_version

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return the plan that the KV cache is allocated by."""
        return self._engine.memory_plan

    @property
    def cache_layout(self) -> CacheLayout:
        """Return what each layer of the model stores."""
        return self._engine.layout

    @property
    def batch_layout(self) -> BatchLayout:
        """Return how sequences share a forward."""
        return self._engine.batch_layout

    @property
    def limits(self) -> ServingLimits:
        """Return the limits that requests are validated against."""
        return self._input_processor.limits

    @property
    def counters(self) -> EngineCounters:
        """Return the engine's running totals, which go on changing."""
        return self._engine.counters

    @property
    def observers(self) -> Observers:
        """Return the observers of the engine's work, to add to and remove from."""
        return self._loop.observers

    def status(self) -> EngineStatus:
        """Return the engine's state now."""
        engine = self._engine
        return EngineStatus(
            requests_running=engine.num_running,
            requests_waiting=engine.num_waiting,
            kv_blocks_used=engine.num_blocks_used,
            kv_blocks=engine.memory_plan.num_blocks,
            kv_bytes=engine.cache_bytes,
            policy_version=engine.policy_version,
        )

    @property
    def is_alive(self) -> bool:
        """Tell whether the thread runs and the engine has not died."""
        return self.is_running() and not self._loop.is_dead

    def require_alive(self) -> None:
        """Raise `EngineDeadError` where the engine died of an exception."""
        self._loop.require_alive()

    def require_can_wait(self) -> None:
        """Raise `RolloutError` where this thread's wait for an output would never end."""
        self._loop.pause_controller.require_open_for_me()

    def create_requests(
        self, inputs: Sequence[Sequence[int]], params: Sequence[SamplingParams], **options: Any
    ) -> list[Request]:
        """Validate sequences without queueing them; see `InputProcessor.requests`."""
        return self._input_processor.requests(inputs, params, **options)

    def submit(self, requests: Sequence[Request], sink: OutputSink) -> None:
        """Queue requests, all or none; their outputs go to `sink`. See `EngineLoop.submit`."""
        self._loop.submit(requests, sink)

    def cancel_requests(self, request_ids: Sequence[str]) -> list[CancelResult]:
        """End requests early; see `cancel_request`."""
        return self._loop.cancel(request_ids)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early and wait until the model is handed back."""
        self._loop.cancel(request_ids)
        with self._loop.paused():
            pass

    def stepping(self) -> AbstractContextManager[StepUntil | None]:
        """Step on the calling thread; see `EngineLoop.stepping`."""
        return self._loop.stepping()

    def begin_policy_version(self, in_flight: InFlight) -> None:
        """Begin a policy version inside `pause()`; called when the weights have changed."""
        self._loop.begin_policy_version(in_flight)

    def follow(self, trained: torch.nn.Module) -> None:
        """Verify against this module from now on: the same weights in another wrapper."""
        self._engine.trained = trained

    def recompute(self, requests: Sequence[Request]) -> dict[str, list[float]]:
        """Compute log-probabilities of sequences by plain forwards of the model that trains."""
        with self._loop.paused():
            return {request.request_id: self._engine.recompute(request) for request in requests}

    def sleep(self) -> None:
        """Free the KV memory and hold the engine still until `wake()`; requests stay in flight."""
        with self._loop.paused():
            self._engine.release_cache()
            self._loop.pause_controller.hold()

    def wake(self) -> None:
        """Let the engine run again; it allocates the KV memory with the next step."""
        self._loop.pause_controller.release()

    def close(self) -> None:
        """End the thread, cancelling what is in flight, and free the KV memory."""
        self._loop.halt()
        if not self.is_running():
            self._engine.release_cache()
        self.wake()
