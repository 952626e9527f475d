"""Outputs from the engine's thread to the server's, and cancels the other way.

Only the newest state of each sequence is kept, so a slow client holds up nobody and a stream takes
one wake-up a step, however many sequences it has. Every sequence of a request that ends, however it
ends, is out of the engine.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Self

from cb_rollout.engine.request import Request
from cb_rollout.engine.service.loop import EngineLoop
from cb_rollout.errors import EngineDeadError
from cb_rollout.types import GenerationOutput


class OutputRouter:
    """What an engine's loop delivers to; made on the asyncio thread that takes from it."""

    def __init__(self, loop: EngineLoop, timeout_seconds: float) -> None:
        """Stand between an engine's loop and the running asyncio loop.

        Args:
            loop: the engine's.
            timeout_seconds: longest that a submission's sequences may take.
        """
        self._timeout_seconds = timeout_seconds
        self._engine_loop = loop
        self._asyncio_loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._bag: dict[str, GenerationOutput] = {}
        self._error: EngineDeadError | None = None
        self._is_called = False
        self._submissions: dict[str, Submission] = {}

    @property
    def num_in_flight(self) -> int:
        """Sequences that have not ended."""
        return len(self._submissions)

    def submit(self, requests: Sequence[Request]) -> "Submission":
        """Queue sequences; enter what is returned to take their outputs."""
        deadline = self._asyncio_loop.time() + self._timeout_seconds
        submission = Submission(self, requests, deadline)
        self._engine_loop.submit(requests, self)
        self._submissions |= dict.fromkeys(submission.unfinished, submission)
        return submission

    def put(self, output: GenerationOutput) -> None:
        """Take an output; called on the engine's thread."""
        with self._lock:
            self._bag[output.request_id] = output
        self._call()

    def close(self, error: EngineDeadError) -> None:
        """Nothing more will come of what is in flight; called on the engine's thread."""
        with self._lock:
            self._error = error
        self._call()

    def _call(self) -> None:
        """Have the other thread look, which it does at once: so not with the lock that it takes."""
        with self._lock:
            is_called, self._is_called = self._is_called, True
        # A closed loop has nobody left to tell.
        with suppress(RuntimeError):
            if not is_called:
                self._asyncio_loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        with self._lock:
            bag, self._bag = self._bag, {}
            error, self._error = self._error, None
            self._is_called = False
        for request_id, output in bag.items():
            if (submission := self._submissions.get(request_id)) is not None:
                submission.take(output)
                if output.is_finished():
                    del self._submissions[request_id]
        if error is not None:
            dead, self._submissions = self._submissions, {}
            for submission in dead.values():
                submission.die(error)

    def cancel_all(self) -> None:
        """End what is in flight; each sequence delivers what it has."""
        self._engine_loop.cancel(list(self._submissions))

    def give_up(self, request_ids: Sequence[str]) -> None:
        """Nobody wants these sequences any more."""
        for request_id in request_ids:
            self._submissions.pop(request_id, None)
        self._engine_loop.cancel(request_ids)


class Submission:
    """The sequences of one request; leaving it cancels those that have not ended."""

    def __init__(
        self, output_router: OutputRouter, requests: Sequence[Request], deadline: float
    ) -> None:
        """Number the sequences as asked for; `deadline` is on the asyncio loop's clock."""
        self._deadline = deadline
        self._courier = output_router
        self.unfinished = {request.request_id: index for index, request in enumerate(requests)}
        self._news: dict[int, GenerationOutput] = {}
        self._changed = asyncio.Event()
        self._error: EngineDeadError | None = None

    def take(self, output: GenerationOutput) -> None:
        """A sequence's newest state has come."""
        index = self.unfinished[output.request_id]
        if output.is_finished():
            del self.unfinished[output.request_id]
        self._news[index] = output
        self._changed.set()

    def die(self, error: EngineDeadError) -> None:
        """Nothing more will come."""
        self._error = error
        self._changed.set()

    async def updates(self) -> AsyncIterator[tuple[int, GenerationOutput]]:
        """Newest states as they come, each with its sequence's number, until all have ended.

        Raises:
            EngineDeadError: the engine stopped on an exception.
            TimeoutError: they took too long.
        """
        while self.unfinished or self._news:
            async with asyncio.timeout_at(self._deadline):
                await self._changed.wait()
            self._changed.clear()
            news, self._news = self._news, {}
            for index, output in news.items():
                yield index, output
            if self._error is not None:
                raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.unfinished:
            self._courier.give_up(list(self.unfinished))
