"""Measure a device's memory, move tensors and events on it, and choose defaults for its kind."""

import ctypes
import os
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from cb_rollout.compat.tensor_parallel import num_processes
from cb_rollout.compat.torch import unused_pool_bytes
from cb_rollout.engine.memory.system import DeviceMemory, system_memory
from cb_rollout.errors import ConfigurationError, OutOfCacheMemoryError

# A copy that only saves time takes at most one part in this many of the free memory.
FREE_PER_COPY = 4

# Between two checks whether a device has finished.
POLL_SECONDS = 5e-5

# Devices that did not finish a step; a thread that waits for one of them waits for ever.
_HUNG: set[torch.device] = set()

STATUS = Path("/proc/self/status")
CLEAR_REFERENCES = Path("/proc/self/clear_refs")


def memory(device: torch.device) -> DeviceMemory:
    """Return the memory of `device`, and the bytes that this process can still allocate there.

    On a GPU: the free memory that the driver reports, plus the unused memory of torch's allocator
    outside the pools of CUDA graphs. On a CPU: the lowest limit of the system, the container and
    the process, divided among the processes of a launch.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        unused = max(0, unused - unused_pool_bytes(device))
        return DeviceMemory(total, free // num_sharers(device) + unused)
    return system_memory(num_sharers(device))


def memory_after_release(device: torch.device) -> DeviceMemory:
    """Return the memory of `device` after torch's allocator has returned its unused memory.

    The allocator keeps pools of CUDA graphs and gaps between training tensors, which cannot hold a
    large tensor.
    """
    if device.type != "cuda":
        return memory(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free // num_sharers(device))


def num_sharers(device: torch.device) -> int:
    """Return how many processes of this launch share the device's memory."""
    started = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not started:
        started = num_processes()
    if device.type != "cuda":
        return started
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None and "," not in named:
        # The launcher gave each process its own GPU.
        return 1
    return -(-started // max(1, torch.cuda.device_count()))


def require_unmoved(model: torch.nn.Module, device: torch.device) -> None:
    """Raise `ConfigurationError` if a model is no longer on the device of its engine."""
    now = next(model.parameters()).device
    if now != device:
        raise ConfigurationError(
            f"the model was on {device} when its engine was made, but is on {now} now; move it "
            "back, or make a new generator."
        )


def used_and_peak(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that this process uses, and their peak since `reset_peak`; None: unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    try:
        fields: dict[str, str] = {}
        for line in STATUS.read_text().splitlines():
            name, value = line.split(":", 1)
            fields[name] = value
        used = _bytes_of_field(fields["VmRSS"])
        peak = _bytes_of_field(fields["VmHWM"])
    except (OSError, KeyError, ValueError):
        return None
    return used, peak


def _bytes_of_field(value: str) -> int:
    """Return the bytes of a field of `STATUS`, such as " 5120 kB"."""
    num_kib, _, _unit = value.strip().partition(" ")
    return 1024 * int(num_kib)


def reset_peak(device: torch.device) -> bool:
    """Reset the peak of `used_and_peak`; return whether that is possible."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        # Resets the peak of the resident size, since Linux 4.0.
        CLEAR_REFERENCES.write_text("5")
    except OSError:
        return False
    return True


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the calling thread's current one, where kernels launch."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(device)


def to_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return a tensor of numbers or of rows of numbers, without waiting for the device."""
    if dtype is torch.int64 and values and type(values[0]) is int:
        # torch.tensor checks every number by itself, which takes several times as long.
        return moved(torch.frombuffer(array("q", values), dtype=dtype), device)
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device, without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the copy would wait for the whole stream. Pinned memory may be freed at
    # once: its allocator reuses it only after the copy.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> list[list[Any]]:
    """Return `tolist()` of tensors on one device, in one transfer; integers below 2**53 only."""
    if tensors[0].device.type != "cuda":
        return [tensor.tolist() for tensor in tensors]
    # As float64, numbers of all dtypes fit in one tensor.
    flat = [tensor.double().reshape(-1) for tensor in tensors]
    numbers = torch.cat(flat).cpu()
    lists: list[list[Any]] = []
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel()
        values = numbers[start:stop].view(tensor.shape).to(tensor.dtype)
        lists.append(values.tolist())
        start = stop
    return lists


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launch the calling thread's work on a stream; None: on the thread's current stream."""
    if stream is None:
        return nullcontext()
    return torch.cuda.stream(stream)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event on the calling thread's stream; None: the device has no streams."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_event(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Make the calling thread's stream wait for an event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


class HungDeviceError(TimeoutError):
    """A device does not finish its launched work; only a new process helps."""


def wait_for(
    event: torch.cuda.Event, device: torch.device, limit_seconds: float, step: str
) -> None:
    """Wait until a device has reached an event, with a time limit.

    Args:
        event: recorded on the device.
        device: once it has missed the limit, nothing waits for it again.
        limit_seconds: a step that takes longer is considered hung.
        step: names what was launched, for the error.

    Raises:
        HungDeviceError: the limit has passed.
    """
    started = time.monotonic()
    while not event.query():
        if time.monotonic() - started > limit_seconds:
            _HUNG.add(device)
            raise HungDeviceError(
                f"{step} did not finish in {limit_seconds:g} s; restart the process with "
                "use_cuda_graph=False."
            )
        # The device has the next step already, so a late answer keeps nothing waiting.
        time.sleep(POLL_SECONDS)


def finish(device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
    """Wait until a device has run all work of a stream, failed or not; None: of all streams."""
    if device.type == "cuda" and device not in _HUNG:
        # The next use of the device raises the same error.
        with suppress(RuntimeError):
            if stream is None:
                torch.cuda.synchronize(device)
            else:
                stream.synchronize()


@contextmanager
def plain_modes() -> Iterator[None]:
    """Leave autocast and inference mode, under which pages cannot be allocated."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def empty_cache(device: torch.device) -> None:
    """Return the allocator's unused memory to the system."""
    if device.type == "cuda":
        # This waits for the device.
        if device not in _HUNG:
            torch.cuda.empty_cache()
    elif device.type == "cpu" and sys.platform == "linux":
        # glibc keeps the memory of freed tensors below its mmap threshold, up to 32 MiB each.
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def max_batch_tokens(device: torch.device) -> int:
    """Return the default maximum of tokens per prefill forward."""
    # A forward this long keeps the device busy; a longer one only has more activations.
    if device.type == "cpu":
        return 1024
    return 8192


def max_requests_per_batch(device: torch.device) -> int:
    """Return the default maximum of sequences decoded together."""
    # With more rows the time of a decode step per token no longer falls.
    if device.type == "cpu":
        return 256
    return 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in device or system memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch 2.13's CPU allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def out_of_memory(error: Exception) -> OutOfCacheMemoryError:
    """Return the error for a sequence whose forward does not fit into memory even alone."""
    failure = OutOfCacheMemoryError(
        f"no memory left for the forward of this sequence alone ({error}); lower "
        "max_memory_percent, which leaves more memory for forwards, or shorten the sequence."
    )
    failure.__cause__ = error
    return failure
