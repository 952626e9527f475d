"""Replace attributes of upstream's objects for a while, and restore them. Any thread may call."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replacing(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set (object, name, value) of objects; at the end restore them, or delete the new ones."""
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
        self._owner, self._name, self._replacement = owner, name, replacement
        self._lock, self._num_inside = threading.Lock(), 0
        self._threads = threading.local()
        self.own: Any = None
        """The owner's value, kept for a thread that reads it when the last one leaves."""

    @property
    def of_thread(self) -> Any:
        """Return what this thread gave to `installed`; None: nothing."""
        return getattr(self._threads, "given", None)

    @contextmanager
    def installed(self, given: Any = None) -> Iterator[None]:
        """Replace the attribute; the last thread to leave restores it.

        `given`: for the replacement, in this thread; None: what it has.
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
