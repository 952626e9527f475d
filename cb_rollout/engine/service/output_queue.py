"""Where finished sequences wait for whoever asked for them.

Owns outputs between the thread that produces them and the threads that take them. Each output is
taken exactly once. Every wait ends in an output, a timeout, or the error that stopped production.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from cb_rollout.errors import EngineDeadError
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus


class OutputSink(Protocol):
    """Who gets a request's outputs."""

    def put(self, output: GenerationOutput) -> None:
        """Take an output; called on the thread that steps."""
        ...

    def close(self, error: EngineDeadError) -> None:
        """Learn that nothing more will come."""
        ...


class OutputQueue:
    """Outputs by request id; any number of threads may take from it."""

    def __init__(self) -> None:
        """Start empty and open."""
        self._changed = threading.Condition()
        self._num_delivered = 0
        self._outputs: dict[int, GenerationOutput] = {}
        self._numbers: dict[str, deque[int]] = {}
        self._error: EngineDeadError | None = None

    def put(self, output: GenerationOutput) -> None:
        """Deliver an output."""
        with self._changed:
            self._outputs[self._num_delivered] = output
            self._numbers.setdefault(output.request_id, deque()).append(self._num_delivered)
            self._num_delivered += 1
            self._changed.notify_all()

    @property
    def has_news(self) -> bool:
        """Whether taking any output would not wait."""
        with self._changed:
            return bool(self._outputs) or self._error is not None

    def close(self, error: EngineDeadError) -> None:
        """Nothing more will come: whoever waits for what is not here gets `error`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def reopen(self) -> None:
        """More may come again."""
        with self._changed:
            self._error = None

    def take(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Take the next output, of one request or of any.

        Args:
            request_id: whose; None: any, first delivered first.
            timeout: seconds; None: no limit.

        Returns:
            The output, or None when the time is over.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while (output := self._pop(request_id)) is None:
                if self._error is not None:
                    raise self._error
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return None
                self._changed.wait(remaining)
            return output

    def _pop(self, request_id: str | None) -> GenerationOutput | None:
        if request_id is None:
            number = next(iter(self._outputs), None)
        else:
            number = next(iter(self._numbers.get(request_id, ())), None)
        if number is None:
            return None
        output = self._outputs.pop(number)
        numbers = self._numbers[output.request_id]
        numbers.popleft()
        if not numbers:
            del self._numbers[output.request_id]
        return output


class CallbackSink:
    """Gives one request's outputs to a callback on an asyncio loop."""

    def __init__(
        self,
        request_id: str,
        callback: Callable[[GenerationOutput], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Call `callback` on `loop`, from whatever thread."""
        self._request_id, self._callback, self._loop = request_id, callback, loop

    def put(self, output: GenerationOutput) -> None:
        """Deliver an output."""
        # A closed loop has nobody left to tell.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._callback, output)

    def close(self, error: EngineDeadError) -> None:
        """Nothing more will come: the request failed."""
        self.put(
            GenerationOutput(
                request_id=self._request_id,
                status=RequestStatus.FAILED,
                finish_reason=FinishReason.ERROR,
                error=str(error),
            )
        )
