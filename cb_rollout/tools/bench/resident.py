"""The most memory that this process holds for a while, by looking often.

The kernel keeps a peak too, but the engine begins that one anew, to see what training takes.
"""

import threading
from typing import Self

import psutil

SAMPLE_SECONDS = 0.02
# A look takes microseconds; a decode step takes about this long.


class ResidentPeak:
    """Looks from its entering to its leaving."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._process = psutil.Process()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resident peak", daemon=True)

    def look(self) -> None:
        """Note what is held now."""
        self.num_bytes = max(self.num_bytes, self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.look()

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.look()
