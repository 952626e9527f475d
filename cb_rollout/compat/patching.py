"""Replace attributes of upstream objects temporarily. Any thread may call."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replacing(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes given as (object, name, value); at the end, restore or delete each."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in attributes:
            before.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class CountedPatch:
    """An attribute that is replaced while any thread is inside `installed()`."""

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self._owner = owner
        self._name = name
        self._replacement = replacement
        self._lock = threading.Lock()
        self._num_inside = 0
        self._threads = threading.local()
        self.own: Any = None
        """The owner's value; it is kept for a thread that reads it while the last thread leaves."""

    @property
    def of_thread(self) -> Any:
        """Return the value that this thread passed to `installed`; None without a value."""
        return getattr(self._threads, "given", None)

    @contextmanager
    def installed(self, given: Any = None) -> Iterator[None]:
        """Replace the attribute; restore it when the last thread leaves.

        `given`: a value for the replacement to read in this thread; None: keep the current value.
        """
        with self._lock:
            if not self._num_inside:
                self.own = getattr(self._owner, self._name)
                setattr(self._owner, self._name, self._replacement)
            self._num_inside += 1
        before = self.of_thread
        self._threads.given = before if given is None else given
        try:
            yield
        finally:
            self._threads.given = before
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    setattr(self._owner, self._name, self.own)
