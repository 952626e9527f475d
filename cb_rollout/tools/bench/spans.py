"""Where the time of a call goes, by wrapping functions for as long as one looks.

Owns no knowledge of the engine: which functions are wrapped is said by who asks. Time is exclusive:
what a wrapped function spends in another one counts for that one only.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

Path = tuple[str, ...]
# Names of the wrapped functions that were running, outermost first.


class Seam(NamedTuple):
    """A function to be wrapped."""

    name: str
    owner: Any
    """A class or a module."""
    function: str


@dataclass
class Spans:
    """What was spent where."""

    synchronize: Callable[[], None]
    """Waits for the device, so that its work counts where it was started."""
    seconds: dict[Path, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[Path, int] = field(default_factory=lambda: defaultdict(int))
    _path: Path = ()
    _entered: float = 0.0

    def clear(self) -> None:
        """Forget what was spent."""
        self.seconds.clear()
        self.calls.clear()

    def within(self, *names: str) -> float:
        """Seconds spent in any of these, and in what they called."""
        return sum(s for path, s in self.seconds.items() if any(name in path for name in names))

    def _switch(self, path: Path) -> None:
        self.synchronize()
        now = time.perf_counter()
        if self._path:
            self.seconds[self._path] += now - self._entered
        self._path, self._entered = path, now

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            outer = self._path
            self._switch((*outer, name))
            self.calls[self._path] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(outer)

        return run


@contextmanager
def watched(
    seams: Sequence[Seam], synchronize: Callable[[], None] = lambda: None
) -> Iterator[Spans]:
    """Watch these functions; one thread at a time may call them."""
    spans = Spans(synchronize)
    found = [(seam, getattr(seam.owner, seam.function)) for seam in seams]
    for seam, function in found:
        setattr(seam.owner, seam.function, spans._wrapped(seam.name, function))
    try:
        yield spans
    finally:
        for seam, function in found:
            setattr(seam.owner, seam.function, function)
