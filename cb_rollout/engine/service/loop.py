"""Step an engine while it has requests, on a background thread or on a waiting caller's.

Owns the thread, a daemon, the queue of submitted requests and the engine's failure. One thread at a
time uses the engine: the background thread, a caller in `stepping()`, or one inside `paused()`.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto

from cb_rollout.config.enums import InFlight
from cb_rollout.engine.core import Engine
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.interrupts import interrupts_deferred
from cb_rollout.engine.service.lockstep import CommandKind, EngineGroup, Lockstep
from cb_rollout.engine.service.output_queue import OutputQueue, OutputSink
from cb_rollout.engine.service.pause_controller import PauseController, PauseReason
from cb_rollout.errors import EngineDeadError, InvalidRequestError, QueueFullError, RolloutError
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.registry import DECODE_STEP, PREFILL_STEP
from cb_rollout.types import CancelResult, RequestStatus

# While idle, the thread keeps no reference to its loop, and checks this often whether it exists.
IDLE_SECONDS = 1.0

# `halt` waits this long for the thread, longer than a step should take.
HALT_TIMEOUT_SECONDS = 10.0

# A late cancel must tell an ended request from an unknown one.
NUM_ENDED_IDS_KEPT = 10_000


class NextAction(Enum):
    """The next action of a thread that wants to step."""

    STEP = auto()
    WAIT = auto()
    END = auto()


def _step_while_it_exists(
    reference: "weakref.ref[EngineLoop]", changed: threading.Condition
) -> None:
    """Step a loop until it ends, or until nothing but this thread would keep it alive."""
    while (loop := reference()) is not None:
        try:
            with changed:
                action = loop.begin_turn()
                if action is NextAction.WAIT:
                    del loop
                    changed.wait(IDLE_SECONDS)
                    continue
            if action is NextAction.END:
                return
            loop.step()
            del loop
        except BaseException as error:  # noqa: BLE001  reraised in waiting threads
            # Without it the waiting threads would wait for ever.
            if (loop := reference()) is not None:
                loop.fail(error)
            return


class EngineLoop:
    """Step an engine and deliver its outputs; thread-safe."""

    def __init__(self, engine: Engine, group: EngineGroup | None = None) -> None:
        """Start no thread yet."""
        self.engine = engine
        self._changed = threading.Condition()
        self._lockstep = None if group is None else Lockstep(group, self._changed)
        self._inbox: deque[Request] = deque()
        self._live: dict[str, tuple[Request, OutputSink]] = {}
        self._expected: dict[str, OutputSink] = {}
        self._cancelled: dict[str, None] = {}
        self._ended_ids: deque[str] = deque(maxlen=NUM_ENDED_IDS_KEPT)
        self._thread: threading.Thread | None = None
        self._is_stopping = self._is_draining = self._is_ending = False
        self.pauses = PauseController(
            self._changed, lambda: self.is_running() and not self._is_ending
        )
        self._fatal_error: BaseException | None = None
        self.durations = Durations()

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
            self._fatal_error, self._is_ending = None, False
            self._thread = threading.Thread(
                target=_step_while_it_exists,
                args=(weakref.ref(self), self._changed),
                name="cb_rollout",
                daemon=True,
            )
            self._thread.start()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, drain: bool) -> None:
        """Ask the thread to end: after the requests in flight (`drain`), or cancelling them."""
        with interrupts_deferred(), self._changed:
            self._is_stopping, self._is_draining = True, drain
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def halt(self) -> None:
        self.stop(drain=False)
        self.join(HALT_TIMEOUT_SECONDS)

    def submit(self, requests: Sequence[Request], sink: OutputSink) -> None:
        """Queue requests, all or none, with the members of a group side by side.

        Raises `RolloutError` if the engine stopped, too many would wait, or an id is in use.
        """
        with interrupts_deferred(), self._changed:
            self.require_alive()
            if self._is_stopping:
                raise RolloutError("the manager was stopped; start() it before adding requests.")
            num_waiting = len(self._inbox) + self.engine.num_waiting
            most, num_new = self.engine.config.max_queue_size, len(requests)
            if most and num_waiting + num_new > most:
                advice = "take results first" if num_new <= most else "send fewer at once"
                raise QueueFullError(
                    f"{num_waiting} requests wait and {num_new} more would pass max_queue_size="
                    f"{most}; {advice}, or raise it."
                )
            assert len({r.request_id for r in requests}) == len(requests), "one id twice"
            for request in requests:
                if request.request_id in self._live:
                    raise InvalidRequestError(
                        f"request_id={request.request_id!r} is in use; choose another, or leave it "
                        "out to have one made."
                    )
            arrival: dict[int | None, int] = {}
            for request in requests:
                arrival.setdefault(request.group, len(arrival))
            queued = sorted(requests, key=lambda request: arrival[request.group])
            for request in requests:
                expected = self._expected.pop(request.request_id, sink)
                self._live[request.request_id] = (request, expected)
            self._inbox.extend(queued)
            self._changed.notify_all()

    def cancel(self, request_ids: Sequence[str]) -> list[CancelResult]:
        """End requests early; each live one delivers its tokens so far."""
        with interrupts_deferred(), self._changed:
            states = [self._state_of(request_id) for request_id in request_ids]
            self._cancelled |= dict.fromkeys(i for i in request_ids if i in self._live)
            self._changed.notify_all()
        return states

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early and wait until the model's training flags are restored."""
        self.cancel(request_ids)
        with self.paused(is_collective=False):
            pass

    def deliver_cancelled(self) -> None:
        """Deliver the requests that were cancelled while the engine is held; else a step does."""
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
        return CancelResult.FINISHED if request_id in self._ended_ids else CancelResult.UNKNOWN

    def redirect(self, request_id: str, sink: OutputSink, undelivered: OutputQueue) -> None:
        """Send a request's further outputs, and those in `undelivered`, to another sink.

        The request may be submitted later. Raises `InvalidRequestError` if all was delivered.
        """
        with interrupts_deferred(), self._changed:
            outputs = list(iter(lambda: undelivered.take(request_id, 0.0), None))
            for output in outputs:
                sink.put(output)
            if request_id in self._live:
                self._live[request_id] = (self._live[request_id][0], sink)
            elif request_id not in self._ended_ids:
                self._expected[request_id] = sink
            elif not outputs:
                raise InvalidRequestError(
                    f"request_id={request_id!r} has ended and was delivered; register its handler "
                    "before it is added, or while it runs."
                )

    def is_live(self, request_id: str | None = None) -> bool:
        """Return True if a request can still deliver an output; with None, if any request can."""
        with interrupts_deferred(), self._changed:
            if not self.is_running():
                return False
            return bool(self._live) if request_id is None else request_id in self._live

    @property
    def is_alive(self) -> bool:
        return self.is_running() and self._fatal_error is None

    def require_alive(self) -> None:
        if self._fatal_error is not None:
            raise self._engine_dead_error()

    def _engine_dead_error(self) -> EngineDeadError:
        cause = self._fatal_error
        advice = "generating again, or start(), starts it over."
        if self._lockstep is not None:
            advice = "make a new generator on every process of the group."
        error = EngineDeadError(
            f"the engine stopped on {type(cause).__name__}: {str(cause).rstrip('.')}. Its requests "
            f"are lost; {advice}"
        )
        error.__cause__ = cause
        return error

    @contextmanager
    def paused(self, *, is_collective: bool = True) -> Iterator[None]:
        """Pause the engine between two forwards; see `PauseController.paused`.

        If `is_collective`, every process of a tensor-parallel group pauses after the same step.
        Else the group is delayed: the block must run no forward and change no weight.
        """
        if self.pauses.is_stepping_here or threading.current_thread() is self._thread:
            raise RolloutError(
                "a logits processor or a model's hook cannot pause the engine during its step."
            )
        lockstep = self._lockstep if is_collective else None
        with self.pauses.paused(lockstep.may_pause if lockstep else lambda: True):
            if lockstep and not self.pauses.is_nested:
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
        # Seconds, in which requests may be submitted.
        self.engine.capture_wanted()

    @contextmanager
    def stepping(self) -> Iterator[Callable[..., None] | None]:
        """Step on the calling thread instead of the background thread.

        A waiting caller steps faster on a CPU: libgomp's workers sleep instead of spinning once the
        pools of two computing threads share the cores.

        Yields `step_until(is_done, poll_seconds)`, which calls `is_done` at every change and every
        `poll_seconds`; None if another caller steps, whose steps serve this one too.
        """
        with self.pauses.stepping() as is_mine:
            yield self._step_until if is_mine else None

    def _step_until(self, is_done: Callable[[], bool], poll_seconds: float | None = None) -> None:
        with interrupts_deferred() as interrupts:
            while True:
                with self._changed:
                    if (action := self.begin_turn(is_done)) is NextAction.WAIT:
                        self._changed.wait(interrupts.limit(poll_seconds))
                if action is NextAction.END:
                    return
                if action is NextAction.STEP:
                    self.step()
                interrupts.deliver()

    def step(self) -> None:
        """Run the step that `begin_turn` began, and deliver its outputs."""
        try:
            started, num_prefills = time.perf_counter(), self.engine.counters.prefill_forwards
            touched = self.engine.step()
            is_prefill = self.engine.counters.prefill_forwards > num_prefills
            kind = PREFILL_STEP if is_prefill else DECODE_STEP
            self.durations.record_since(kind, started)
            if self._lockstep is not None:
                self._lockstep.record(touched)
            self._deliver(touched)
        except BaseException as error:  # noqa: BLE001  reraised in waiting threads
            self.fail(error)

    def begin_turn(self, is_done: Callable[[], bool] = lambda: False) -> NextAction:
        """End this thread's last step, and return what it does next; called under the condition."""
        self.pauses.end_step()
        if self._fatal_error is not None or is_done():
            return NextAction.END
        # The cancels of the leading process end the requests of the others.
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
        """Admit and cancel what was asked for; return whether a step follows."""
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
        ended = [self._live[request_id][0] for request_id in cancelled]
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
        """Do as the leading process up to the next step; return False where this one acts first."""
        assert self._lockstep is not None
        while self._live and (command := self._lockstep.take(self._live)) is not None:
            admitted = [self._live[request_id][0] for request_id, _ in command.admitted]
            for request in admitted:
                self._inbox.remove(request)
            self._take(admitted, [i for i in command.cancelled if i in self._live])
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
                _, sink = self._live[request.request_id]
                sink.put(output)
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
            sinks = {id(sink): sink for _, sink in self._live.values()}
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
