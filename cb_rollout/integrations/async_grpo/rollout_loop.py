"""Roll out for an asynchronous trainer by TRL's own loop, on a thread of this process.

TRL 1.16's `_AsyncRolloutLoop` repeats prompts, calls tools, resets environments, scores groups and
divides conversations into rows. The engine samples in place of a server. Without tools a group is
sampled at once, as a strategy says. The only file of this folder that imports trl.
"""

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import chain, compress, groupby
from typing import Any

from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import (
    RolloutGroup,
    RolloutSample,
    TrainingSequence,
    TurnRecord,
    _AsyncRolloutLoop,
    _chain_to_sequences,
)

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.service.image_prompts import is_chat
from cb_rollout.engine.service.output_queue import CallbackSink
from cb_rollout.errors import ConfigurationError, InvalidRequestError, RolloutError, error_text
from cb_rollout.integrations.async_grpo.groups import GroupSampler, retried
from cb_rollout.integrations.async_grpo.prompts import PromptSource
from cb_rollout.integrations.async_grpo.tool_calls import EnvironmentPool, LimitedTools
from cb_rollout.strategies import Group, Strategy
from cb_rollout.strategies.request_stream import Generator
from cb_rollout.types import GenerationOutput, RequestStatus

TRAINER_MODULE: Any = async_grpo_trainer

# Of the conversation that the present task rolls out: its turns, with the policy version of each
# token in place of its log-probability.
TURNS: ContextVar[list[TurnRecord]] = ContextVar("TURNS")


class SharedNumber:
    """A number that TRL's loop shares with its trainer, here within one process."""

    def __init__(self) -> None:
        self.value = 0


