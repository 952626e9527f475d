import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cb_rollout.engine.memory import system as system_limits
from cb_rollout.engine.memory.plan import GIB
from cb_rollout.engine.memory.system import NO_LIMIT, DeviceMemory, container_memory, system_memory


def container(tmp_path, membership, **files):
    for path, text in files.items():
        file = tmp_path / "cgroup" / path.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    (tmp_path / "membership").write_text(membership)
    return container_memory(tmp_path / "cgroup", tmp_path / "membership")


def test_a_containers_memory_is_its_tightest_limit(tmp_path):
    found = container(
        tmp_path,
        "0::/pod/box\n",
        pod__memory_dot_max=8 * GIB,
        pod__memory_dot_current=5 * GIB,
        pod__box__memory_dot_max=4 * GIB,
        pod__box__memory_dot_current=GIB,
    )
    assert found == (4 * GIB, 3 * GIB)


def test_control_groups_of_version_1_are_read(tmp_path):
    found = container(
        tmp_path,
        "9:name=systemd:/\n4:cpuset,memory:/box\n0::/\n",
        memory__memory_dot_limit_in_bytes=9223372036854771712,
        memory__memory_dot_usage_in_bytes=7,
        memory__box__memory_dot_limit_in_bytes=2 * GIB,
        memory__box__memory_dot_usage_in_bytes=3 * GIB,
    )
    assert found.free_bytes == 0


def test_the_file_cache_counts_as_free(tmp_path):
    found = container(
        tmp_path,
        "0::/box\n",
        box__memory_dot_max=4 * GIB,
        box__memory_dot_current=3 * GIB,
        box__memory_dot_stat=f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 5",
    )
    assert found == (4 * GIB, 3 * GIB)
    found = container(
        tmp_path,
        "4:memory:/box\n",
        memory__box__memory_dot_limit_in_bytes=2 * GIB,
        memory__box__memory_dot_usage_in_bytes=2 * GIB,
        memory__box__memory_dot_stat=f"inactive_file 1\ntotal_inactive_file {GIB}",
    )
    assert found.free_bytes == GIB


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "garbage"])
def test_no_limit_is_infinite(tmp_path, limit):
    found = container(tmp_path, "0::/\n", memory_dot_max=limit, memory_dot_current=5)
    assert found == container_memory(tmp_path, tmp_path / "missing") == NO_LIMIT


def given_memory(monkeypatch, *, total, available, container=None, limits=()):
    system = SimpleNamespace(total=total, available=available)
    monkeypatch.setattr(system_limits.psutil, "virtual_memory", lambda: system)
    monkeypatch.setattr(system_limits, "container_memory", lambda: container or NO_LIMIT)
    monkeypatch.setattr(system_limits, "process_limits", lambda: iter(limits))


def test_the_tightest_limit_counts(monkeypatch):
    given_memory(monkeypatch, total=100, available=60)
    assert system_memory() == (100, 60)
    given_memory(monkeypatch, total=100, available=60, container=DeviceMemory(50, 40))
    assert system_memory() == (50, 40)
    limits = [DeviceMemory(90, 80), DeviceMemory(45, 30)]
    given_memory(
        monkeypatch, total=100, available=60, container=DeviceMemory(50, 40), limits=limits
    )
    assert system_memory() == (45, 30)


def test_processes_share_system_memory_and_not_their_own_limits(monkeypatch):
    given_memory(monkeypatch, total=100, available=60, limits=[DeviceMemory(90, 25)])
    assert system_memory(num_sharers=1).free_bytes == 25
    assert system_memory(num_sharers=2).free_bytes == 25
    assert system_memory(num_sharers=4) == (100, 15)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to these limits")
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_on_the_process_itself_counts(kind):
    code = f"""
import resource
from cb_rollout.engine.memory.system import system_memory
before = system_memory()
resource.setrlimit(resource.{kind}, (1 << 30, 1 << 30))
memory = system_memory()
assert memory.total_bytes == 1 << 30, memory
assert 1 << 29 < memory.free_bytes < 1 << 30, memory
held = bytearray(1 << 28)
assert memory.free_bytes - system_memory().free_bytes > 0.9 * (1 << 28)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert resource.getrlimit(getattr(resource, kind))[0] != 1 << 30, "this process is untouched"


def test_memory_is_as_last_measured_while_no_file_can_be_opened():
    found = system_memory(7)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    too_many = pytest.raises(OSError, match="Too many open files")
    with Path("/dev/null").open() as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 1, hard))
        try:
            with too_many:
                Path("/dev/null").read_bytes()
            assert system_memory(7) == found
            with too_many:
                system_memory(8)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert system_memory(8).total_bytes > 0
