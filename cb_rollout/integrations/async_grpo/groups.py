"""Sample groups of one turn as a strategy says, and try rewards again. Ignorant of trl.

Runs on the asyncio loop of the rollout thread.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from cb_rollout.config.sampling import SamplingParams, resolved
from cb_rollout.engine.service.output_queue import CallbackSink
from cb_rollout.errors import EngineDeadError, IncompleteRolloutError
from cb_rollout.rollout.prompts import Prompt, encoded
from cb_rollout.strategies import Strategy
from cb_rollout.strategies.request_stream import Generator
from cb_rollout.types import GenerationOutput, RequestStatus

# Interval at which a group that may not begin yet looks again.
POLL_SECONDS = 0.05


class GroupSampler:
    """Completions of one prompt, submitted together and prefilled once."""

    def __init__(
        self,
        generator: Generator,
        params: SamplingParams,
        strategy: Strategy,
        *,
        num_generations: int,
        max_staleness: int,
        num_groups_allowed: Callable[[], int],
    ) -> None:
        """Begin without a group.

        Args:
            generator: an engine's or a pool's.
            params: of each completion.
            strategy: says how many more to submit, to try again and to do without.
            num_generations: completions of a group.
            max_staleness: versions after which an unfinished group starts anew.
            num_groups_allowed: gives the most groups between submission and `close`.
        """
        self._generator, self._strategy = generator, strategy
        self._params = resolved(params, generator.manager.defaults)
        self._num_generations, self._max_staleness = num_generations, max_staleness
        self._num_groups_allowed = num_groups_allowed
        self._tasks: dict[int, asyncio.Task[list[GenerationOutput]]] = {}
        self._open: set[int] = set()
        self._queues: set[asyncio.Queue[GenerationOutput | None]] = set()
        self.num_cancelled = 0
        """Groups that started anew."""

    async def take(self, group: int, prompt: Prompt) -> GenerationOutput | None:
        """Return one completion of a complete group; None for one that it does without."""
        if group not in self._tasks:
            self._tasks[group] = asyncio.ensure_future(self._sampled(group, prompt))
        outputs = await self._tasks[group]
        return outputs.pop(0) if outputs else None

    def close(self, group: int) -> None:
        """Let another group begin in place of this one."""
        self._open.discard(group)
        self._tasks.pop(group, None)

    def note_version(self) -> None:
        """Start the unfinished groups anew that are too old under the new weights."""
        for queue in self._queues:
            queue.put_nowait(None)

    async def _sampled(self, group: int, prompt: Prompt) -> list[GenerationOutput]:
        while len(self._open) >= self._num_groups_allowed():
            await asyncio.sleep(POLL_SECONDS)
        self._open.add(group)
        (ids,) = encoded([prompt], self._generator.tokenizer)
        while (outputs := await self._attempt(ids)) is None:
            self.num_cancelled += 1
        return outputs

    async def _attempt(self, ids: Any) -> list[GenerationOutput] | None:
        """Sample a group; None: it became too old."""
        strategy, wanted = self._strategy, self._num_generations
        version = self._generator.policy_version
        ended: asyncio.Queue[GenerationOutput | None] = asyncio.Queue()
        self._queues.add(ended)
        pending = self._submit(ids, wanted + strategy.num_extra_members, ended)
        num_retries = strategy.max_retries * wanted
        outputs: list[GenerationOutput] = []
        try:
            while len(outputs) < wanted and pending:
                if self._generator.policy_version - version > self._max_staleness:
                    return None
                if (output := await ended.get()) is None:
                    continue
                if not output.request_id:
                    raise EngineDeadError(output.error)
                pending.remove(output.request_id)
                if output.status is RequestStatus.FINISHED:
                    outputs.append(output)
                elif len(outputs) + len(pending) >= wanted:
                    continue
                elif num_retries:
                    num_retries -= 1
                    pending |= self._submit(ids, 1, ended)
                elif strategy.min_group_size is None:
                    raise IncompleteRolloutError(
                        f"{output.request_id} could not be produced: "
                        f"{output.error or output.status.value} (The strategy 'retrying' tries "
                        "again, or does without.)",
                        {one.request_id: one for one in [*outputs, output]},
                    )
        finally:
            self._queues.discard(ended)
            if pending:
                self._generator.manager.cancel_requests(list(pending))
        return outputs

    def _submit(
        self, ids: Any, number: int, ended: asyncio.Queue[GenerationOutput | None]
    ) -> set[str]:
        manager, loop = self._generator.manager, asyncio.get_running_loop()
        requests = manager.create_requests([ids], [self._params], members=range(number))
        # Its own output, of no request, says that the engine stopped.
        manager.submit(requests, CallbackSink("", ended.put_nowait, loop))
        return {request.request_id for request in requests}


def retried(
    reward: Callable[..., Any], max_retries: int, on_error: Callable[[Exception], None]
) -> Callable[..., Any]:
    """Wrap a reward with TRL's arguments: call it again for completions without a number.

    Args:
        reward: a function, which may be a coroutine function.
        max_retries: further calls.
        on_error: told what the reward raised.
    """

    @wraps(reward)
    async def call(**columns: Any) -> list[Any]:
        values: list[Any] = [None] * len(columns["completions"])
        missing: Sequence[int] = range(len(values))
        for _ in range(1 + max_retries):
            part = {name: [column[at] for at in missing] for name, column in columns.items()}
            try:
                found = await asyncio.to_thread(reward, **part)
                if asyncio.iscoroutine(found):
                    found = await found
            except Exception as error:  # noqa: BLE001  the loop raises the last of them
                on_error(error)
                continue
            for at, value in zip(missing, found, strict=True):
                values[at] = value
            missing = [at for at in missing if values[at] is None or math.isnan(values[at])]
            if not missing:
                break
        return values

    return call
