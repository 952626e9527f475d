"""Roll out conversations with tools for an asynchronous trainer, with TRL's own loop.

TRL 1.16's `_AsyncRolloutLoop` renders chats, calls tools, resets environments, scores groups and
divides conversations into rows. It runs here on a thread of this process, and the engine samples
its turns in place of a server.
"""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import fields
from itertools import chain, compress, groupby
from types import SimpleNamespace
from typing import Any

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
from cb_rollout.integrations.async_grpo.upstream import async_rollout_worker as upstream
from cb_rollout.integrations.concurrent_tools import DaemonThreads, abandon, call_tool
from cb_rollout.types import GenerationOutput, RequestStatus

# Turns of the task's conversation, with policy versions of tokens in place of log-probabilities.
TURNS: ContextVar[list[upstream.TurnRecord]] = ContextVar("TURNS")


class ConversationLoop(upstream._AsyncRolloutLoop):
    """Conversations of a run; `run` blocks its thread until `stop`."""

    def __init__(
        self,
        generator: Any,
        params: SamplingParams,
        source: PromptSource,
        samples: SampleQueue,
        args: Any,
        *,
        max_inflight_tasks: int,
        version: Any,
        on_progress: Callable[[], None],
        **settings: Any,
    ) -> None:
        """Prepare the loop; TRL raises ValueError for one of its `settings` that it refuses.

        Args:
            generator: samples the turns, with an engine or a pool.
            params: sampling parameters of every turn.
            source: the rows of the data set, in order.
            samples: takes scored completions; the trainer empties it.
            args: the trainer's `AsyncGRPOConfig`.
            max_inflight_tasks: conversations that run together.
            version: has the trainer's version as `value`, and as `first` the trainer's version that
                is the engine's version 0.
            on_progress: called when a turn, a tool or the scoring of a group has ended.
            settings: further arguments of TRL's own loop.
        """
        super().__init__(
            model_name="",
            dataset=(),  # pyright: ignore[reportArgumentType]  the source has the rows
            eos_token_ids=[settings["processing_class"].eos_token_id],
            rollout_buffer=samples,  # pyright: ignore[reportArgumentType]
            model_version_value=version,
            heartbeat_value=SimpleNamespace(value=0.0),  # pyright: ignore[reportArgumentType]
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
        self._generator = generator
        self._params = params
        self._source = source
        self._tool_timeout_seconds = generator.config.tool_timeout_seconds
        self._on_progress = on_progress
        self._version = version
        self._hung: list[Any] = []

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
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._generate_loop(stop_event)),
            asyncio.create_task(self._score_loop(stop_event)),
            asyncio.create_task(stop_event.wait()),
        ]
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
                # TRL takes the conversation's environment next.
                abandon(self._hung, getattr(self, "_environment_pool", {}))
                yield taken["index"], taken["row"]

    async def _generate_one(self, *arguments: Any, **named: Any) -> Any:
        TURNS.set([])
        result = await super()._generate_one(*arguments, **named)
        # TRL leaves out tokens that later turns render differently, and divides conversations into
        # rows. The versions are reconciled as TRL reconciles the log-probabilities.
        rows, _ = upstream._chain_to_sequences(TURNS.get(), "", self._fork_threshold_tokens)
        sequences: list[Any] = result[2]
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.token_versions = []
            trained = compress(row.old_log_probs, row.completion_mask)
            for version, tokens in groupby(trained):
                sequence.token_versions.append((int(version), len(list(tokens))))
        return result

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        manager = self._generator.manager
        turns = TURNS.get()
        try:
            (request,) = manager.create_requests([prompt_ids], [self._params], members=range(1))
        except InvalidRequestError:
            if not turns:
                raise
            # The tools' results are too long: the conversation ends with the turns before.
            turns.append(upstream.TurnRecord(prompt_ids, []))
            return [], []
        ended: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        manager.submit([request], CallbackSink(request.request_id, ended.put_nowait, self._loop))
        try:
            output = await ended.get()
        except asyncio.CancelledError:
            manager.cancel_requests([request.request_id])
            raise
        if output.status is not RequestStatus.FINISHED:
            raise RolloutError(
                f"a turn could not be produced: {output.error or output.status.value}"
            )
        self._on_progress()
        versions: list[float] = []
        for version, num_tokens in output.policy_versions:
            versions += [float(version)] * num_tokens
        turns.append(upstream.TurnRecord(prompt_ids, output.generated_tokens, versions))
        return output.generated_tokens, output.logprobs

    async def _execute_tool_calls(
        self, tool_calls: list[dict[str, Any]], tool_dict: dict[str, Callable[..., Any]]
    ) -> tuple[list[dict[str, str]], int, int]:
        tools = {name: self._limited(name, tool_dict) for name in tool_dict}
        return await super()._execute_tool_calls(tool_calls, tools)

    def _limited(self, name: str, tools: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
        """Limit a tool to `tool_timeout_seconds`; after a timeout, call none of these tools."""

        # TRL asks whether a tool is a coroutine function, and a partial one is none.
        async def call(**arguments: Any) -> Any:
            if name not in tools:
                raise ToolTimeoutError(f"an earlier call has not ended, so {name} is not called.")
            tool = tools[name]
            loop = self._loop if inspect.iscoroutinefunction(tool) else None
            try:
                return await call_tool(name, tool, arguments, self._tool_timeout_seconds, loop)
            except ToolTimeoutError:
                self._hung.append(getattr(tool, "__self__", None))
                tools.clear()
                raise
            finally:
                self._on_progress()

        return call

    async def _score_group(self, group: upstream.RolloutGroup) -> list[Any]:
        rows = await super()._score_group(group)
        self._on_progress()
        if rows:
            self._source.queue(group.group_id, len(rows))
        else:
            self._source.drop(group.group_id)
        first = self._version.first
        sequences: Iterator[Any] = chain.from_iterable(group.completions_sequences)
        samples: list[Any] = []
        for row, sequence in zip(rows, sequences, strict=True):
            versions = [(first + version, count) for version, count in sequence.token_versions]
            values = {field.name: getattr(row, field.name) for field in fields(row)}
            samples.append(RolloutSample(**values, token_versions=versions))
        return samples
