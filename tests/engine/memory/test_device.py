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


def test_free_gpu_memory_is_shared_and_adds_what_the_allocator_holds(launched, monkeypatch):
    launched(2, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 250)
    assert devices.memory(GPU) == (1000, 300 + 50)


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
