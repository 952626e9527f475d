"""Keeps a signal's handler from raising amid work that must not be left half done.

Steps the engine while there is work: on a background thread, or on that of a waiting caller.

Owns the thread, the inbox and death. The engine is touched by one thread at a time: the background
one, a caller in `stepping()`, or one inside `paused()`. The background thread is a daemon, and
whoever makes a loop halts it when done.
"""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from cb_rollout.config.enums import InFlight
from cb_rollout.engine.core import Engine
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.output_queue import OutputQueue, OutputSink
from cb_rollout.engine.service.pause_controller import PauseController
from cb_rollout.errors import EngineDeadError, InvalidRequestError, QueueFullError, RolloutError
from cb_rollout.metrics.observers import Observers
from cb_rollout.types import CancelResult

DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
# Ctrl-C, a cluster's notice, and those that people give handlers of their own.


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Run Python's signal handlers after the block instead of inside it.

    Of the main thread only, which is where Python runs them. A signal that comes a second time is
    not deferred: a block that hangs can still be interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in DEFERRED}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    caught: dict[int, FrameType | None] = {}

    def defer(number: int, frame: FrameType | None) -> None:
        if number in caught:
            handlers[signal.Signals(number)](number, frame)
        caught[number] = frame

    for number in handlers:
        signal.signal(number, defer)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in caught.items():
        handlers[signal.Signals(number)](number, frame)


HALT_TIMEOUT_SECONDS = 10.0
# Longer than a step should take; past it the process ends without the thread.

NUM_ENDED_IDS_KEPT = 10_000
# So that a late cancel can tell an ended request from one that never was.


# Steps until its first argument says that it is done; see `EngineLoop.stepping`.
StepUntil = Callable[..., None]


