"""Pass outputs from the engine's thread to the asyncio thread, and cancellations back.

Only the newest state of each sequence is kept: a slow client does not delay other clients, and a
step costs the asyncio thread one wake-up. When a request ends, for any reason, its sequences leave
the engine. Clients' pauses wait for the engine on a separate thread.
"""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, TypeVar

from cb_rollout.engine.request import Request
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.errors import EngineDeadError
from cb_rollout.server.protocol import ApiError, PauseMode
from cb_rollout.server.sessions import Session
from cb_rollout.types import GenerationOutput, RequestStatus

T = TypeVar("T")

# Maximum number of names that are blocked at a time.
MAX_BLOCKED = 4096


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
        # The lock is released before the call, because the asyncio thread takes it at once.
        with self._lock:
            is_scheduled = self._is_scheduled
            self._is_scheduled = True
        # A closed asyncio loop raises, and nothing reads its outputs any more.
        with suppress(RuntimeError):
            if not is_scheduled:
                self._asyncio_loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            newest = self._newest
            error = self._error
            self._newest = {}
            self._error = None
            self._is_scheduled = False
        for request_id, output in newest.items():
            submission = self._submissions.get(request_id)
            if submission is None:
                continue
            submission.put(output)
            if output.is_finished():
                del self._submissions[request_id]
        if error is not None:
            failed = list(self._submissions.values())
            self._submissions = {}
            for submission in failed:
                submission.fail(error)

    def abort(self, client_ids: Collection[str] | None) -> int:
        """End requests with these names (None: all), keeping their tokens; return how many."""
        named = None if client_ids is None else frozenset(client_ids)
        num_aborted = 0
        request_ids: list[str] = []
        # Visit each submission once, although it is stored under each of its sequences.
        for submission in dict.fromkeys(self._submissions.values()):
            if named is None or submission.client_id in named:
                submission.is_aborted = True
                num_aborted += 1
                request_ids += submission.unfinished
        self._manager.cancel_requests(request_ids)
        return num_aborted

    def cancel_all(self) -> None:
        """Cancel every sequence in flight; each delivers its tokens so far."""
        self._manager.cancel_requests(list(self._submissions))

    def abandon(self, request_ids: Sequence[str]) -> None:
        """Cancel sequences, and drop their outputs."""
        for request_id in request_ids:
            self._submissions.pop(request_id, None)
        self._manager.cancel_requests(request_ids)


class Submission(AbstractContextManager["Submission"]):
    """The sequences of a request; leaving the context cancels those that have not ended."""

    def __init__(
        self,
        router: OutputRouter,
        requests: Sequence[Request],
        deadline: float,
        client_id: str | None,
        session: Session | None,
    ) -> None:
        """Take the sequences of a request; the caller queues them.

        Args:
            router: the router that cancels the sequences that have not ended.
            requests: the sequences, in the order of the response's choices.
            deadline: time of the asyncio loop at which `updates` gives up, in seconds.
            client_id: the client's name for the request; None: the client gave no name.
            session: the session that records the outputs; None: they are not recorded.
        """
        self._router = router
        self._deadline = deadline
        self.client_id = client_id
        self._session = session
        self.is_aborted = False
        """True once a client aborted the request, which is then answered with its tokens so far."""
        self._requests = requests
        self.unfinished = {request.request_id: index for index, request in enumerate(requests)}
        self._newest: dict[int, GenerationOutput] = {}
        self._changed = asyncio.Event()
        self._error: EngineDeadError | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Return how many prompt tokens of all sequences were in the cache."""
        return sum(request.num_cached_tokens for request in self._requests)

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
        """Yield each sequence's newest state with its index, until all sequences have ended.

        Raises `ApiError` for a sequence that failed, or that was cancelled without a client's
        abort; `EngineDeadError` if the engine stopped; `TimeoutError` for sequences that took
        longer than allowed.
        """
        while self.unfinished or self._newest:
            async with asyncio.timeout_at(self._deadline):
                await self._changed.wait()
            self._changed.clear()
            newest = self._newest
            self._newest = {}
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
    """Let clients pause and resume an engine, abort requests, and block request names."""

    def __init__(self, manager: ContinuousBatchingManager, router: OutputRouter) -> None:
        self._manager = manager
        self._router = router
        self._thread = ThreadPoolExecutor(1, "cb_rollout-control")
        self._has_ended = False
        self._blocked: dict[str, float] = {}
        """Names whose requests are aborted on arrival, each until a time of the asyncio loop."""

    def stop(self) -> None:
        """End the thread and any client's pause, so that the engine can run without the server."""
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
        """End a client's pause, after all earlier pause requests."""
        await self.run(self._release)

    async def abort(self, client_ids: Collection[str] | None) -> int:
        count = self._router.abort(client_ids)
        await self.run(self._manager.loop.deliver_cancelled)
        return count

    def block(self, client_id: str, seconds: float) -> None:
        """For `seconds`, abort new requests of this name on arrival."""
        now = asyncio.get_running_loop().time()
        self._blocked = {name: end for name, end in self._blocked.items() if end > now}
        if len(self._blocked) >= MAX_BLOCKED:
            raise ApiError(429, f"{MAX_BLOCKED} request ids are blocked; wait.", "block_duration")
        self._blocked[client_id] = now + seconds

    def is_blocked(self, client_id: str) -> bool:
        return self._blocked.get(client_id, 0.0) > asyncio.get_running_loop().time()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call on the control thread, after all earlier calls."""
        return await on_thread(self._thread, call)


async def on_thread(thread: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> T:
    """Run a call on `thread` instead of the asyncio loop's thread, in the caller's context."""
    run = partial(contextvars.copy_context().run, call, *arguments)
    return await asyncio.get_running_loop().run_in_executor(thread, run)
