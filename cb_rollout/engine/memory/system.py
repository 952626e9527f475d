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
    """Memory of a device that is available to this process, in bytes."""

    total_bytes: int
    free_bytes: int


NO_LIMIT = DeviceMemory(UNLIMITED_BYTES, UNLIMITED_BYTES)

_FREE = operator.attrgetter("free_bytes")

# The last measurements, by number of sharers.
_newest: dict[int, DeviceMemory] = {}


def system_memory(num_sharers: int = 1) -> DeviceMemory:
    """Return the memory limit that leaves the fewest free bytes.

    Free memory of the system and the container is divided by `num_sharers`; a process limit is not.
    If the process can open no more files, the last measurement is returned.
    """
    try:
        _newest[num_sharers] = _measured(num_sharers)
    except OSError as error:
        if error.errno not in OUT_OF_FILES or num_sharers not in _newest:
            raise
    return _newest[num_sharers]


def _measured(num_sharers: int) -> DeviceMemory:
    system = psutil.virtual_memory()
    limits: list[DeviceMemory] = []
    for shared in (DeviceMemory(system.total, system.available), container_memory()):
        share = DeviceMemory(shared.total_bytes, shared.free_bytes // num_sharers)
        limits.append(share)
    limits += process_limits()
    return min(limits, key=_FREE)


def process_limits() -> Iterator[DeviceMemory]:
    """Yield the limits that `ulimit -v` and `ulimit -d` set for this process."""
    if sys.platform != "linux":
        return
    used = psutil.Process().memory_info()
    used_of_limits = {resource.RLIMIT_AS: used.vms, resource.RLIMIT_DATA: used.data}
    for kind, used_bytes in used_of_limits.items():
        limit_bytes, _ = resource.getrlimit(kind)
        if limit_bytes != resource.RLIM_INFINITY:
            yield DeviceMemory(limit_bytes, max(0, limit_bytes - used_bytes))


def container_memory(root: Path = ROOT, membership: Path = MEMBERSHIP) -> DeviceMemory:
    """Return the tightest limit of this process's control group and the groups around it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise
        return NO_LIMIT
    tightest = NO_LIMIT
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            limit = _tightest(root, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            limit = _tightest(
                root / "memory",
                group,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        tightest = min(tightest, limit, key=_FREE)
    return tightest


def _tightest(mount: Path, group: str, limit: str, used: str, reclaimable: str) -> DeviceMemory:
    """Return the tightest limit of a control group and of those around it.

    Args:
        mount: folder of the outermost group.
        group: path of the process's group below it.
        limit: name of the file with a group's limit.
        used: name of the file with its usage.
        reclaimable: name of the statistic that counts memory which the kernel can take back.
    """
    limits: list[DeviceMemory] = []
    # Inside a container the process's group is often the mount itself.
    innermost = mount / group.lstrip("/")
    for folder in (innermost, *innermost.parents):
        if not folder.is_relative_to(mount):
            break
        of_group = _read(folder / limit, folder / used, folder / "memory.stat", reclaimable)
        limits.append(of_group)
    return min(limits, key=_FREE)


def _read(limit: Path, used: Path, statistics: Path, reclaimable: str) -> DeviceMemory:
    try:
        limit_bytes = int(limit.read_text())
        used_bytes = int(used.read_text())
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
            raise
        # There is no such file, or it says "max".
        return NO_LIMIT
    if limit_bytes >= UNLIMITED_BYTES:
        return NO_LIMIT
    try:
        # Such as the file cache, which the kernel drops when asked.
        values: dict[str, str] = {}
        for line in statistics.read_text().splitlines():
            name, value = line.split()
            values[name] = value
        used_bytes -= int(values.get(reclaimable, 0))
    except (OSError, ValueError):
        pass
    used_bytes = max(0, used_bytes)
    return DeviceMemory(limit_bytes, max(0, limit_bytes - used_bytes))
