"""Keep the workers of a pool running, with the current weights and with work.

Owns the workers from their start to their end, the calls that are in progress, and the thread that
waits for them. Every wait has a limit. `RolloutPool` calls it from any thread.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cb_rollout.config.enums import InFlight
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.output_queue import OutputSink
from cb_rollout.errors import (
    EngineDeadError,
    RolloutError,
    WeightSyncError,
    error_text,
)
from cb_rollout.integrations.ray.cluster import PICKLABLE, Cluster, WorkerHandle
from cb_rollout.integrations.ray.dispatcher import Candidate, Dispatcher
from cb_rollout.integrations.ray.weight_update import WeightUpdate
from cb_rollout.integrations.ray.worker import WorkerDescription, WorkerReport
from cb_rollout.metrics.registry import EngineCounters

_LOGGER = logging.getLogger(__name__)

# Longest wait for a result between two looks at deadlines and new calls.
TURN_SECONDS = 0.05

# Longest time that a worker waits for a sequence to end before it reports, with and without work.
BUSY_REPORT_SECONDS = 0.25
IDLE_REPORT_SECONDS = 2.0

# No further worker is started after so many in a row that failed to start.
MAX_FAILED_STARTS = 3

# A worker that refuses current weights so often is replaced.
MAX_REFUSALS = 2

# Longer than a turn of the thread should take.
CLOSE_SECONDS = 30.0


class CallKind(StrEnum):
    """A method of a worker."""

    START = "start"
    SUBMIT = "submit"
    REPORT = "report"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Weights that every worker can fetch."""

    version: int
    update: WeightUpdate | None
    """None: those of the checkpoint."""
    references: Sequence[Any] = ()
    """Of the buffers in the object store, which are kept while this record is."""


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    handle: WorkerHandle
    description: WorkerDescription | None = None
    version: int = 0
    is_reporting: bool = False
    updating_to: int | None = None
    num_refusals: int = 0
    counters: EngineCounters = field(default_factory=EngineCounters)
    progressed_at: float = 0.0
    """Time at which it was last seen to compute, or had no work."""


@dataclass(frozen=True, slots=True)
class _Call:
    worker: _Worker
    kind: CallKind
    deadline: float
    item_ids: Sequence[str] = ()
    """Of the items that were submitted."""


@dataclass(slots=True)
class _Sync:
    """An update that the workers are taking."""

    weights: PublishedWeights
    pending: set[int] = field(default_factory=set)
    """Numbers of the workers that have not answered."""
    refusals: list[WeightSyncError] = field(default_factory=list)
    num_taken: int = 0


