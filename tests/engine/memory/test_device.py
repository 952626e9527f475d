import pytest
import torch

from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.system import DeviceMemory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def launched(monkeypatch):
    """Set the environment of a launcher, and the number of GPUs."""

    def say(num_processes, num_gpus=0, visible=None):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return say


def test_a_process_alone_shares_with_none(launched):
    assert devices.num_sharers(CPU) == 1


def test_processes_on_one_machine_share_its_memory(launched, monkeypatch):
    launched(4)
    assert devices.num_sharers(CPU) == 4
    asked = []

    def system_memory(num_sharers):
        asked.append(num_sharers)
        return DeviceMemory(100, 20)

    monkeypatch.setattr(devices, "system_memory", system_memory)
    assert devices.memory(CPU) == (100, 20)
    assert asked == [4]


@pytest.mark.parametrize(
    ("processes", "gpus", "visible", "sharers"),
    [
        (8, 8, None, 1),
        (2, 1, None, 2),
        (3, 2, "0,1", 2),
        (8, 1, "5", 1),
        (1, 4, None, 1),
    ],
)
def test_gpus_are_shared_where_processes_outnumber_them(
    launched, processes, gpus, visible, sharers
):
    launched(processes, gpus, visible)
    assert devices.num_sharers(GPU) == sharers


def allocator_of(monkeypatch, *segments, backend="native"):
    """A GPU of 1000 bytes, 600 of them free; segments: device, pool, total and allocated bytes."""
    names = ("device", "segment_pool_id", "total_size", "allocated_size")
    snapshot = [dict(zip(names, segment, strict=True)) for segment in segments]
    own = [segment for segment in snapshot if segment["device"] == GPU.index]
    said = {
        "mem_get_info": (600, 1000),
        "memory_reserved": sum(segment["total_size"] for segment in own),
        "memory_allocated": sum(segment["allocated_size"] for segment in own),
    }
    for name, answer in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)

    def memory_snapshot():
        if backend != "native":
            raise RuntimeError("not supported by this allocator")
        return snapshot

    monkeypatch.setattr(torch.cuda, "memory_snapshot", memory_snapshot)


def test_free_gpu_memory_is_shared_and_adds_what_the_allocator_holds(launched, monkeypatch):
    launched(2, 1)
    allocator_of(monkeypatch, (0, (0, 0), 300, 250))
    assert devices.memory(GPU) == (1000, 300 + 50)


def test_memory_of_graphs_is_not_free_for_training(launched, monkeypatch):
    """What a capture freed inside of its pool is for the next capture alone."""
    launched(1, 1)
    common = (0, (0, 0), 300, 250)
    graphs = (0, (0, 1), 80, 10)
    compiled = (0, (2, 0), 15, 5)
    elsewhere = (1, (0, 1), 40, 0)
    allocator_of(monkeypatch, common, graphs, compiled, elsewhere)
    assert devices.memory(GPU) == (1000, 600 + 50)


def test_an_allocator_that_tells_nothing_of_pools_is_not_asked(launched, monkeypatch):
    launched(1, 1)
    allocator_of(monkeypatch, (0, (0, 0), 300, 250), backend="cudaMallocAsync")
    assert devices.memory(GPU) == (1000, 600 + 50)


def test_the_peak_of_a_cpu_process_is_measured_and_reset():
    if not devices.reset_peak(CPU):
        pytest.skip("this system cannot reset the peak")
    size = 64 << 20
    used, _ = devices.used_and_peak(CPU)
    torch.ones(size, dtype=torch.uint8)
    after, peak = devices.used_and_peak(CPU)
    assert peak - used > 0.9 * size
    assert after - used < 0.5 * size
    assert devices.reset_peak(CPU)
    now, peak = devices.used_and_peak(CPU)
    assert peak - now < 0.5 * size
