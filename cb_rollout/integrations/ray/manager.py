"""Serve a pool's requests on workers that may end or hang.

Owns the workers from their start to their end, the current weights, and a thread with an event loop
that runs one task per worker. Implements the part of `ContinuousBatchingManager` that callers use
with both. Every wait has a limit. Called from any thread.
"""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cb_rollout.config.enums import InFlight
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.model.routers import Routers
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.input_processor import InputProcessor, ServingLimits
from cb_rollout.engine.service.output_queue import OutputSink
from cb_rollout.errors import EngineDeadError, RolloutError, WeightSyncError, error_text
from cb_rollout.integrations.ray.cluster import PICKLABLE, Cluster, WorkerHandle
from cb_rollout.integrations.ray.dispatcher import Dispatcher
from cb_rollout.integrations.ray.weight_update import WeightUpdate
from cb_rollout.integrations.ray.worker import WorkerDescription
from cb_rollout.metrics.registry import EngineCounters, EngineStatus
from cb_rollout.types import GenerationOutput

_LOGGER = logging.getLogger(__name__)

# Interval between checks of whether the pool has a worker, or was closed.
WATCH_SECONDS = 0.05

# Longest time that a worker waits for a sequence to end before it reports, with and without work.
BUSY_REPORT_SECONDS = 0.25
IDLE_REPORT_SECONDS = 2.0

# No further worker is started after this many in a row have failed to start.
MAX_FAILED_STARTS = 3

# Longer than the thread should take to end.
CLOSE_SECONDS = 30.0


@dataclass(slots=True, eq=False, kw_only=True)
class _Worker:
    number: int
    handle: WorkerHandle
    version: int = 0
    """Policy version of its weights."""
    task: Future[None] | None = None
    description: WorkerDescription | None = None
    """None: it has not started, or does not have the current weights yet."""
    counters: EngineCounters = field(default_factory=EngineCounters)
    progressed_at: float = 0.0
    """Time at which it last made progress, or had no work."""


