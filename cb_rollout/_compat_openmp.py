"""Reaches past torch's public API for the threads that it computes with on a CPU.

torch's wheels for Linux bring libgomp, which keeps a pool of workers for every thread that ever
computed. As soon as all pools together have more threads than the process has cores, each of them
sleeps at every barrier instead of spinning, which small models pay for most.
"""

import ctypes
from functools import cache
from pathlib import Path

SOFT = 1
# OpenMP 5.0's omp_pause_soft: keeps settings, and ends threads.


def release_workers() -> bool:
    """End the calling thread's workers, which are made anew when it computes next.

    Returns:
        Whether it was done: not where torch computes without libgomp.
    """
    libgomp = _libgomp()
    return libgomp is not None and libgomp.omp_pause_resource_all(SOFT) == 0


@cache
def _libgomp() -> ctypes.CDLL | None:
    """The one that torch loaded (2.11 to 2.13), from libgomp 10 on."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    found = [path for path in paths if "/libgomp" in path]
    # Of two, which one torch computes with is not known.
    if len(found) != 1:
        return None
    library = ctypes.CDLL(found[0])
    return library if hasattr(library, "omp_pause_resource_all") else None
