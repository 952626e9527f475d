"""Step an engine while it has requests, on a background thread or on a waiting caller's.

Owns the daemon thread, the queue of submitted requests and the engine's failure. One thread at a
time uses the engine: the background thread, a caller in `stepping()`, or one inside `paused()`.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from typing import NamedTuple

from cb_rollout.config.enums import InFlight
from cb_rollout.engine.core import Engine
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.interrupts import interrupts_deferred
from cb_rollout.engine.service.lockstep import CommandKind, EngineGroup, Lockstep
from cb_rollout.engine.service.output_queue import OutputQueue, OutputSink
from cb_rollout.engine.service.pause_controller import PauseController, PauseReason
from cb_rollout.engine.service.thread_share import ThreadShare
from cb_rollout.engine.service.threads import InterruptibleThread
from cb_rollout.errors import EngineDeadError, InvalidRequestError, QueueFullError, RolloutError
from cb_rollout.metrics import observer as observation
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.observer import ObservedStep
from cb_rollout.metrics.registry import DECODE_STEP, PREFILL_STEP, EngineCounters
from cb_rollout.types import CancelResult, RequestStatus

# While idle, the thread holds no reference to its loop, and checks this often if it still exists.
IDLE_SECONDS = 1.0

# `halt` waits this long for the thread, longer than a step should take.
HALT_TIMEOUT_SECONDS = 10.0

# A late cancel must tell an ended request from an unknown one.
NUM_ENDED_IDS_KEPT = 10_000


class _LiveRequest(NamedTuple):
    """A request that has not ended."""

    request: Request
    sink: OutputSink
    """Gets its outputs."""


class NextAction(Enum):
    """The next action of a thread that wants to step."""

    STEP = auto()
    WAIT = auto()
    END = auto()


def _step_while_it_exists(
    reference: "weakref.ref[EngineLoop]", changed: threading.Condition
) -> None:
    """Step a loop until it ends, or until only this thread still refers to it."""
    try:
        _step_by_turns(reference, changed)
    except BaseException as error:  # noqa: BLE001  reraised in waiting threads
        # Otherwise the waiting threads would wait for ever.
        if (loop := reference()) is not None:
            loop.fail(error)


def _step_by_turns(reference: "weakref.ref[EngineLoop]", changed: threading.Condition) -> None:
    # torch keeps its number of threads separately for each calling thread.
    thread_share = ThreadShare()
    try:
        while (loop := reference()) is not None:
            with changed:
                action = loop.begin_turn()
                if action is NextAction.WAIT:
                    thread_share.restore()
                    del loop
                    changed.wait(IDLE_SECONDS)
                    continue
            if action is NextAction.END:
                return
            loop.step(thread_share)
            del loop
    finally:
        thread_share.restore()


def _with_groups_together(requests: Sequence[Request]) -> list[Request]:
    """Return requests with each group's members adjacent, ordered by their first members."""
    order_of_groups: dict[int | None, int] = {}
    for request in requests:
        order_of_groups.setdefault(request.group, len(order_of_groups))
    return sorted(requests, key=lambda request: order_of_groups[request.group])


