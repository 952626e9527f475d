"""Measure the memory of the system, its control groups (either version) and process limits."""

import errno
import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

if sys.platform != "win32":
    import resource

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

# No limit; version 1 writes it as a huge number, rounded to pages.
UNLIMITED_BYTES = 1 << 60

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)


class DeviceMemory(NamedTuple):
    """Memory that a device has for this process, in bytes."""

    total_bytes: int
    free_bytes: int


NO_LIMIT = DeviceMemory(UNLIMITED_BYTES, UNLIMITED_BYTES)

_FREE = operator.attrgetter("free_bytes")

# By number of sharers.
_newest: dict[int, DeviceMemory] = {}


def system_memory(num_sharers: int = 1) -> DeviceMemory:
    """Return the tightest limit; of shared memory, one of `num_sharers` equal shares is left.

    The last measurement, while the process can open no file to measure anew.
    """
    try:
        _newest[num_sharers] = _measured(num_sharers)
    except OSError as error:
        if error.errno not in OUT_OF_FILES or num_sharers not in _newest:
            raise
    return _newest[num_sharers]


def _measured(num_sharers: int) -> DeviceMemory:
    system = psutil.virtual_memory()
    shared = [DeviceMemory(system.total, system.available), container_memory()]
    shares = [DeviceMemory(total, free // num_sharers) for total, free in shared]
    return min(*shares, *process_limits(), key=_FREE)


def process_limits() -> Iterator[DeviceMemory]:
    """Yield the limits that `ulimit -v` and `ulimit -d` set for this process."""
    if sys.platform != "linux":
        return
    used = psutil.Process().memory_info()
    for kind, used_bytes in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, used.data)):
        limit_bytes, _ = resource.getrlimit(kind)
        if limit_bytes != resource.RLIM_INFINITY:
            yield DeviceMemory(limit_bytes, max(0, limit_bytes - used_bytes))


def container_memory(root: Path = ROOT, membership: Path = MEMBERSHIP) -> DeviceMemory:
    """Return the tightest limit of this process's control group and the groups around it."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise
        return NO_LIMIT
    tightest = NO_LIMIT
    for _, controllers, group in lines:
        if controllers == "":
            limit = _tightest(root, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limit = _tightest(root / "memory", group, *names)
        else:
            continue
        tightest = min(tightest, limit, key=_FREE)
    return tightest


def _tightest(mount: Path, group: str, limit: str, used: str, reclaimable: str) -> DeviceMemory:
    # Inside a container the process's group is often the mount itself.
    inner = mount / group.lstrip("/")
    groups = [g for g in (inner, *inner.parents) if g.is_relative_to(mount)]
    limits = [_read(g / limit, g / used, g / "memory.stat", reclaimable) for g in groups]
    return min(limits, key=_FREE)


def _read(limit: Path, used: Path, statistics: Path, reclaimable: str) -> DeviceMemory:
    try:
        limit_bytes, used_bytes = int(limit.read_text()), int(used.read_text())
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
            raise
        # There is no such file, or it says "max".
        return NO_LIMIT
    if limit_bytes >= UNLIMITED_BYTES:
        return NO_LIMIT
    try:
        # Such as the file cache, which the kernel drops when asked.
        lines = dict(line.split() for line in statistics.read_text().splitlines())
        used_bytes -= int(lines.get(reclaimable, 0))
    except (OSError, ValueError):
        pass
    return DeviceMemory(limit_bytes, max(0, limit_bytes - max(0, used_bytes)))
