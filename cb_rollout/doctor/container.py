"""The memory limit of the container that this process runs in, which the system does not report.

Reads the kernel's files of control groups, of either version. No limit is infinity.
"""

import math
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

UNLIMITED_BYTES = 1 << 60
# Version 1 writes "no limit" as a huge number, rounded to pages.


class ContainerMemory(NamedTuple):
    """A limit and what is used of it, in bytes."""

    limit_bytes: float
    used_bytes: int

    @property
    def left_bytes(self) -> float:
        """What may still be taken."""
        return max(0.0, self.limit_bytes - self.used_bytes)


def container_memory(root: Path = ROOT, membership: Path = MEMBERSHIP) -> ContainerMemory:
    """The tightest limit on this process: of its control group, or of one around it.

    Args:
        root: where control groups are mounted.
        membership: the file that says which group this process is in.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return ContainerMemory(math.inf, 0)
    tightest = ContainerMemory(math.inf, 0)
    for _, controllers, group in lines:
        if controllers == "":
            found = _walk(root, group, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found = _walk(root / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        tightest = min(tightest, found, key=lambda memory: memory.left_bytes)
    return tightest


def _walk(mount: Path, group: str, limit_name: str, used_name: str) -> ContainerMemory:
    """From the process's group up to the mount; inside a container the group is often the mount."""
    inner = mount / group.lstrip("/")
    groups = [inner, *inner.parents]
    found = [_read(g / limit_name, g / used_name) for g in groups if g.is_relative_to(mount)]
    return min(found, key=lambda memory: memory.left_bytes)


def _read(limit: Path, used: Path) -> ContainerMemory:
    try:
        limit_bytes, used_bytes = int(limit.read_text()), int(used.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return ContainerMemory(math.inf, 0)
    if limit_bytes >= UNLIMITED_BYTES:
        return ContainerMemory(math.inf, 0)
    return ContainerMemory(limit_bytes, used_bytes)
