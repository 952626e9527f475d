"""Deliver outputs from the thread that steps the engine to the threads that wait for them.

Owns outputs from delivery until they are taken, each exactly once. Every wait ends in an output, a
timeout, or the error that stopped the engine. Any thread may call it.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from cb_rollout.engine.service.interrupts import interrupts_deferred
from cb_rollout.errors import EngineDeadError
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus


class OutputSink(Protocol):
    """Receiver of outputs, and of the error that ends them, on the engine's thread."""

    def put(self, output: GenerationOutput) -> None: ...

    def close(self, error: EngineDeadError) -> None: ...


class OutputQueue:
    """Hold outputs by request id until a thread takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_delivered = 0
        self._outputs: dict[int, GenerationOutput] = {}
        self._numbers: dict[str, deque[int]] = {}
        self._error: EngineDeadError | None = None

    def put(self, output: GenerationOutput) -> None:
        with interrupts_deferred(), self._changed:
            self._outputs[self._num_delivered] = output
            self._numbers.setdefault(output.request_id, deque()).append(self._num_delivered)
            self._num_delivered += 1
            self._changed.notify_all()

    @property
    def can_take(self) -> bool:
        """Return whether `take()` would return or raise without waiting."""
        with interrupts_deferred(), self._changed:
            return bool(self._outputs) or self._error is not None

    def untaken(self) -> list[GenerationOutput]:
        """Return the outputs that nobody took, first delivered first."""
        with interrupts_deferred(), self._changed:
            return list(self._outputs.values())

    def close(self, error: EngineDeadError) -> None:
        """Raise `error` in every present and later `take()` that finds no output."""
        with interrupts_deferred(), self._changed:
            self._error = error
            self._changed.notify_all()

    def reopen(self) -> None:
        """Let `take()` wait for outputs again after `close()`."""
        with interrupts_deferred(), self._changed:
            self._error = None

    def wait(self) -> None:
        """Wait until `take()` would return or raise without waiting."""
        with interrupts_deferred() as interrupts:
            while not self.can_take:
                with self._changed:
                    if not self._outputs and self._error is None:
                        self._changed.wait(interrupts.limit(None))
                interrupts.deliver()

    def take(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Take the next output, of one request or of any; None after `timeout` seconds.

        Raises the error of `close()` if the queue holds no such output.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with interrupts_deferred() as interrupts:
            while True:
                with self._changed:
                    if (output := self._pop(request_id)) is not None:
                        return output
                    if self._error is not None:
                        raise self._error
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if remaining is not None and remaining <= 0:
                        return None
                    self._changed.wait(interrupts.limit(remaining))
                interrupts.deliver()

    def _pop(self, request_id: str | None) -> GenerationOutput | None:
        numbers = self._outputs if request_id is None else self._numbers.get(request_id, ())
        number = next(iter(numbers), None)
        if number is None:
            return None
        output = self._outputs.pop(number)
        numbers = self._numbers[output.request_id]
        numbers.popleft()
        if not numbers:
            del self._numbers[output.request_id]
        return output


@dataclass(frozen=True, slots=True)
class CallbackSink:
    """Pass a request's outputs to a callback on an asyncio loop, from any thread."""

    request_id: str
    callback: Callable[[GenerationOutput], None]
    loop: asyncio.AbstractEventLoop

    def put(self, output: GenerationOutput) -> None:
        # The asyncio loop may be closed already, and its callbacks with it.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.callback, output)

    def close(self, error: EngineDeadError) -> None:
        """Schedule the callback with a failed output that carries `error`."""
        self.put(
            GenerationOutput(
                request_id=self.request_id,
                status=RequestStatus.FAILED,
                finish_reason=FinishReason.ERROR,
                error=str(error),
            )
        )