@dataclass(slots=True)
class VersionedSample(RolloutSample):
    """A row to train on, with the policy versions of its tokens."""

    token_versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of `(model_version, num_tokens)` that sum to the sampled tokens, in the trainer's count;
    `model_version` is the oldest."""
    prompt_index: int = 0
    """Of the prompt among all that were taken."""


class SampleQueue(queue.Queue[VersionedSample]):
    """A bounded queue that reports each sample as it is taken."""

    def __init__(self, maxsize: int, on_taken: Callable[[VersionedSample], None]) -> None:
        """Create a queue that calls `on_taken` with each sample, on the thread that takes it."""
        super().__init__(maxsize)
        self._on_taken = on_taken

    def get(self, block: bool = True, timeout: float | None = None) -> VersionedSample:
        """Take the next sample; see `queue.Queue`."""
        sample = super().get(block, timeout)
        self._on_taken(sample)
        return sample


class RolloutLoop(_AsyncRolloutLoop):
    """Rollouts of one run; `run` blocks its thread until `stop`."""

    def __init__(
        self,
        generator: Generator,
        params: SamplingParams,
        source: PromptSource,
        samples: SampleQueue,
        args: Any,
        *,
        strategy: Strategy,
        version: SharedNumber,
        first_version: Callable[[], int],
        num_groups_allowed: Callable[[], int],
        max_outstanding: int,
        tool_timeout_seconds: float | None,
        on_progress: Callable[[], None],
        **settings: Any,
    ) -> None:
        """Prepare the loop.

        Args:
            generator: an engine's or a pool's.
            params: sampling parameters of each turn.
            source: rows with a text or a chat as "prompt"; with tools a chat.
            samples: receives the rows of scored conversations.
            args: the trainer's `AsyncGRPOConfig`.
            strategy: decides the groups to drop and retry where there are no tools.
            version: the trainer's version of the weights that it sent last.
            first_version: gives the trainer's version that is the engine's policy version 0.
            num_groups_allowed: gives the most groups without tools that may be in flight.
            max_outstanding: most conversations at once.
            tool_timeout_seconds: longest time of one tool call; None: unlimited.
            on_progress: called when a turn, a tool or the scoring of a group has ended.
            **settings: `reward_funcs`, `tools`, `environment_factory`, `processing_class` and
                `metrics_queue` of TRL's loop.

        Raises:
            ValueError: TRL refuses a reward, an environment or a chat template.
        """
        self._has_tools = bool(settings["tools"]) or settings["environment_factory"] is not None
        limit = min(args.max_inflight_tasks, max_outstanding)
        num_inflight = limit if args.max_inflight_tasks > 0 else max_outstanding
        eos_token_id = settings["processing_class"].eos_token_id
        if not self._has_tools:
            # Whole groups are submitted.
            num_inflight = max(1, num_inflight // args.num_generations) * args.num_generations
            settings["processing_class"] = _without_response(settings["processing_class"])
        if strategy.max_retries:
            settings["reward_funcs"] = [
                retried(reward, strategy.max_retries, self._note_reward_error)
                for reward in settings["reward_funcs"]
            ]
        super().__init__(
            model_name="",
            dataset=(),  # pyright: ignore[reportArgumentType]  the source has the rows
            eos_token_ids=[eos_token_id],
            rollout_buffer=samples,  # pyright: ignore[reportArgumentType]
            model_version_value=version,  # pyright: ignore[reportArgumentType]
            heartbeat_value=SharedNumber(),  # pyright: ignore[reportArgumentType]
            failed_event=threading.Event(),  # pyright: ignore[reportArgumentType]
            exception_info_queue=queue.Queue(),  # pyright: ignore[reportArgumentType]
            num_generations=args.num_generations,
            max_inflight_tasks=num_inflight,
            max_tokens=args.max_completion_length,
            chat_template_kwargs=args.chat_template_kwargs,
            max_tool_calling_iterations=args.max_tool_calling_iterations,
            log_completions=args.log_completions,
            num_completions_to_print=args.num_completions_to_print,
            fork_threshold_tokens=args.fork_threshold_tokens,
            **settings,
        )
        self._generator, self._params, self._source = generator, params, source
        self._strategy, self._num_dropped = strategy, 0
        self._reward_error: Exception | None = None
        self._first_version, self._on_progress = first_version, on_progress
        self._groups = GroupSampler(
            generator,
            params,
            strategy,
            num_generations=args.num_generations,
            max_staleness=args.max_staleness,
            num_groups_allowed=num_groups_allowed,
        )
        self._limited_tools = LimitedTools(tool_timeout_seconds, on_progress)
        self._tool_pool = self._limited_tools.threads  # pyright: ignore[reportAttributeAccessIssue]
        if self.environment_factories is not None:
            self._environment_pool = {
                name: EnvironmentPool(environments, self._limited_tools.hung)
                for name, environments in self._environment_pool.items()
            }

    def run(self) -> None:
        """Roll out until `stop`, or until something raises."""
        self._generator.manager.start()
        try:
            self._loop.run_until_complete(self._run_loops(self._stop_event))
        finally:
            self._loop.close()

    def stop(self) -> None:
        """End `run`, from any thread; unfinished conversations are given up."""
        self._call(self._stop_event.set)

    def note_version(self) -> None:
        """Start groups anew that are too old under the new weights, from any thread."""
        self._call(self._groups.note_version)

    def _call(self, function: Callable[[], None]) -> None:
        # The loop may have ended by itself.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

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
        for index, row in self._source:
            if self._has_tools and isinstance(row.get("prompt"), str):
                raise ConfigurationError(
                    "train_dataset has texts as prompts, and tools are called in chats; make each "
                    'one a chat, [{"role": "user", "content": text}].'
                )
            for _ in range(self.num_generations):
                yield index, row

    async def _generate_one(self, prompt: Any, *arguments: Any, **named: Any) -> Any:
        TURNS.set([])
        if not self._has_tools:
            return await self._generate_turn(prompt, named["group_id"])
        result = await super()._generate_one(prompt, *arguments, **named)
        # TRL leaves tokens out that later turns render otherwise, and divides conversations into
        # rows. The versions are reconciled as it reconciles the log-probabilities.
        rows, _ = _chain_to_sequences(TURNS.get(), "", self._fork_threshold_tokens)
        sequences: list[Any] = result[2]
        for sequence, row in zip(sequences, rows, strict=True):
            trained = compress(row.old_log_probs, row.completion_mask)
            sequence.token_versions = [
                (int(version), len(list(tokens))) for version, tokens in groupby(trained)
            ]
        return result

    async def _generate_turn(self, prompt: Any, group_id: int) -> Any:
        """Return a conversation of one turn, in the form of `_generate_one`."""
        started = time.monotonic()
        output = await self._groups.take(group_id, self._rendered(prompt))
        if output is None:
            return "", [], [], 0, 0, None
        self._on_progress()
        ids = output.generated_tokens
        turn = TurnRecord(output.prompt_ids, ids, output.logprobs)
        sequences, tally = _chain_to_sequences([turn], "", self._fork_threshold_tokens)
        for sequence in sequences:
            _keep_output(sequence, output)
        self._counters["rollout/tokens_total"] += len(ids)
        self._push_rollout_metrics(
            turns=1,
            sequences=len(sequences),
            completion_ids=ids,
            tally=tally,
            loop_exhausted=False,
            duration_s=time.monotonic() - started,
        )
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        completion = text if isinstance(prompt, str) else _messages(text, "assistant")
        return completion, ids, sequences, 0, 0, None

    def _rendered(self, prompt: Any) -> Any:
        if not (self.chat_template_kwargs and is_chat(prompt)):
            return prompt
        return self.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False, **self.chat_template_kwargs
        )

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        manager, turns = self._generator.manager, TURNS.get()
        try:
            (request,) = manager.create_requests([prompt_ids], [self._params], members=range(1))
        except InvalidRequestError:
            if not turns:
                raise
            # The tools' results are too long: the conversation ends with the turns before.
            turns.append(TurnRecord(prompt_ids, []))
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
        self._on_progress()
        versions = [
            float(version) for version, count in output.policy_versions for _ in range(count)
        ]
        turns.append(TurnRecord(prompt_ids, output.generated_tokens, versions))
        return output.generated_tokens, output.logprobs

    async def _execute_tool_calls(
        self, tool_calls: list[dict[str, Any]], tool_dict: dict[str, Callable[..., Any]]
    ) -> tuple[list[dict[str, str]], int, int]:
        limited = self._limited_tools.limited(tool_dict)
        return await super()._execute_tool_calls(tool_calls, limited)

    async def _score_group(self, group: RolloutGroup) -> list[Any]:
        index, first = group.group_id, self._first_version()
        if not self._has_tools:
            group = _without_failed(group)
        rows = await super()._score_group(group) if group.completions else []
        sequences: Iterator[Any] = chain.from_iterable(group.completions_sequences)
        scored = list(zip(rows, sequences, strict=True))
        if not self._has_tools:
            scored = self._kept(group, scored)
            self._groups.close(index)
        self._on_progress()
        if scored:
            self._source.queue(index, len(scored))
        else:
            self._source.drop(index)
        return [_versioned(row, sequence, index, first) for row, sequence in scored]

    def _kept(self, group: RolloutGroup, rows: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return the scored rows of a group; none where the strategy drops it."""
        strategy = self._strategy
        scored = [pair for pair in rows if not math.isnan(pair[0].metrics["reward"])]
        least = strategy.min_group_size or self.num_generations
        may_drop = self._num_dropped < strategy.max_dropped_groups
        if len(scored) < least and not may_drop:
            error = self._reward_error
            raised = f"; the reward last raised {error_text(error)}" if error else ""
            raise RolloutError(
                f"{len(scored)} of {self.num_generations} completions of prompt {group.group_id} "
                f"could be generated and scored, and the strategy needs {least}{raised}. The "
                "strategy 'retrying' tries again (max_retries), takes smaller groups "
                "(min_group_size) and other prompts (max_dropped_groups)."
            ) from error
        if len(scored) >= least and (not may_drop or strategy.keeps(_as_strategys(group, scored))):
            self._num_dropped = 0
            return scored
        self._num_dropped += 1
        self._counters["rollout/groups_dropped_total"] += 1
        return []

    def _push_metrics(self, values: dict[str, float | tuple[float, float]]) -> None:
        self._counters["rollout/groups_cancelled_total"] += self._groups.num_cancelled
        self._groups.num_cancelled = 0
        super()._push_metrics(values)

    def _note_reward_error(self, error: Exception) -> None:
        self._reward_error = error