class EngineLoop:
    """Step an engine and deliver its outputs; thread-safe."""

    def __init__(self, engine: Engine, group: EngineGroup | None = None) -> None:
        """Start no thread yet."""
        self.engine = engine
        self.thread_share = ThreadShare()
        """For the caller that steps; the background thread has another."""
        # The processes of a group sample the same tokens only if they round alike.
        may_round = group is None and not engine.runner.is_bitwise
        self._may_vary_threads = may_round and engine.device.type == "cpu"
        self._changed = threading.Condition()
        self._lockstep = None if group is None else Lockstep(group, self._changed)
        self._inbox: deque[Request] = deque()
        self._live: dict[str, _LiveRequest] = {}
        self._expected: dict[str, OutputSink] = {}
        self._cancelled: dict[str, None] = {}
        self._ended_ids: deque[str] = deque(maxlen=NUM_ENDED_IDS_KEPT)
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._is_draining = False
        self._is_ending = False
        self.pauses = PauseController(
            self._changed, lambda: self.is_running() and not self._is_ending
        )
        self._fatal_error: BaseException | None = None
        self.durations = Durations(engine.model_name)
        observation.add_engine(engine)

    def start(self) -> None:
        """Start the thread, or cancel its stop; after a failure, restart with an empty queue."""
        if self._is_ending:
            self.join()
        with interrupts_deferred(), self._changed:
            if self._lockstep is not None:
                # The processes of a group may have ended at different turns.
                self.require_alive()
            self._is_stopping = False
            if self.is_running() and not self._is_ending:
                return
            self._fatal_error = None
            self._is_ending = False
            self._thread = InterruptibleThread(
                target=_step_while_it_exists,
                args=(weakref.ref(self), self._changed),
                name="cb_rollout",
                daemon=True,
            )
            self._thread.start()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, drain: bool) -> None:
        """Ask the thread to end, after finishing live requests (`drain`) or cancelling them."""
        with interrupts_deferred(), self._changed:
            self._is_stopping = True
            self._is_draining = drain
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end, `timeout` seconds at most; None: no limit."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def halt(self) -> None:
        self.stop(drain=False)
        self.join(HALT_TIMEOUT_SECONDS)

    def submit(self, requests: Sequence[Request], sink: OutputSink) -> None:
        """Queue all requests or none, with each group's members adjacent.

        Raises `RolloutError` if the engine stopped, too many would wait, or an id is in use.
        """
        with interrupts_deferred(), self._changed:
            self.require_alive()
            if self._is_stopping:
                raise RolloutError("the manager was stopped; call start() before adding requests.")
            self._require_room(len(requests))
            assert len({r.request_id for r in requests}) == len(requests), "one id twice"
            for request in requests:
                if request.request_id in self._live:
                    raise InvalidRequestError(
                        f"request_id={request.request_id!r} is in use; choose another, or leave it "
                        "out and an id is generated."
                    )
            for request in requests:
                expected = self._expected.pop(request.request_id, sink)
                self._live[request.request_id] = _LiveRequest(request, expected)
            queued = _with_groups_together(requests)
            observation.observer().submitted(queued)
            self._inbox.extend(queued)
            self._changed.notify_all()

    def _require_room(self, num_new: int) -> None:
        """Raise `QueueFullError` if this many more requests would exceed `max_queue_size`."""
        most = self.engine.config.max_queue_size
        num_waiting = len(self._inbox) + self.engine.status().requests_waiting
        if not most or num_waiting + num_new <= most:
            return
        advice = "take results first" if num_new <= most else "send fewer at once"
        raise QueueFullError(
            f"{num_waiting} requests are waiting, and {num_new} more would exceed "
            f"max_queue_size={most}; {advice}, or raise it."
        )

    def unfinished(
        self, is_wanted: Callable[[OutputSink], bool] = lambda sink: True
    ) -> list[Request]:
        """Return the requests that have not ended, in the order in which they will run.

        `is_wanted` is called with the receiver of each request's outputs.
        """
        with interrupts_deferred(), self._changed:
            requests: list[Request] = []
            for live in self._live.values():
                if is_wanted(live.sink):
                    requests.append(live.request)
        places = {request: place for place, request in enumerate(self.engine.scheduled())}
        # Requests that the engine has not admitted come last.
        return sorted(requests, key=lambda request: places.get(request, len(places)))

    def cancelled(self) -> list[str]:
        """Return the ids of requests that were cancelled and have not ended."""
        with interrupts_deferred(), self._changed:
            return [request_id for request_id in self._cancelled if request_id in self._live]

    @property
    def num_not_started(self) -> int:
        """Return the number of waiting requests if no thread runs and none was stopped; else 0."""
        with interrupts_deferred(), self._changed:
            if self.is_running() or self._is_stopping:
                return 0
            return len(self._inbox)

    def cancel(self, request_ids: Sequence[str]) -> list[CancelResult]:
        """End requests early; each live one delivers its tokens so far."""
        with interrupts_deferred(), self._changed:
            states: list[CancelResult] = []
            for request_id in request_ids:
                states.append(self._state_of(request_id))
                if request_id in self._live:
                    self._cancelled[request_id] = None
            self._changed.notify_all()
        return states

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early and wait until the model's training flags are restored."""
        self.cancel(request_ids)
        with self.paused(is_collective=False):
            pass

    def deliver_cancelled(self) -> None:
        """Deliver cancelled requests now if the engine is held; otherwise the next step does."""
        if not self.pauses.reasons:
            return
        with self.paused(), interrupts_deferred(), self._changed:
            try:
                self._decide(is_halting=True)
            except BaseException as error:
                self.fail(error)
                raise

    def _state_of(self, request_id: str) -> CancelResult:
        if request_id in self._live:
            return CancelResult.LIVE
        if request_id in self._ended_ids:
            return CancelResult.FINISHED
        return CancelResult.UNKNOWN

    def redirect(self, request_id: str, sink: OutputSink, undelivered: OutputQueue) -> None:
        """Send a request's further outputs, and those in `undelivered`, to another sink.

        The request may be submitted later. Raises `InvalidRequestError` if all was delivered.
        """
        with interrupts_deferred(), self._changed:
            num_delivered = 0
            while (output := undelivered.take(request_id, 0.0)) is not None:
                sink.put(output)
                num_delivered += 1
            if request_id in self._live:
                self._live[request_id] = self._live[request_id]._replace(sink=sink)
            elif request_id not in self._ended_ids:
                self._expected[request_id] = sink
            elif not num_delivered:
                raise InvalidRequestError(
                    f"request_id={request_id!r} has already ended and was delivered; register a "
                    "handler before adding the request, or while it runs."
                )

    def is_live(self, request_id: str | None = None) -> bool:
        """Return True if a request can still deliver an output; with None, if any request can."""
        with interrupts_deferred(), self._changed:
            if not self.is_running():
                return False
            if request_id is None:
                return bool(self._live)
            return request_id in self._live

    @property
    def is_alive(self) -> bool:
        return self.is_running() and self._fatal_error is None

    def require_alive(self) -> None:
        if self._fatal_error is not None:
            raise self._engine_dead_error()

    def _engine_dead_error(self) -> EngineDeadError:
        cause = self._fatal_error
        advice = "generate again, or call start(), to restart the engine."
        if self._lockstep is not None:
            advice = "make a new generator on every process of the group."
        error = EngineDeadError(
            f"the engine stopped on {type(cause).__name__}: {str(cause).rstrip('.')}. Its requests "
            f"are lost; {advice}"
        )
        error.__cause__ = cause
        return error

    @contextmanager
    def paused(self, *, is_collective: bool = True, runs_module: bool = False) -> Iterator[None]:
        """Pause the engine between two forwards; see `PauseController.paused`.

        If `is_collective`, every process of a tensor-parallel group pauses after the same step.
        Otherwise only this process pauses, and the others wait for it: the block must not run a
        forward or change a weight. If `runs_module`, the block runs the module that trains, so the
        pause begins once no other thread has that module lent to the trainer.
        """
        if self.pauses.is_stepping_here or threading.current_thread() is self._thread:
            raise RolloutError(
                "a logits processor or a model's hook cannot pause the engine during its step."
            )
        lockstep = self._lockstep if is_collective else None
        if lockstep is not None:
            # The module of a group is never lent.
            pause = self.pauses.paused(lockstep.may_pause)
        elif runs_module:
            pause = self.pauses.paused(self.pauses.may_run_module)
        else:
            pause = self.pauses.paused()
        with pause:
            if lockstep is not None and not self.pauses.is_nested:
                lockstep.pause()
            with self.engine.lent():
                yield

    def hold(self, reason: PauseReason) -> None:
        """Keep the engine from stepping, after this forward, until the reason is released."""
        with self.paused():
            self.pauses.hold(reason)

    def begin_policy_version(self, in_flight: InFlight, version: int | None = None) -> None:
        """Begin the next policy version, or a later `version`; called inside `paused()`."""
        with interrupts_deferred(), self._changed:
            if in_flight is InFlight.ABORT:
                self._cancelled |= dict.fromkeys(self._live)
            version = version or self.engine.policy_version + 1
            assert version > self.engine.policy_version, "an older version"
            self.engine.begin_policy_version(version, keep_keys=in_flight is InFlight.KEEP)
        # Takes seconds, so requests may be submitted meanwhile.
        self.engine.paged_model.capture_wanted()

    @contextmanager
    def stepping(self) -> Iterator[Callable[..., None] | None]:
        """Step on the calling thread instead of the background thread.

        On a CPU, the waiting caller steps faster than a second thread would: if two threads with
        OpenMP pools share the cores, libgomp's workers sleep instead of spinning.

        Yields `step_until(is_done, poll_seconds)`, which calls `is_done` at every change and every
        `poll_seconds`. Yields None if another caller is stepping; its steps also serve this caller.
        """
        with self.pauses.stepping() as is_mine:
            try:
                yield self._step_until if is_mine else None
            finally:
                if is_mine:
                    self.thread_share.restore()

    def _step_until(self, is_done: Callable[[], bool], poll_seconds: float | None = None) -> None:
        with interrupts_deferred() as interrupts:
            while True:
                with self._changed:
                    action = self.begin_turn(is_done)
                    if action is NextAction.WAIT:
                        self._changed.wait(interrupts.limit(poll_seconds))
                if action is NextAction.END:
                    return
                if action is NextAction.STEP:
                    self.step()
                interrupts.deliver()

    def step(self, thread_share: ThreadShare | None = None) -> None:
        """Run the step that `begin_turn` began, and deliver its outputs.

        Args:
            thread_share: chooses the number of torch's threads, where it may vary; None: the one
                for callers that step.
        """
        try:
            if self._may_vary_threads:
                (thread_share or self.thread_share).adjust()
            num_prefills = self.engine.counters.prefill_forwards
            is_observing = observation.observer().is_observing
            before = self.engine.counters.copy() if is_observing else None
            began = time.perf_counter()
            touched = self.engine.step()
            is_prefill = self.engine.counters.prefill_forwards > num_prefills
            kind = PREFILL_STEP if is_prefill else DECODE_STEP
            self.durations.record_since(kind, began)
            if before is not None:
                self._observe_step(touched, before, began, is_prefill)
            if self._lockstep is not None:
                self._lockstep.record(touched)
            self._deliver(touched)
        except BaseException as error:  # noqa: BLE001  reraised in waiting threads
            self.fail(error)

    def _observe_step(
        self, touched: list[Request], before: EngineCounters, began: float, is_prefill: bool
    ) -> None:
        engine = self.engine
        started: list[Request] = []
        if is_prefill:
            for request in touched:
                # A sequence that was preempted got its first token before.
                if (request.first_token_time or 0.0) >= began:
                    started.append(request)
        step = ObservedStep(
            model_name=self.durations.model_name,
            is_prefill=is_prefill,
            added=engine.counters.since(before),
            started=started,
            num_blocks_used=engine.num_blocks_used,
            max_batch_tokens=engine.limits.max_batch_tokens,
        )
        observation.observer().stepped(step)

    def begin_turn(self, is_done: Callable[[], bool] = lambda: False) -> NextAction:
        """End this thread's last step, and return what it does next; called under the condition."""
        self.pauses.end_step()
        if self._fatal_error is not None or is_done():
            return NextAction.END
        # In a following process, the leading process's cancels end the requests.
        drains = self._is_draining or self._follows
        # Nothing is left to drain, so a sleep or another thread's pause need not end first.
        is_halting = self._is_stopping and not (drains and self._live)
        is_paused = self.pauses.is_paused and not is_halting
        if is_paused or not self.pauses.is_my_turn:
            return NextAction.WAIT
        try:
            is_step = self._follow() if self._follows else self._decide(is_halting)
        except BaseException as error:  # noqa: BLE001  reraised in waiting threads
            self.fail(error)
            return NextAction.END
        if is_step:
            self.pauses.begin_step()
            return NextAction.STEP
        if self._is_stopping and not (self._follows and self._live):
            if threading.current_thread() is self._thread:
                self._is_ending = True
                self._changed.notify_all()
            return NextAction.END
        self.pauses.pass_turn()
        return NextAction.END if is_done() else NextAction.WAIT

    def _decide(self, is_halting: bool) -> bool:
        """Admit and cancel requests as asked; return whether a step follows."""
        admitted = list(self._inbox)
        self._inbox.clear()
        if self._is_stopping and not self._is_draining:
            self._cancelled = dict.fromkeys(self._live)
        cancelled = [request_id for request_id in self._cancelled if request_id in self._live]
        self._take(admitted, cancelled)
        is_step = self.engine.has_work and not is_halting
        if self._lockstep is not None and (is_step or admitted or cancelled):
            kind = CommandKind.STEP if is_step else CommandKind.TAKE
            self._lockstep.lead(kind, admitted, cancelled)
        return is_step

    def _take(self, admitted: Sequence[Request], cancelled: Sequence[str]) -> None:
        for request in admitted:
            self.engine.add(request)
        ended = [self._live[request_id].request for request_id in cancelled]
        for request in ended:
            self.engine.cancel(request)
        self._cancelled = {}
        if ended and not self.engine.has_work:
            self.engine.release_model()
        self._deliver(ended)

    @property
    def _follows(self) -> bool:
        return self._lockstep is not None and self._lockstep.follows

    def _follow(self) -> bool:
        """Follow the leading process up to the next step; False: this one must act first."""
        assert self._lockstep is not None
        while self._live:
            command = self._lockstep.take(self._live)
            if command is None:
                return False
            admitted = [self._live[request_id].request for request_id, _ in command.admitted]
            for request in admitted:
                self._inbox.remove(request)
            cancelled = [request_id for request_id in command.cancelled if request_id in self._live]
            self._take(admitted, cancelled)
            if command.kind is CommandKind.STEP:
                return True
        return False

    def _deliver(self, touched: list[Request]) -> None:
        decoding = RequestStatus.DECODING
        for request in touched:
            is_final = request.status is not decoding and request.status.is_final
            if is_final:
                self.durations.record_ended(request)
            elif not request.is_streaming:
                continue
            output = request.output(self.engine.config.return_logprobs)
            with self._changed:
                self._live[request.request_id].sink.put(output)
                if is_final:
                    del self._live[request.request_id]
                    self._ended_ids.append(request.request_id)
                    if not self._live:
                        self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with interrupts_deferred(), self._changed:
            self.pauses.end_step()
            self._fatal_error = error
            dead_error = self._engine_dead_error()
            ended = time.perf_counter()
            sinks: dict[int, OutputSink] = {}
            for request, sink in self._live.values():
                name = self.durations.model_name
                observation.observer().ended(request, name, ended, dead_error)
                sinks[id(sink)] = sink
            self._live.clear()
            self._expected.clear()
            self._inbox.clear()
            self._cancelled = {}
            self._is_ending = True
            # A failed device may fail here too, and the sinks must be closed regardless.
            with suppress(Exception):
                self.engine.abandon()
            self._changed.notify_all()
        for sink in sinks.values():
            sink.close(dead_error)
