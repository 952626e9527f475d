"""What a device reports about its memory, and the defaults that suit its kind."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import psutil
import torch

MAX_BATCH_TOKENS = {"cpu": 1024}
DEFAULT_MAX_BATCH_TOKENS = 8192
# A forward this long keeps the device busy; longer ones only hold more activations.

MAX_REQUESTS_PER_BATCH = {"cpu": 256}
DEFAULT_MAX_REQUESTS_PER_BATCH = 1024
# Past this many rows a decode step gains nothing per token.


def free_bytes(device: torch.device) -> int:
    """Memory that this process could still take on `device`.

    On an accelerator: what the driver reports free, other processes counted, and what torch's
    allocator holds unused. On a CPU: what the system calls available.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    return psutil.virtual_memory().available


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the calling thread's current one, where kernels launch."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
    """Have torch's allocator give back what it holds unused."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def max_batch_tokens(device: torch.device) -> int:
    """Tokens of one prefill forward, where the config leaves it open."""
    return MAX_BATCH_TOKENS.get(device.type, DEFAULT_MAX_BATCH_TOKENS)


def max_requests_per_batch(device: torch.device) -> int:
    """Sequences decoded together, where the config leaves it open."""
    return MAX_REQUESTS_PER_BATCH.get(device.type, DEFAULT_MAX_REQUESTS_PER_BATCH)
