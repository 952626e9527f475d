"""Roll out conversations with tools for an asynchronous trainer, by TRL's own loop.

TRL 1.16's `_AsyncRolloutLoop` renders chats, calls tools, resets environments, scores groups and
divides conversations into rows. It runs here on a thread of this process, and the engine samples
its turns in place of a server. The only file of this folder that imports trl.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import torch
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, _AsyncRolloutLoop

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.service.output_queue import CallbackSink
from cb_rollout.errors import (
    ConfigurationError,
    InvalidRequestError,
    RolloutError,
    ToolTimeoutError,
)
from cb_rollout.integrations.async_grpo.prompts import PromptSource
from cb_rollout.integrations.async_grpo.samples import RolloutSample, SampleQueue
from cb_rollout.strategies.request_stream import Generator
from cb_rollout.types import GenerationOutput, RequestStatus

# Turns of the conversation that the present task rolls out.
NUM_TURNS: ContextVar[int] = ContextVar("NUM_TURNS", default=0)


class SharedNumber:
    """A number that TRL's loop shares with its trainer, here within one process."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        self._value = 0.0
        self._on_change = on_change

    @property
    def value(self) -> float:
        """Return the number."""
        return self._value

    @value.setter
    def value(self, value: float) -> None:
        self._value = value
        if self._on_change is not None:
            self._on_change()


class DaemonThreads(Executor):
    """An executor with a thread for each call, which a call that hangs keeps to itself."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `fn` on a new thread."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  the waiting thread raises it
                future.set_exception(error)
            else:
                future.set_result(result)

        future.set_running_or_notify_cancel()
        threading.Thread(target=call, name="cb_rollout tool", daemon=True).start()
        return future


class ConversationLoop(_AsyncRolloutLoop):
    """Conversations of one run; `run` blocks its thread until `stop`."""

    def __init__(
        self,
        generator: Generator,
        params: SamplingParams,
        source: PromptSource,
        samples: SampleQueue,
        args: Any,
        *,
        max_inflight_tasks: int,
        tool_timeout_seconds: float | None,
        on_progress: Callable[[], None],
        **settings: Any,
    ) -> None:
        """Prepare the loop.

        Args:
            generator: an engine's or a pool's.
            params: sampling parameters of each turn.
            source: rows with a chat as "prompt".
            samples: receives the rows of scored conversations.
            args: the trainer's `AsyncGRPOConfig`.
            max_inflight_tasks: conversations at once.
            tool_timeout_seconds: longest time of one tool call; None: unlimited.
            on_progress: called many times a second while the loop runs.
            **settings: `reward_funcs`, `tools`, `environment_factory`, `processing_class` and
                `metrics_queue` of TRL's loop.

        Raises:
            ValueError: TRL refuses a reward, an environment or a chat template.
        """
        self.version = SharedNumber()
        """The trainer's version of the weights that it sent last."""
        super().__init__(
            model_name="",
            dataset=(),  # pyright: ignore[reportArgumentType]  the source has the rows
            eos_token_ids=[settings["processing_class"].eos_token_id],
            rollout_buffer=samples,  # pyright: ignore[reportArgumentType]
            model_version_value=self.version,  # pyright: ignore[reportArgumentType]
            heartbeat_value=SharedNumber(on_progress),  # pyright: ignore[reportArgumentType]
            failed_event=threading.Event(),  # pyright: ignore[reportArgumentType]
            exception_info_queue=queue.Queue(),  # pyright: ignore[reportArgumentType]
            num_generations=args.num_generations,
            max_inflight_tasks=max_inflight_tasks,
            max_tokens=args.max_completion_length,
            chat_template_kwargs=args.chat_template_kwargs,
            max_tool_calling_iterations=args.max_tool_calling_iterations,
            log_completions=args.log_completions,
            num_completions_to_print=args.num_completions_to_print,
            fork_threshold_tokens=args.fork_threshold_tokens,
            **settings,
        )
        self._tool_pool = DaemonThreads()  # pyright: ignore[reportAttributeAccessIssue]
        self._generator, self._params, self._source = generator, params, source
        self._tool_timeout_seconds = tool_timeout_seconds

    def run(self) -> None:
        """Roll out until `stop`, or until something raises."""
        self._generator.manager.start()
        try:
            self._loop.run_until_complete(self._run_loops(self._stop_event))
        finally:
            self._loop.close()

    def stop(self) -> None:
        """End `run`, from any thread; unfinished conversations are given up."""
        # The loop may have ended by itself.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop_event.set)

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        works = self._generate_loop(stop_event), self._score_loop(stop_event), stop_event.wait()
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(work) for work in works]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for taken in self._source:
            if isinstance(taken["row"].get("prompt"), str):
                raise ConfigurationError(
                    "train_dataset has texts as prompts, and tools are called in chats; make each "
                    'one a chat, [{"role": "user", "content": text}].'
                )
            for _ in range(self.num_generations):
                yield taken["index"], taken["row"]

    async def _generate_one(self, *arguments: Any, **named: Any) -> Any:
        NUM_TURNS.set(0)
        return await super()._generate_one(*arguments, **named)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        manager = self._generator.manager
        num_turns = NUM_TURNS.get()
        NUM_TURNS.set(num_turns + 1)
        try:
            (request,) = manager.create_requests([prompt_ids], [self._params], members=range(1))
        except InvalidRequestError:
            if not num_turns:
                raise
            # The tools' results are too long: the conversation ends with the turns before.
            return [], []
        ended: asyncio.Future[GenerationOutput] = self._loop.create_future()

        def end(output: GenerationOutput) -> None:
            if not ended.done():
                ended.set_result(output)

        manager.submit([request], CallbackSink(request.request_id, end, self._loop))
        try:
            output = await ended
        except asyncio.CancelledError:
            manager.cancel_requests([request.request_id])
            raise
        if output.status is not RequestStatus.FINISHED:
            raise RolloutError(
                f"a turn could not be produced: {output.error or output.status.value}"
            )
        return output.generated_tokens, output.logprobs

    async def _execute_tool_calls(
        self, tool_calls: list[dict[str, Any]], tool_dict: dict[str, Callable[..., Any]]
    ) -> tuple[list[dict[str, str]], int, int]:
        messages, num_failures = [], 0
        for call in tool_calls:
            running = super()._execute_tool_calls([call], tool_dict)
            try:
                found, _, failed = await asyncio.wait_for(running, self._tool_timeout_seconds)
            except TimeoutError:
                name, failed = call["function"]["name"], 1
                error = ToolTimeoutError(
                    f"the tool {name} took longer than "
                    f"tool_timeout_seconds={self._tool_timeout_seconds:g}."
                )
                found = [{"role": "tool", "name": name, "content": str({"error": str(error)})}]
            messages += found
            num_failures += failed
        return messages, len(tool_calls), num_failures

    async def _score_group(self, group: RolloutGroup) -> list[Any]:
        rows = await super()._score_group(group)
        index = group.group_id
        if rows:
            self._source.queue(index, len(rows))
        else:
            self._source.drop(index)
        return [
            RolloutSample(
                prompt=row.prompt,
                completion=row.completion,
                input_ids=torch.from_numpy(row.input_ids),
                completion_mask=torch.from_numpy(row.completion_mask),
                old_log_probs=torch.from_numpy(row.old_log_probs),
                advantage=row.advantage,
                model_version=int(row.model_version),
                group_id=index,
                metrics=row.metrics,
                token_versions=[(int(row.model_version), int(row.completion_mask.sum()))],
                prompt_index=index,
                enqueued_at=time.time(),
            )
            for row in rows
        ]