def _without_response(tokenizer: Any) -> Any:
    """Return a tokenizer that TRL needs no template of tool calls for; none is called."""
    changed = copy(tokenizer)
    changed.response_template = ""
    return changed


def _messages(content: Any, role: str) -> Any:
    return [{"role": role, "content": content}]


def _keep_output(sequence: TrainingSequence, output: GenerationOutput) -> None:
    kept: Any = sequence
    kept.output, kept.token_versions = output, output.policy_versions


def _without_failed(group: RolloutGroup) -> RolloutGroup:
    """Return a group without the completions that the strategy does without."""
    is_there = [bool(sequences) for sequences in group.completions_sequences]
    if all(is_there):
        return group
    columns = {
        column.name: list(compress(getattr(group, column.name), is_there))
        for column in fields(group)
        if isinstance(getattr(group, column.name), list)
    }
    kwargs = {name: list(compress(v, is_there)) for name, v in group.reward_kwargs.items()}
    return replace(group, reward_kwargs=kwargs, **columns)


def _as_strategys(group: RolloutGroup, scored: list[tuple[Any, Any]]) -> Group:
    row = {name: values[0] for name, values in group.reward_kwargs.items()}
    return Group(
        number=group.group_id,
        prompt={"prompt": group.prompts[0], **row},
        outputs=[sequence.output for _, sequence in scored],
        rewards=[sample.metrics["reward"] for sample, _ in scored],
    )


def _versioned(row: RolloutSample, sequence: Any, index: int, first: int) -> VersionedSample:
    """Return a row with its versions in the trainer's count, and texts as messages."""
    versions = [(first + version, count) for version, count in sequence.token_versions]
    values = {one.name: getattr(row, one.name) for one in fields(row)}
    if isinstance(row.prompt, str):
        values["prompt"] = _messages(row.prompt, "user")
        values["completion"] = _messages(row.completion, "assistant")
    values["model_version"] = min(version for version, _ in versions)
    return VersionedSample(**values, token_versions=versions, prompt_index=index)