class EngineLoop:
    """Steps one engine; thread-safe."""

    def __init__(self, engine: Engine, *, max_queue_size: int, return_logprobs: bool) -> None:
        """Stand ready; nothing runs before `start()`."""
        self.engine = engine
        self._max_queue_size = max_queue_size
        self._return_logprobs = return_logprobs
        self._changed = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._live: dict[str, tuple[Request, OutputSink]] = {}
        self._expected: dict[str, OutputSink] = {}
        self._cancelled: dict[str, None] = {}
        self._ended_ids: deque[str] = deque(maxlen=NUM_ENDED_IDS_KEPT)
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._is_draining = False
        self._is_ending = False
        self.pause_controller = PauseController(self._changed, self._could_step)
        self._death: BaseException | None = None
        self.observers = Observers()

    def start(self) -> None:
        """Start the thread, or call off its stop; after a death, start over with nothing queued."""
        ending = self._thread if self._is_ending else None
        if ending is not None and ending is not threading.current_thread():
            ending.join()
        with self._changed:
            self._is_stopping = False
            if self.is_running() and not self._is_ending:
                return
            self._death, self._is_ending = None, False
            self._thread = threading.Thread(target=self._run, name="cb_rollout", daemon=True)
            self._thread.start()

    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, drain: bool) -> None:
        """Ask the thread to end, after what is in flight (`drain`) or cancelling it."""
        with self._changed:
            self._is_stopping, self._is_draining = True, drain
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end, at most `timeout` seconds."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def halt(self) -> None:
        """End the thread now: within a step, cancelling what is in flight."""
        self.stop(drain=False)
        self.join(HALT_TIMEOUT_SECONDS)

    def submit(self, requests: Sequence[Request], sink: OutputSink) -> None:
        """Queue requests, all or none, the members of a group as neighbours.

        Raises:
            EngineDeadError: the engine stopped on an exception.
            RolloutError: the loop was stopped.
            QueueFullError: more would wait than may.
            InvalidRequestError: an id is in use.
        """
        with self._changed:
            self.require_alive()
            if self._is_stopping:
                raise RolloutError("the manager was stopped; start() it before adding requests.")
            num_waiting = len(self._inbox) + self.engine.num_waiting
            if 0 < self._max_queue_size < len(requests):
                raise QueueFullError(
                    f"{len(requests)} requests at once are more than max_queue_size="
                    f"{self._max_queue_size} ever takes; raise it, or send fewer."
                )
            if self._max_queue_size and num_waiting + len(requests) > self._max_queue_size:
                raise QueueFullError(
                    f"{num_waiting} requests wait and {len(requests)} more would pass "
                    f"max_queue_size={self._max_queue_size}; take results first, or raise it."
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
                expected = self._expected.pop(request.request_id, sink)
                self._live[request.request_id] = (request, expected)
            self.observers.submitted(requests)
            self._inbox.extend(sorted(requests, key=lambda request: arrival[request.group]))
            self._changed.notify_all()

    def cancel(self, request_ids: Sequence[str]) -> list[CancelResult]:
        """End requests early; each live one delivers what it has."""
        with self._changed:
            found = [self._state_of(request_id) for request_id in request_ids]
            self._cancelled |= dict.fromkeys(i for i in request_ids if i in self._live)
            self._changed.notify_all()
        return found

    def _state_of(self, request_id: str) -> CancelResult:
        if request_id in self._live:
            return CancelResult.LIVE
        return CancelResult.FINISHED if request_id in self._ended_ids else CancelResult.UNKNOWN

    def redirect(self, request_id: str, sink: OutputSink, undelivered: OutputQueue) -> None:
        """Send a request's further outputs, and those that wait in `undelivered`, elsewhere.

        A request that is not known yet is expected: its outputs will go there.

        Raises:
            InvalidRequestError: it ended, and all of it was delivered.
        """
        with self._changed:
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
        """Whether a request, or any where None, could still deliver: it has not ended."""
        with self._changed:
            if not self.is_running():
                return False
            return bool(self._live) if request_id is None else request_id in self._live

    @property
    def is_dead(self) -> bool:
        """Whether the engine stopped on an exception, and was not started since."""
        return self._death is not None

    def require_alive(self) -> None:
        """Raise what the engine died of, if it did."""
        if self._death is not None:
            raise self._dead_error()

    def _dead_error(self) -> EngineDeadError:
        cause = self._death
        error = EngineDeadError(
            f"the engine stopped on {type(cause).__name__}: {cause}. Its requests are lost; "
            "generating again, or start(), starts it over."
        )
        error.__cause__ = cause
        return error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the engine still between two forwards; see `PauseController`."""
        if self.pause_controller.is_stepping_here or threading.current_thread() is self._thread:
            raise RolloutError("what runs inside a step cannot pause the engine that runs it.")
        with self.pause_controller.paused():
            self.engine.hand_back_model()
            yield

    def begin_policy_version(self, in_flight: InFlight) -> None:
        """The weights changed, in the pause that this is called in."""
        with self._changed:
            if in_flight is InFlight.ABORT:
                self._cancelled |= dict.fromkeys(self._live)
            version = self.engine.policy_version + 1
            self.engine.begin_policy_version(version, keep_keys=in_flight is InFlight.KEEP)

    @contextmanager
    def stepping(self) -> Iterator["StepUntil | None"]:
        """Step on the calling thread, in the background one's place.

        A caller that waits anyway does the work better: on a CPU every thread that computes has a
        pool of workers, and libgomp's, once two pools share the cores, sleep instead of spinning.

        Gives a function that steps until its argument says that it is done, asked at every change
        and every `look_seconds`; None where another caller drives, whose steps serve this one too.
        """
        with self.pause_controller.stepping() as is_mine:
            yield self._step_until if is_mine else None

    def _could_step(self) -> bool:
        return self.is_running() and not self._is_ending

    def _run(self) -> None:
        self._step_until(lambda: False)

    def _step_until(self, is_done: Callable[[], bool], look_seconds: float | None = None) -> None:
        while self._await_work(is_done, look_seconds):
            with interrupts_deferred():
                try:
                    self._deliver(self._step())
                except BaseException as error:  # noqa: BLE001  the waiters must hear it
                    self._die(error)

    def _step(self) -> list[Request]:
        if not self.observers:
            return self.engine.step()
        started, num_prefills = time.perf_counter(), self.engine.counters.prefill_forwards
        touched = self.engine.step()
        is_prefill = self.engine.counters.prefill_forwards > num_prefills
        self.observers.stepped(time.perf_counter() - started, is_prefill)
        return touched

    def _await_work(self, is_done: Callable[[], bool], look_seconds: float | None) -> bool:
        """Wait until this thread has a step to run; False when it is done, or the loop is."""
        with self._changed:
            self.pause_controller.end_step()
            while self._death is None and not is_done():
                is_halting = self._is_stopping and not self._is_draining
                if self.pause_controller.is_my_turn and (
                    is_halting or not self.pause_controller.is_shut
                ):
                    self._take_inbox()
                    if self.engine.has_work and not is_halting:
                        self.pause_controller.begin_step()
                        return True
                    if self._is_stopping:
                        if threading.current_thread() is self._thread:
                            self._is_ending = True
                            self._changed.notify_all()
                        return False
                    self.pause_controller.pass_turn()
                    if is_done():
                        return False
                self._changed.wait(look_seconds)
            return False

    def _take_inbox(self) -> None:
        while self._inbox:
            self.engine.add(self._inbox.popleft())
        if self._is_stopping and not self._is_draining:
            self._cancelled = dict.fromkeys(self._live)
        ended = []
        for request_id in self._cancelled:
            if request_id in self._live:
                request, _ = self._live[request_id]
                self.engine.cancel(request)
                ended.append(request)
        self._cancelled = {}
        if ended and not self.engine.has_work:
            self.engine.hand_back_model()
        self._deliver(ended)

    def _deliver(self, touched: list[Request]) -> None:
        for request in touched:
            is_final = request.status.is_final
            if not is_final and not request.is_streaming:
                continue
            if is_final:
                self.observers.ended(request)
            output = request.output(self._return_logprobs)
            with self._changed:
                _, sink = self._live[request.request_id]
                sink.put(output)
                if is_final:
                    del self._live[request.request_id]
                    self._ended_ids.append(request.request_id)
                    if not self._live:
                        self._changed.notify_all()

    def _die(self, error: BaseException) -> None:
        with self._changed:
            self._death = error
            dead_error = self._dead_error()
            sinks = {id(sink): sink for _, sink in self._live.values()}
            self._live.clear()
            self._expected.clear()
            self._inbox.clear()
            self._cancelled = {}
            self._is_ending = True
            # A device that failed may fail this as well, and nobody is to wait for it.
            with suppress(Exception):
                self.engine.abandon()
            self._changed.notify_all()
        for sink in sinks.values():
            sink.close(dead_error)
