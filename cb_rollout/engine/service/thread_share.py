"""Choose how many of torch's threads compute while other processes use the cores.

torch divides each operation over its threads, and waits for the last of them. A thread without a
core to itself makes the others wait for its turn, so an operation takes several times as long as on
fewer threads. Called by the thread that computes; it writes torch's number of threads.
"""

import math
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import torch

# The load is averaged over at least these seconds. The kernel counts in hundredths of a second.
WINDOW_SECONDS = 0.2

# The fields of a core in /proc/stat: user, nice, system, idle, iowait, irq, softirq and steal.
NUM_FIELDS = 8
IDLE_FIELDS = (3, 4)


class Clocks(NamedTuple):
    """Readings of three clocks, in seconds."""

    now: float
    """Wall-clock time."""
    used: float
    """CPU time of all processes on the cores that this process may use."""
    used_here: float
    """CPU time of this process's threads."""


class ThreadShare:
    """Gives torch fewer threads while other processes use the cores, and all of them otherwise.

    One thread uses it at a time, and restores the number before another one may use it.
    """

    def __init__(self, read: Callable[[], Clocks | None] | None = None) -> None:
        """Change nothing yet.

        Args:
            read: returns the clocks, or None if this machine does not show them; None: `clocks`.
        """
        self._read = read or clocks
        self._last: Clocks | None = None
        self._all_threads: int | None = None
        """torch's number of threads before it was lowered; None: it is not lowered."""

    def adjust(self) -> None:
        """Set torch's number of threads from the load since the last reading of the clocks."""
        if not self._may_adjust():
            return
        last = self._last
        if last is not None and time.perf_counter() - last.now < WINDOW_SECONDS:
            return
        current = self._read()
        self._last = current
        if last is None or current is None:
            return
        used = current.used - last.used
        used_here = current.used_here - last.used_here
        cores_of_others = (used - used_here) / (current.now - last.now)
        num_idle_cores = len(usable_cores()) - cores_of_others
        self._set(math.floor(num_idle_cores + 0.5))

    def _may_adjust(self) -> bool:
        # The last bits of a sum depend on the number of threads.
        if torch.are_deterministic_algorithms_enabled():
            return False
        return self._all_threads is not None or torch.get_num_threads() > 1

    def _set(self, num_idle_cores: int) -> None:
        """Use as many threads as cores are idle, at least one, and no more than before."""
        num_threads = torch.get_num_threads()
        all_threads = self._all_threads or num_threads
        wanted = max(1, min(all_threads, num_idle_cores))
        if wanted != num_threads:
            torch.set_num_threads(wanted)
        self._all_threads = all_threads if wanted < all_threads else None

    def restore(self) -> None:
        """Restore torch's number of threads."""
        if self._all_threads is not None:
            torch.set_num_threads(self._all_threads)
            self._all_threads = None


def usable_cores() -> Collection[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def clocks() -> Clocks | None:
    """Read this machine's clocks; None: it has no /proc/stat, which only Linux has."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    cores = {f"cpu{core}" for core in usable_cores()}
    num_ticks = 0
    for line in lines:
        name, *numbers = line.split()
        if name in cores:
            fields = [int(number) for number in numbers[:NUM_FIELDS]]
            num_ticks += sum(fields) - sum(fields[index] for index in IDLE_FIELDS)
    if not num_ticks:
        # A sandbox may have the file but count nothing.
        return None
    used = num_ticks / os.sysconf("SC_CLK_TCK")
    return Clocks(now=time.perf_counter(), used=used, used_here=time.process_time())
