"""Pass outputs from the engine's thread to the asyncio thread, and cancellations back.

Only the newest state of each sequence is kept: a slow client delays no other, and a step costs the
asyncio thread one wake-up. Sequences of a request that ends, for any reason, leave the engine.
Clients' pauses wait for the engine on a thread of their own.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

from cb_rollout.engine.request import Request
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.errors import EngineDeadError
from cb_rollout.server.protocol import ApiError, PauseMode
from cb_rollout.server.sessions import Session
from cb_rollout.types import GenerationOutput, RequestStatus

T = TypeVar("T")


class OutputRouter:
    """The output sink of the server's requests; created on the asyncio thread that reads it."""

    def __init__(self, manager: ContinuousBatchingManager, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._manager = manager
        self._asyncio_loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._newest: dict[str, GenerationOutput] = {}
        self._error: EngineDeadError | None = None
        self._is_scheduled = False
        self._submissions: dict[str, Submission] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._submissions)

    def submit(
        self, requests: Sequence[Request], client_id: str | None, session: Session | None
    ) -> "Submission":
        """Queue a client's sequences; the `session` records those that finish."""
        deadline = self._asyncio_loop.time() + self._timeout_seconds
        submission = Submission(self, requests, deadline, client_id, session)
        self._manager.submit(requests, self)
        self._submissions |= dict.fromkeys(submission.unfinished, submission)
        return submission

    def put(self, output: GenerationOutput) -> None:
        """Take an output; called on the engine's thread."""
        with self._lock:
            self._newest[output.request_id] = output
        self._schedule()

    def close(self, error: EngineDeadError) -> None:
        """End every sequence in flight with an error; called on the engine's thread."""
        with self._lock:
            self._error = error
        self._schedule()

    def _schedule(self) -> None:
        # The lock is released before the call: the other thread takes it at once.
        with self._lock:
            is_scheduled, self._is_scheduled = self._is_scheduled, True
        # A closed asyncio loop raises, and has no reader left.
        with suppress(RuntimeError):
            if not is_scheduled:
                self._asyncio_loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            newest, self._newest = self._newest, {}
            error, self._error = self._error, None
            self._is_scheduled = False
        for request_id, output in newest.items():
            if (submission := self._submissions.get(request_id)) is not None:
                submission.put(output)
                if output.is_finished():
                    del self._submissions[request_id]
        if error is not None:
            dead, self._submissions = self._submissions, {}
            for submission in dead.values():
                submission.fail(error)

    def abort(self, client_ids: Collection[str] | None) -> int:
        """End requests by clients' names, all for None, with the tokens they have; count them."""
        named = None if client_ids is None else frozenset(client_ids)
        submissions = dict.fromkeys(self._submissions.values())
        aborted = [x for x in submissions if named is None or x.client_id in named]
        for submission in aborted:
            submission.is_aborted = True
        self._manager.cancel_requests([name for x in aborted for name in x.unfinished])
        return len(aborted)

    def cancel_all(self) -> None:
        """Cancel every sequence in flight; each delivers what it has."""
        self._manager.cancel_requests(list(self._submissions))

    def abandon(self, request_ids: Sequence[str]) -> None:
        """Cancel sequences, and drop their outputs."""
        for request_id in request_ids:
            self._submissions.pop(request_id, None)
        self._manager.cancel_requests(request_ids)


class Submission(AbstractContextManager["Submission"]):
    """The sequences of a request; leaving it cancels those that have not ended."""

    def __init__(
        self,
        router: OutputRouter,
        requests: Sequence[Request],
        deadline: float,
        client_id: str | None,
        session: Session | None,
    ) -> None:
        self._router, self._deadline = router, deadline
        self.client_id, self._session = client_id, session
        self.is_aborted = False
        """True once a client ended it early, to be answered with the tokens that it has."""
        self.unfinished = {request.request_id: index for index, request in enumerate(requests)}
        self._newest: dict[int, GenerationOutput] = {}
        self._changed = asyncio.Event()
        self._error: EngineDeadError | None = None

    def put(self, output: GenerationOutput) -> None:
        index = self.unfinished[output.request_id]
        if output.is_finished():
            del self.unfinished[output.request_id]
        if output.status is RequestStatus.FINISHED and self._session is not None:
            self._session.record(output)
        self._newest[index] = output
        self._changed.set()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._changed.set()

    async def updates(self) -> AsyncIterator[tuple[int, GenerationOutput]]:
        """Yield newest states as they come, each with its sequence's index, until all have ended.

        Raises `ApiError` for a sequence that failed, or was cancelled and not aborted by a client;
        `EngineDeadError`; `TimeoutError` for sequences that took longer than allowed.
        """
        while self.unfinished or self._newest:
            async with asyncio.timeout_at(self._deadline):
                await self._changed.wait()
            self._changed.clear()
            newest, self._newest = self._newest, {}
            for index, output in newest.items():
                if output.status is RequestStatus.CANCELLED and not self.is_aborted:
                    raise ApiError(503, "the request was cancelled by the server; send it again.")
                if output.status is RequestStatus.FAILED:
                    raise ApiError(503, f"the sequence could not be generated: {output.error}")
                yield index, output
            if self._error is not None:
                raise self._error

    def __exit__(self, *_: object) -> None:
        if self.unfinished:
            self._router.abandon(list(self.unfinished))


class EngineControl:
    """Clients' control of an engine."""

    def __init__(self, manager: ContinuousBatchingManager, router: OutputRouter) -> None:
        self._manager, self._router = manager, router
        self._thread = ThreadPoolExecutor(1, "cb_rollout-control")
        self._has_ended = False

    def stop(self) -> None:
        """End the thread, and a client's pause, so that the engine goes on without the server."""
        self._has_ended = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._release()

    @property
    def is_paused(self) -> bool:
        return PauseReason.CLIENT in self._manager.pauses.reasons

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling until `resume`; "abort" ends the requests in flight, "keep" holds them."""
        if mode == "abort":
            self._router.abort(None)
        await self.run(self._hold)
        await self.run(self._manager.loop.deliver_cancelled)

    def _hold(self) -> None:
        self._manager.loop.hold(PauseReason.CLIENT)
        if self._has_ended:
            self._release()

    def _release(self) -> None:
        self._manager.pauses.release(PauseReason.CLIENT)

    async def resume(self) -> None:
        """End a client's pause, after the pauses that were asked for before."""
        await self.run(self._release)

    async def abort(self, client_ids: Collection[str] | None) -> int:
        count = self._router.abort(client_ids)
        await self.run(self._manager.loop.deliver_cancelled)
        return count

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call beside the asyncio loop, after those that were asked for before."""
        return await on_thread(self._thread, call)


async def on_thread(thread: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> T:
    """Run a call on a thread beside the asyncio loop."""
    return await asyncio.get_running_loop().run_in_executor(thread, call, *arguments)