class WorkerSupervisor:
    """The workers of one pool, on a thread."""

    def __init__(
        self,
        cluster: Cluster,
        arguments: tuple[Any, ...],
        num_workers: int,
        timeout_seconds: float,
        start_timeout_seconds: float,
    ) -> None:
        """Start the thread, and ask for the workers.

        Args:
            cluster: starts and calls them.
            arguments: of each `PoolWorker`.
            num_workers: workers that should run.
            timeout_seconds: longest wait for an answer, or for a forward of a worker with work; an
                update may take it twice, to fetch the bytes and to write them.
            start_timeout_seconds: longest start of a worker, and longest time without any.
        """
        self._cluster, self._arguments = cluster, arguments
        self._num_workers = num_workers
        self._timeout, self._start_timeout = timeout_seconds, start_timeout_seconds
        self._changed = threading.Condition()
        self._workers: dict[int, _Worker] = {}
        self._calls: dict[Any, _Call] = {}
        self._dispatcher = Dispatcher()
        self._weights = PublishedWeights(0, None)
        self._sync: _Sync | None = None
        self._updating_to: int | None = None
        self._max_cached_tokens = 0
        self._num_started = 0
        self._ended_counters = EngineCounters()
        self._num_failed_starts = 0
        self._last_failure: Exception | None = None
        self._alone_since = time.monotonic()
        self._fatal_error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cb_rollout pool", daemon=True)
        self._thread.start()

    # Called from any thread.

    @property
    def policy_version(self) -> int:
        """Return the version of the weights that new sequences are sampled from."""
        return self._weights.version

    @property
    def num_alive(self) -> int:
        """Return the number of workers that have the current weights."""
        with self._changed:
            return len(self._usable())

    def first_description(self) -> WorkerDescription:
        """Wait for the first worker.

        Raises:
            ValueError: a worker refused the model or a setting (`ConfigurationError`).
            EngineDeadError: no worker started in time, or `MAX_FAILED_STARTS` failed in a row; the
                last exception is its cause.
        """
        with self._changed:
            while not (usable := self._usable()):
                if isinstance(self._last_failure, ValueError):
                    raise self._last_failure
                self.require_alive()
                self._require_not_alone_for_long()
                self._changed.wait(TURN_SECONDS)
            assert usable[0].description is not None
            return usable[0].description

    def counters(self) -> EngineCounters:
        """Return the totals of all workers that ever ran, as last reported."""
        with self._changed:
            total = self._ended_counters
            for worker in self._workers.values():
                total = total.plus(worker.counters)
            return total

    def num_sequences(self) -> tuple[int, int]:
        """Return the numbers of sequences that workers have, and that wait for one."""
        with self._changed:
            num_assigned = sum(self._dispatcher.load(number) for number in self._workers)
            return num_assigned, len(self._dispatcher) - num_assigned

    def max_cached_tokens(self) -> int:
        """Return the longest sequence in tokens that every worker can hold."""
        with self._changed:
            known = [w.description for w in self._workers.values() if w.description is not None]
            return min((one.max_cached_tokens for one in known), default=self._max_cached_tokens)

    def resize(self, num_workers: int) -> None:
        """Set the number of workers; sequences of those that end go on elsewhere."""
        with self._changed:
            self.require_alive()
            self._num_workers, self._num_failed_starts = num_workers, 0
            usable = {worker.number for worker in self._usable()}
            surplus = sorted(
                self._workers.values(),
                key=lambda w: (w.number in usable, self._dispatcher.load(w.number)),
            )
            for worker in surplus[: max(0, len(surplus) - num_workers)]:
                self._end(worker, "the pool was made smaller", is_dead=False)
            self._changed.notify_all()

    def submit(self, requests: Iterable[Request], sink: OutputSink) -> None:
        """Queue sequences; each delivers one output to `sink`.

        Raises:
            EngineDeadError: the pool was closed, or no worker can run.
        """
        with self._changed:
            self.require_alive()
            self._dispatcher.add(requests, sink)
            self._dispatch()
            self._changed.notify_all()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End sequences; each delivers the tokens that its worker reported."""
        with self._changed:
            for number, item_ids in self._dispatcher.cancel(request_ids).items():
                self._cluster.call(self._workers[number].handle, "cancel", item_ids)

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Reserve the next version for the weights that are prepared and sent inside.

        Raises:
            WeightSyncError: it is not the next version, or another thread sends it.
            EngineDeadError: the pool was closed, or no worker can run.
        """
        with self._changed:
            self.require_alive()
            self._require_successor(version)
            self._updating_to = version
        try:
            yield
        finally:
            self._updating_to = None

    def update(self, weights: PublishedWeights, in_flight: InFlight) -> None:
        """Have every worker take new weights; workers that come later get them first.

        Called inside `updating`. A worker that does not take them samples nothing until it has
        them, or is replaced.

        Raises:
            WeightSyncError: every worker refused them, and the pool keeps the present ones.
            EngineDeadError: the pool was closed, or no worker can run.
        """
        assert weights.update is not None
        with self._changed:
            self.require_alive()
            sync = self._sync = _Sync(weights)
            try:
                if in_flight is InFlight.ABORT:
                    self._dispatcher.cancel_waiting()
                for worker in self._usable():
                    sync.pending.add(worker.number)
                    self._send(worker, weights, in_flight)
                while sync.pending:
                    self._changed.wait(TURN_SECONDS)
                    self.require_alive()
            finally:
                self._sync = None
                is_refused = bool(sync.refusals) and not sync.num_taken and not sync.pending
                if is_refused:
                    # A worker that ended meanwhile may have sampled from them.
                    self._dispatcher.forget_newer(self.policy_version)
                else:
                    self._adopt(weights)
            if is_refused:
                raise WeightSyncError(
                    f"all {len(sync.refusals)} workers refused: {sync.refusals[0]}"
                ) from sync.refusals[0]

    def require_alive(self) -> None:
        """Raise `EngineDeadError` where the pool was closed, or no worker can run."""
        if self._fatal_error is not None:
            raise EngineDeadError(str(self._fatal_error)) from self._fatal_error
        if self._is_closed:
            raise EngineDeadError("the pool was closed; make another one.")

    def close(self, error: EngineDeadError) -> None:
        """End the thread and all workers; sequences that are left raise `error`."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        with self._changed:
            self._fail(error)
        self._cluster.close()

    def _require_successor(self, version: int) -> None:
        if self._updating_to is not None:
            raise WeightSyncError(
                f"version {self._updating_to} is being sent by another thread; one "
                "trainer updates a pool, one update after the other. Give each trainer a pool."
            )
        if version != self.policy_version + 1:
            raise WeightSyncError(
                f"weights of version {version} do not follow version {self.policy_version}, which "
                "the pool has: another trainer updates it too. Give each trainer a pool."
            )

    def _require_not_alone_for_long(self) -> None:
        seconds = time.monotonic() - self._alone_since
        if seconds > self._start_timeout:
            raise EngineDeadError(
                f"no worker ran for {seconds:.0f} s, start_timeout_seconds="
                f"{self._start_timeout:g}. The cluster has {self._cluster.resources()}; lower "
                "resources_per_worker, add machines, or raise start_timeout_seconds."
            )

    # The rest is called under the condition; on the thread, but for what the methods above call.

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        except BaseException as error:
            if not self._is_closed:
                _LOGGER.exception("the pool stopped")
            with self._changed:
                self._fail(error)

    def _turn(self) -> None:
        with self._changed:
            references = list(self._calls)
            if not references:
                self._start_missing()
                self._changed.wait(TURN_SECONDS)
        found = self._cluster.finished(references, TURN_SECONDS) if references else []
        with self._changed:
            for reference in found:
                if (call := self._calls.pop(reference, None)) is not None:
                    self._finish(call, reference)
            self._end_overdue()
            self._start_missing()
            self._bring_up_to_date()
            self._dispatch()
            self._ask_for_reports()
            if self._usable():
                self._alone_since = time.monotonic()
            elif len(self._dispatcher):
                self._require_not_alone_for_long()
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._fatal_error = self._fatal_error or error
        for sink in self._dispatcher.abandon().values():
            dead = error
            if not isinstance(dead, EngineDeadError):
                dead = EngineDeadError(error_text(error))
                dead.__cause__ = error
            sink.close(dead)
        self._changed.notify_all()

    def _usable(self) -> list[_Worker]:
        return [
            worker
            for worker in self._workers.values()
            if worker.description is not None and worker.version >= self._weights.version
        ]

    def _call(
        self,
        worker: _Worker,
        kind: CallKind,
        *arguments: Any,
        seconds: float = 0.0,
        item_ids: Sequence[str] = (),
    ) -> None:
        reference = self._cluster.call(worker.handle, kind.value, *arguments)
        deadline = time.monotonic() + seconds + self._timeout
        self._calls[reference] = _Call(worker, kind, deadline, item_ids)

    def _send(self, worker: _Worker, weights: PublishedWeights, in_flight: InFlight) -> None:
        assert weights.update is not None
        worker.updating_to = weights.version
        reference = self._cluster.update(
            worker.handle, weights.update, weights.references, in_flight, self._timeout
        )
        # To fetch, and to write.
        deadline = time.monotonic() + 2 * self._timeout
        self._calls[reference] = _Call(worker, CallKind.UPDATE, deadline)

    def _finish(self, call: _Call, reference: Any) -> None:
        worker = call.worker
        if worker.number not in self._workers:
            return
        try:
            result = self._cluster.result(reference)
        except RolloutError as error:
            if call.kind is CallKind.UPDATE and isinstance(error, WeightSyncError):
                self._end_update(worker, error)
            elif call.kind is CallKind.SUBMIT and not isinstance(error, EngineDeadError):
                self._fail_items(worker, call.item_ids, error)
            else:
                self._end_call(call, error)
        except Exception as error:  # noqa: BLE001  whatever a worker raises ends the worker
            self._end_call(call, error)
        else:
            if call.kind is CallKind.START:
                self._begin(worker, *result)
            elif call.kind is CallKind.REPORT:
                self._take_report(worker, result)
            elif call.kind is CallKind.UPDATE:
                self._end_update(worker, None)

    def _end_call(self, call: _Call, error: Exception) -> None:
        if call.kind is CallKind.START:
            self._num_failed_starts += 1
            self._last_failure = error
        self._end(call.worker, error_text(error))

    def _fail_items(self, worker: _Worker, item_ids: Sequence[str], error: RolloutError) -> None:
        self._dispatcher.fail(item_ids, f"a worker cannot take it: {error}")
        self._cluster.call(worker.handle, "cancel", item_ids)

    def _begin(self, worker: _Worker, description: WorkerDescription, node: str) -> None:
        worker.description, worker.progressed_at = description, time.monotonic()
        self._max_cached_tokens = description.max_cached_tokens
        if worker.version >= self._weights.version:
            self._num_failed_starts, self._last_failure = 0, None
        self._cluster.note_process(description.process_id, node)

    def _take_report(self, worker: _Worker, report: WorkerReport) -> None:
        worker.is_reporting = False
        # Before the outputs are delivered: who waits for the last of them reads these.
        before, worker.counters = worker.counters, report.counters
        self._dispatcher.take_progress(worker.number, report.progress)
        self._dispatcher.deliver(worker.number, report.outputs)
        is_idle = not self._dispatcher.load(worker.number)
        if report.counters.num_forwards != before.num_forwards or is_idle or worker.updating_to:
            worker.progressed_at = time.monotonic()

    def _end_update(self, worker: _Worker, refusal: WeightSyncError | None) -> None:
        """Note that a worker has taken weights, or refused them and kept those it had."""
        version, worker.updating_to = worker.updating_to, None
        assert version is not None
        sync = self._sync
        if refusal is None:
            worker.version, worker.num_refusals = version, 0
            self._num_failed_starts, self._last_failure = 0, None
        else:
            worker.num_refusals += 1
            _LOGGER.warning("worker %d refused weights: %s", worker.number, refusal)
        if sync is not None and worker.number in sync.pending:
            sync.pending.discard(worker.number)
            sync.num_taken += refusal is None
            if refusal is not None:
                sync.refusals.append(refusal)
        elif worker.num_refusals >= MAX_REFUSALS:
            self._num_failed_starts, self._last_failure = self._num_failed_starts + 1, refusal
            self._end(worker, str(refusal))

    def _adopt(self, weights: PublishedWeights) -> None:
        """Make weights the current ones; a worker without them gives its sequences away."""
        self._weights = weights
        for worker in self._workers.values():
            if worker.description is not None and worker.version < weights.version:
                item_ids = self._dispatcher.withdraw(worker.number, is_dead=False)
                if item_ids:
                    self._cluster.call(worker.handle, "cancel", item_ids)

    def _end(self, worker: _Worker, reason: str, *, is_dead: bool = True) -> None:
        """Kill a worker; its sequences go on elsewhere."""
        del self._workers[worker.number]
        self._ended_counters = self._ended_counters.plus(worker.counters)
        self._calls = {r: call for r, call in self._calls.items() if call.worker is not worker}
        self._cluster.kill(worker.handle)
        moved = self._dispatcher.withdraw(worker.number, is_dead=is_dead, reason=reason)
        if self._sync is not None and worker.number in self._sync.pending:
            self._sync.pending.discard(worker.number)
        log = _LOGGER.warning if is_dead else _LOGGER.info
        log("worker %d ended: %s; %d sequences go on elsewhere", worker.number, reason, len(moved))

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for call in list(self._calls.values()):
            if call.deadline < now and call.worker.number in self._workers:
                self._end(
                    call.worker,
                    f"no answer to {call.kind.value!r} in time; timeout_seconds="
                    f"{self._timeout:g}, start_timeout_seconds={self._start_timeout:g}",
                )
        for worker in list(self._workers.values()):
            is_busy = self._dispatcher.load(worker.number) and worker.updating_to is None
            if is_busy and now - worker.progressed_at > self._timeout:
                self._end(worker, f"no forward in timeout_seconds={self._timeout:g}")

    def _start_missing(self) -> None:
        while len(self._workers) < self._num_workers:
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                if self._workers:
                    return
                last = self._last_failure or RuntimeError()
                raise EngineDeadError(
                    f"{self._num_failed_starts} workers in a row did not start; the last: "
                    f"{error_text(last)}"
                ) from last
            number, self._num_started = self._num_started, self._num_started + 1
            handle, reference = self._cluster.start_worker(*self._arguments)
            worker = self._workers[number] = _Worker(number, handle)
            deadline = time.monotonic() + self._start_timeout
            self._calls[reference] = _Call(worker, CallKind.START, deadline)

    def _bring_up_to_date(self) -> None:
        for worker in self._workers.values():
            is_started = worker.description is not None and worker.updating_to is None
            if is_started and worker.version < self._weights.version:
                self._send(worker, self._weights, InFlight.RECOMPUTE)

    def _dispatch(self) -> None:
        usable = self._usable()
        idle = {worker.number for worker in usable if not self._dispatcher.load(worker.number)}
        candidates = [
            Candidate(worker.number, worker.version, worker.description.capacity)
            for worker in usable
            if worker.description is not None
        ]
        for number, items in self._dispatcher.assign(candidates).items():
            worker = self._workers[number]
            if number in idle:
                worker.progressed_at = time.monotonic()
            item_ids = [item.item_id for item in items]
            try:
                self._call(worker, CallKind.SUBMIT, items, item_ids=item_ids)
            except Exception as error:  # noqa: BLE001  pickling runs the caller's code
                unreadable = RolloutError(f"{error_text(error)}; {PICKLABLE}.")
                self._fail_items(worker, item_ids, unreadable)

    def _ask_for_reports(self) -> None:
        for worker in self._workers.values():
            if worker.description is not None and not worker.is_reporting:
                is_busy = bool(self._dispatcher.load(worker.number))
                seconds = BUSY_REPORT_SECONDS if is_busy else IDLE_REPORT_SECONDS
                worker.is_reporting = True
                self._call(worker, CallKind.REPORT, seconds, seconds=seconds)
