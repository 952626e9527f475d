"""Sequences that wait for blocks and a slot, first come first.

One that ended while it waited stays where it is and is passed over, so that ending it costs the
same however many wait.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from cb_rollout.engine.request import Request


class WaitingQueue:
    """A queue whose length counts the unfinished."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        """Start with `requests`."""
        self._requests = deque(requests)
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._requests) - self._num_ended

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._requests if not request.status.is_final)

    @property
    def head(self) -> Request | None:
        """Who is next; None: nobody waits."""
        while self._requests and self._requests[0].status.is_final:
            self._requests.popleft()
            self._num_ended -= 1
        return self._requests[0] if self._requests else None

    def append(self, request: Request) -> None:
        """Queue a newcomer."""
        self._requests.append(request)

    def appendleft(self, request: Request) -> None:
        """Let one that ran before be next."""
        self._requests.appendleft(request)

    def take(self) -> Request:
        """Remove and return the head, which must exist."""
        head = self.head
        assert head is not None
        return self._requests.popleft()

    def note_ended(self) -> None:
        """One of the queue was ended."""
        self._num_ended += 1