class PoolManager:
    """The workers and the requests of one pool."""

    group: ClassVar[None] = None
    """No process shares the layers of a worker's model."""

    routers: Routers | None = None
    """Routers whose choices the workers record."""
    input_processor: InputProcessor
    defaults: SamplingParams
    """Default sampling parameters: the attached trainer's, or the checkpoint's."""

    def __init__(
        self,
        cluster: Cluster,
        arguments: tuple[Any, ...],
        num_workers: int,
        timeout_seconds: float,
        start_timeout_seconds: float,
    ) -> None:
        """Start the thread, and ask for the workers; see `RolloutPool`.

        Args:
            cluster: starts workers and calls them.
            arguments: those of `PoolWorker`.
            num_workers: workers that should run.
            timeout_seconds: maximum wait for an answer. An update may take this twice, to fetch the
                bytes and to write them.
            start_timeout_seconds: maximum time for a worker to start.
        """
        self._cluster = cluster
        self._arguments = arguments
        self._num_workers = num_workers
        self._timeout = timeout_seconds
        self._start_timeout = start_timeout_seconds
        self._lock = threading.RLock()
        self._workers: dict[int, _Worker] = {}
        self._dispatcher = Dispatcher()
        self._weights = WeightUpdate(0)
        self._updating = threading.Lock()
        self._first: Future[WorkerDescription] = Future()
        self._num_started = 0
        self._ended_counters = EngineCounters()
        self._num_failed_starts = 0
        self._last_failure: Exception | None = None
        self._fatal_error: BaseException | None = None
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cb_rollout pool", daemon=True)
        self._thread.start()
        with self._lock:
            self._start_missing()

    @property
    def policy_version(self) -> int:
        return self._weights.version

    @property
    def num_alive(self) -> int:
        """The number of workers that have the current weights."""
        with self._lock:
            return len(self._usable())

    @property
    def limits(self) -> ServingLimits:
        return self.input_processor.limits

    @property
    def counters(self) -> EngineCounters:
        """The totals of all workers that ever ran, as last reported; peaks are left out."""
        with self._lock:
            counters = [worker.counters for worker in self._workers.values()]
            return functools.reduce(EngineCounters.plus, counters, self._ended_counters)

    def status(self) -> EngineStatus:
        """Return the pool's state; KV memory is this process's, so it is 0."""
        with self._lock:
            num_assigned = sum(self._dispatcher.load(number) for number in self._workers)
            return EngineStatus(
                requests_running=num_assigned,
                requests_waiting=len(self._dispatcher) - num_assigned,
                kv_blocks_used=0,
                kv_blocks=0,
                kv_bytes=0,
                policy_version=self.policy_version,
            )

    def max_cached_tokens(self) -> int:
        with self._lock:
            descriptions = [worker.description for worker in self._usable()]
        limits = [
            description.limits.max_cached_tokens()
            for description in descriptions
            if description is not None
        ]
        if not limits:
            # While no worker runs, the limits of the first worker stand in.
            return self.first_description().limits.max_cached_tokens()
        return min(limits)

    def first_description(self) -> WorkerDescription:
        """Wait for the first worker; raise an error with the reason if none starts."""
        return self._first.result()

    def resize(self, num_workers: int) -> None:
        """Set the number of workers; sequences of removed workers restart elsewhere."""
        with self._lock:
            self.require_can_wait()
            self._num_workers = num_workers
            self._num_failed_starts = 0
            num_surplus = max(0, len(self._workers) - num_workers)
            idlest_first = sorted(self._workers.values(), key=self._readiness)
            for worker in idlest_first[:num_surplus]:
                self._end(worker, "the pool was made smaller", is_dead=False)
            self._start_missing()

    def _readiness(self, worker: _Worker) -> tuple[bool, int]:
        """Return a sort key: workers that have not started come first, then idle workers."""
        has_started = worker.description is not None
        return has_started, self._dispatcher.load(worker.number)

    def follow_generation_config(self) -> None:
        """Do nothing: a pool's defaults are its checkpoint's, or those that a trainer set."""

    def create_requests(self, inputs: Sequence[Any], *arguments: Any, **more: Any) -> list[Request]:
        """Validate sequences; see `InputProcessor.requests`."""
        return self.input_processor.requests(inputs, *arguments, **more)

    def start(self) -> None:
        """Do nothing: the workers run until the pool is closed."""

    def require_can_wait(self) -> None:
        """Raise `EngineDeadError` if the pool was closed, or no worker can run."""
        if self._fatal_error is not None:
            raise EngineDeadError(str(self._fatal_error)) from self._fatal_error

    def submit(self, requests: Iterable[Request], sink: OutputSink) -> None:
        with self._lock:
            self.require_can_wait()
            self._dispatcher.add(requests, sink)
            self._dispatch()

    def cancel_requests(self, request_ids: Iterable[str]) -> None:
        """End sequences; each still delivers its tokens."""
        with self._lock:
            for number, item_ids in self._dispatcher.cancel(request_ids).items():
                self._cluster.call(self._workers[number].handle, "cancel", item_ids)

    @contextmanager
    def updating(self) -> Iterator[WeightUpdate]:
        """Wait for other updates to end; yield the weights before this update."""
        with self._updating:
            self.require_can_wait()
            yield self._weights

    def update(self, weights: WeightUpdate, in_flight: InFlight) -> None:
        """Send new weights to every worker, inside `updating`; replace a worker that fails.

        Raises:
            WeightSyncError: no worker took the weights; the pool keeps the present weights.
        """
        answers: list[BaseException | None] = []
        while True:
            with self._lock:
                self.require_can_wait()
                if in_flight is InFlight.ABORT:
                    self._dispatcher.cancel_waiting()
                # A worker may start meanwhile, with the present weights.
                behind = [w for w in self._usable() if w.version < weights.version]
                if not behind:
                    self._weights = weights
                    self._dispatch()
                    return
                sent = [self._spawn(self._send(worker, weights, in_flight)) for worker in behind]
            for answer in sent:
                # The pool was closed meanwhile.
                with suppress(CancelledError):
                    answers.append(answer.result())
            errors = [answer for answer in answers if answer is not None]
            if errors and len(errors) == len(answers):
                reason = error_text(errors[0])
                raise WeightSyncError(f"no worker accepted the weights: {reason}") from errors[0]

    def close(self, error: EngineDeadError) -> None:
        """End the thread and all workers; sequences that are left raise `error`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._fail(error)
            self._ended_counters = self.counters
            workers = list(self._workers.values())
            self._workers = {}
        for worker in workers:
            self._cluster.kill(worker.handle)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        self._cluster.close()

    # On the thread.

    def _run(self) -> None:
        # At the runner's end, the tasks of the workers are cancelled.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._watch())

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the thread; an exception that it raises is a bug and ends the pool."""

        async def guarded() -> Any:
            try:
                return await coroutine
            except Exception as error:
                _LOGGER.exception("the pool stopped")
                self._fail(error)
                raise

        return asyncio.run_coroutine_threadsafe(guarded(), self._loop)

    async def _watch(self) -> None:
        """End the pool if a caller is waiting and no worker has run for too long."""
        alone_since = time.monotonic()
        while not self._is_closed:
            await asyncio.sleep(WATCH_SECONDS)
            with self._lock:
                seconds = time.monotonic() - alone_since
                if self._usable():
                    alone_since = time.monotonic()
                elif seconds > self._start_timeout and (
                    len(self._dispatcher) or not self._first.done()
                ):
                    error = EngineDeadError(
                        f"no worker ran for {seconds:.0f} s, start_timeout_seconds="
                        f"{self._start_timeout:g}: {self._cluster.resources()}. Lower "
                        "resources_per_worker, add machines, or raise start_timeout_seconds."
                    )
                    self._fail(error)

    async def _serve(self, worker: _Worker, references: Sequence[Any]) -> None:
        """Start a worker, and process its reports until it ends."""
        started = await self._answer(worker, references, "start", self._start_timeout)
        for described, node in started:
            self._cluster.record_process(described.process_id, node)
        description, _ = started[0]
        while worker.description is None:
            if worker.version < self._weights.version:
                await self._send(worker, self._weights, InFlight.RECOMPUTE)
            with self._lock:
                if worker.version == self._weights.version:
                    self._begin(worker, description)
        while True:
            is_busy = bool(self._dispatcher.load(worker.number))
            seconds = BUSY_REPORT_SECONDS if is_busy else IDLE_REPORT_SECONDS
            references = self._cluster.call(worker.handle, "report", seconds)
            answers = await self._answer(worker, references, "report", seconds + self._timeout)
            outputs, counters = answers[0]
            self._take_report(worker, outputs, counters)

    def _begin(self, worker: _Worker, description: WorkerDescription) -> None:
        """Let a worker with the current weights sample; called with the lock."""
        worker.description = description
        worker.progressed_at = time.monotonic()
        self._num_failed_starts = 0
        self._last_failure = None
        if not self._first.done():
            self._first.set_result(description)
        self._start_missing()
        self._dispatch()

    async def _answer(
        self,
        worker: _Worker,
        references: Sequence[Any],
        method: str,
        seconds: float,
        expected: type[Exception] | tuple[()] = (),
    ) -> list[Any]:
        """Wait for a call's results; end a worker without results or with an unexpected error.

        Args:
            worker: the worker that was called.
            references: of the results, one for each of its processes.
            method: its name, for the message.
            seconds: longest wait.
            expected: errors of the worker that the caller handles.

        Raises:
            asyncio.CancelledError: the worker was ended; its cause is the error.
        """
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await self._cluster.results(references)
        except expected:
            raise
        except Exception as error:
            if limit.expired():
                limits = f"{self._timeout:g}, start_timeout_seconds={self._start_timeout:g}"
                self._end(worker, f"no answer to {method!r} in time; timeout_seconds={limits}")
            else:
                self._lose(worker, error)
            raise asyncio.CancelledError from error

    async def _send(
        self, worker: _Worker, weights: WeightUpdate, in_flight: InFlight
    ) -> BaseException | None:
        """Send weights to a worker; return the error if it did not take them and was ended."""
        are_deltas = weights.is_delta_for(worker.version)
        with self._lock:
            references = self._cluster.call_all(
                worker.handle, "update", weights, in_flight, self._timeout, are_deltas
            )
        try:
            # Once the time to fetch, and once the time to write.
            await self._answer(worker, references, "update", 2 * self._timeout)
        except asyncio.CancelledError as error:
            if error.__cause__ is None or worker.description is None:
                raise
            return error.__cause__
        worker.version = weights.version
        worker.progressed_at = time.monotonic()
        return None

    async def _submit(
        self, worker: _Worker, references: Sequence[Any], item_ids: Sequence[str]
    ) -> None:
        """End the sequences that a worker could not read."""
        try:
            # A split worker may first have to take an update, which may take twice this time.
            await self._answer(worker, references, "submit", 3 * self._timeout, RolloutError)
        except EngineDeadError:
            # Its report says so too.
            return
        except RolloutError as error:
            self._fail_items(worker, item_ids, error)

    def _take_report(
        self, worker: _Worker, outputs: Sequence[GenerationOutput], counters: EngineCounters
    ) -> None:
        with self._lock:
            # Before the outputs are delivered: whoever waits for the last one reads the counters.
            has_computed = counters.num_forwards != worker.counters.num_forwards
            worker.counters = counters
            self._dispatcher.deliver(worker.number, outputs)
            now = time.monotonic()
            is_idle = not self._dispatcher.load(worker.number)
            if has_computed or is_idle:
                worker.progressed_at = now
            elif now - worker.progressed_at > self._timeout:
                self._end(worker, f"no forward in timeout_seconds={self._timeout:g}")
            self._dispatch()

    # On any thread.

    def _usable(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.description is not None]

    def _start_missing(self) -> None:
        while self._fatal_error is None and len(self._workers) < self._num_workers:
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                if self._workers:
                    return
                assert self._last_failure is not None, "a start failed without a reason"
                count = f"{self._num_failed_starts} workers in a row did not start; the last: "
                self._fail(_dead(self._last_failure, count))
                return
            number = self._num_started
            self._num_started += 1
            handle, references = self._cluster.start_worker(*self._arguments)
            worker = _Worker(number=number, handle=handle)
            self._workers[number] = worker
            worker.task = self._spawn(self._serve(worker, references))

    def _lose(self, worker: _Worker, error: Exception) -> None:
        """End a worker that raised, and count the start if it never worked."""
        with self._lock:
            if worker.number in self._workers and worker.description is None:
                self._num_failed_starts += 1
                self._last_failure = error
                if isinstance(error, ValueError) and not self._first.done():
                    self._first.set_exception(error)
            self._end(worker, error_text(error))

    def _end(self, worker: _Worker, reason: str, *, is_dead: bool = True) -> None:
        """Kill a worker; its sequences restart elsewhere, and another worker replaces it."""
        with self._lock:
            if self._workers.pop(worker.number, None) is None:
                return
            assert worker.task is not None, "not started"
            worker.task.cancel()
            self._ended_counters = self._ended_counters.plus(worker.counters)
            self._cluster.kill(worker.handle)
            num_moved = self._dispatcher.withdraw(worker.number, is_dead=is_dead, reason=reason)
            _LOGGER.log(
                logging.WARNING if is_dead else logging.INFO,
                "worker %d ended: %s; %d sequences begin again elsewhere",
                worker.number, reason, num_moved,
            )  # fmt: skip
            self._start_missing()
            self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting sequences to the workers; called with the lock."""
        capacities: dict[int, int] = {}
        for worker in self._usable():
            if worker.description is not None:
                capacities[worker.number] = worker.description.capacity
        idle = [number for number in capacities if not self._dispatcher.load(number)]
        for number, items in self._dispatcher.assign(capacities).items():
            worker = self._workers[number]
            if number in idle:
                worker.progressed_at = time.monotonic()
            item_ids = [item.item_id for item in items]
            try:
                references = self._cluster.call_all(worker.handle, "submit", items)
            except Exception as error:  # noqa: BLE001  pickling runs the caller's code
                unreadable = RolloutError(f"{error_text(error)}; {PICKLABLE}.")
                self._fail_items(worker, item_ids, unreadable)
            else:
                self._spawn(self._submit(worker, references, item_ids))

    def _fail_items(self, worker: _Worker, item_ids: Sequence[str], error: RolloutError) -> None:
        with self._lock:
            self._dispatcher.fail(item_ids, f"a worker cannot take it: {error}")
            self._cluster.call(worker.handle, "cancel", item_ids)

    def _fail(self, error: BaseException) -> None:
        """Make all waiting callers raise; the first error becomes the pool's."""
        with self._lock:
            self._fatal_error = self._fatal_error or error
            dead = error if isinstance(error, EngineDeadError) else _dead(error)
            for sink in self._dispatcher.abandon():
                sink.close(dead)
            if not self._first.done():
                self._first.set_exception(dead)


def _dead(cause: BaseException, text: str = "") -> EngineDeadError:
    error = EngineDeadError(f"{text}{error_text(cause)}")
    error.__cause__ = cause
    return error
