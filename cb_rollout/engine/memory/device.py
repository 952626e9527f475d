"""What a device reports about its memory, and the defaults that suit its kind."""

import ctypes
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from cb_rollout.engine.memory.system import system_memory
from cb_rollout.errors import ConfigurationError, OutOfCacheMemoryError

MAX_BATCH_TOKENS = {"cpu": 1024}
DEFAULT_MAX_BATCH_TOKENS = 8192
# A forward this long keeps the device busy; longer ones only hold more activations.

MAX_REQUESTS_PER_BATCH = {"cpu": 256}
DEFAULT_MAX_REQUESTS_PER_BATCH = 1024
# Past this many rows a decode step gains nothing per token.

FLOAT8_CAPABILITY = (8, 9)
# The first compute capability that converts float8 in hardware.

STATUS, CLEAR_REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
# What Linux takes, since 4.0, to begin the peak of the resident size anew.


class DeviceMemory(NamedTuple):
    """What a device has for this process, in bytes."""

    total_bytes: int
    free_bytes: int


def memory(device: torch.device) -> DeviceMemory:
    """What this process could still take on `device`.

    On an accelerator: what the driver reports free, other processes counted, and what torch's
    allocator holds unused. On a CPU: what the system, the container and the process's own limits
    leave. Processes of one launch that share the memory each have an equal share.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return DeviceMemory(total, free // num_sharers(device) + unused)
    host = system_memory(num_sharers(device))
    return DeviceMemory(int(host.limit_bytes), int(host.left_bytes))


def num_sharers(device: torch.device) -> int:
    """Processes of this launch that take from the same memory, this one included.

    A launcher says how many it started on this machine. They share the memory of a CPU; of GPUs
    each has its own, unless there are more processes than GPUs.
    """
    started = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not started:
        is_group = distributed.is_available() and distributed.is_initialized()
        started = distributed.get_world_size() if is_group else 1
    if device.type != "cuda":
        return started
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None and "," not in named:  # each process was given its own
        return 1
    return -(-started // max(1, torch.cuda.device_count()))


def require_unmoved(model: torch.nn.Module, device: torch.device) -> None:
    """Raise `ConfigurationError` where a model no longer is on the device of its engine."""
    if (now := next(model.parameters()).device) != device:
        raise ConfigurationError(
            f"the model was on {device} when its engine was made, and is on {now} now; move it "
            "back, or make a new generator."
        )


def used_and_peak(device: torch.device) -> tuple[int, int] | None:
    """Bytes that this process holds now, and the most since `reset_peak`; None: not known."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    try:
        lines = [line.split() for line in STATUS.read_text().splitlines()]
    except OSError:
        return None
    kib = {line[0]: int(line[1]) for line in lines if line[0] in ("VmRSS:", "VmHWM:")}
    if len(kib) < 2:
        return None
    return kib["VmRSS:"] * 1024, kib["VmHWM:"] * 1024


def reset_peak(device: torch.device) -> bool:
    """Begin the peak anew; False where that cannot be done."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFERENCES.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the calling thread's current one, where kernels launch."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A tensor of these numbers, or rows of them, without waiting for what the device does."""
    if dtype is torch.int64 and values and type(values[0]) is int:
        # torch.tensor looks at every number by itself, which takes several times as long.
        return moved(torch.frombuffer(array("q", values), dtype=dtype), device)
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, without waiting for what that does."""
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the copy would wait for the whole stream. Pinned memory may be dropped at
    # once: its allocator keeps it until the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> list[list[Any]]:
    """What is in tensors of one device, as `tolist()`, by one transfer; integers below 2**53."""
    if tensors[0].device.type != "cuda":
        return [tensor.tolist() for tensor in tensors]
    numbers = torch.cat([tensor.double().reshape(-1) for tensor in tensors]).cpu()
    parts = numbers.split([tensor.numel() for tensor in tensors])
    return [
        part.view(tensor.shape).to(tensor.dtype).tolist()
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """A mark behind all that the calling thread's stream was given; None: nothing is waited for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_event(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Have what the calling thread's stream is given from now on come after a mark."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def finish(device: torch.device) -> None:
    """Return when a device is done with all that it was given, whether well or not."""
    if device.type == "cuda":
        # What failed there fails whoever uses the device next, too.
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)


@contextmanager
def plain_modes(device: torch.device) -> Iterator[None]:
    """Leave the autocast and the inference mode that the calling thread may be in.

    Pages made in inference mode could not be written outside of it.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def empty_cache(device: torch.device) -> None:
    """Have the allocator give back what it holds unused."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "cpu" and sys.platform == "linux":
        # glibc keeps freed tensors below its mmap threshold, up to 32 MiB each, for itself.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def has_float8(device: torch.device) -> bool:
    """Whether the device itself converts float8."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def max_batch_tokens(device: torch.device) -> int:
    """Tokens of one prefill forward, where the config leaves it open."""
    return MAX_BATCH_TOKENS.get(device.type, DEFAULT_MAX_BATCH_TOKENS)


def max_requests_per_batch(device: torch.device) -> int:
    """Sequences decoded together, where the config leaves it open."""
    return MAX_REQUESTS_PER_BATCH.get(device.type, DEFAULT_MAX_REQUESTS_PER_BATCH)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host, had no memory for what was asked."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch 2.13's CPU allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def out_of_memory(error: Exception) -> OutOfCacheMemoryError:
    """What to tell whoever asked for a sequence that even alone has no room."""
    told = OutOfCacheMemoryError(
        f"no memory left for the forward of this sequence alone ({error}); lower "
        "max_memory_percent, so that the KV cache leaves more to forwards, or shorten it."
    )
    told.__cause__ = error
    return told


def captured_weights(model: torch.nn.Module) -> list[object]:
    """What a captured forward relies on: where tensors lie, and which adapters peft mixes in."""
    tensors = [*model.parameters(), *model.buffers()]
    found: list[object] = [tensor.data_ptr() for tensor in tensors]
    module: Any
    for module in model.modules():
        if hasattr(module, "merged_adapters"):
            found += [
                tuple(module.active_adapters),
                module.disable_adapters,
                tuple(module.merged_adapters),
                dict(getattr(module, "scaling", {})),
            ]
    return found
