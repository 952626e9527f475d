"""Keep the keys and states of preempted sequences in host memory until they run again.

Owns that memory, and the measured speeds that decide whether keys are copied or recomputed. Keeps
only keys of the current policy version. The scheduler calls it, on the thread that steps the
engine.

Every copy is launched on the compute stream, so it runs after earlier forwards, and before later
ones that reuse its blocks. The host waits for the event after a sequence's copies before it copies
them back. The executor orders steps on different streams.

B: bytes, W: bytes of a block in one of the cache's tensors, M: blocks, N: slots of all blocks, F:
heads x size of a head.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cb_rollout.compat.torch import empty_host_cache
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB
from cb_rollout.engine.request import Request

_LOGGER = logging.getLogger(__name__)

# Devices with memory apart from the host's. On a CPU the keys are in host memory already.
OFFLOADED_DEVICES = {"cuda"}

# torch rounds pinned memory up to a power of two, so a segment's size is a power of two. A sequence
# takes whole segments, so a small budget has small ones.
MAX_SEGMENT_BYTES = 64 << 20
MIN_SEGMENT_BYTES = 64 << 10
NUM_SEGMENTS = 64

# Copied each way to measure the bus: a third of a millisecond at 50 GB/s.
MEASURED_BYTES = 16 << 20


def offload_obstacle(device: torch.device) -> str:
    """Return why keys of a device cannot be offloaded; "": they can."""
    if device.type in OFFLOADED_DEVICES:
        return ""
    return f"the keys of a {device.type} are in host memory already"


def host_budget_bytes(space_gib: float | None, threshold: float) -> int:
    """Return the bytes of host memory that offloaded keys may take.

    Args:
        space_gib: `cpu_offload_space`; None: as much as the threshold allows.
        threshold: `cpu_offload_space_safety_threshold`, a share of the memory that is available.
    """
    available = devices.memory(torch.device("cpu")).free_bytes
    most = int(threshold * available)
    if space_gib is None:
        return most
    asked = int(space_gib * GIB)
    if asked > most:
        _LOGGER.warning(
            f"cpu_offload_space={space_gib:g} GiB is more than {threshold:.0%} of the "
            f"{available / GIB:.3f} GiB of host memory available to this process; {most / GIB:.3f} "
            "GiB are used instead. Lower cpu_offload_space, or raise "
            "cpu_offload_space_safety_threshold."
        )
    return min(asked, most)


class HostBudget(NamedTuple):
    """The host memory for the keys of preempted sequences."""

    num_bytes: int
    """0: their keys are recomputed instead."""
    obstacle: str
    """The reason why `cpu_offload_space` has no effect; "": it has an effect, or is 0."""

    def all_reduced(self, all_reduce_min: Callable[[int], int]) -> "HostBudget":
        """Return the minimum budget over the processes that share a model's layers."""
        return self._replace(num_bytes=all_reduce_min(self.num_bytes))


def create_host_budget(config: RolloutConfig, device: torch.device) -> HostBudget:
    """Return the host memory that `cpu_offload_space` allows for a device's keys."""
    space = config.cpu_offload_space
    if space == 0:
        return HostBudget(0, "")
    obstacle = offload_obstacle(device)
    if obstacle:
        _LOGGER.info("cpu_offload_space=%s has nothing to do here: %s", space, obstacle)
        return HostBudget(0, obstacle)
    return HostBudget(host_budget_bytes(space, config.cpu_offload_space_safety_threshold), "")


@dataclass(eq=False)
class OffloadSpeeds:
    """Measured speeds that decide whether copying keys is faster than recomputing them."""

    bus_bytes_per_second: float | None = None
    """Between host and device, in the slower direction; None: not measured."""
    prefill_tokens_per_second: float | None = None
    """Of the fastest prefill; None: not measured."""
    _num_prefills: int = 0

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record a finished prefill; the first one is left out, because it compiles kernels."""
        self._num_prefills += 1
        if self._num_prefills > 1 and seconds > 0:
            fastest = self.prefill_tokens_per_second or 0.0
            self.prefill_tokens_per_second = max(fastest, num_tokens / seconds)

    def is_copy_faster(self, num_bytes: int, num_tokens: int) -> bool:
        """Return whether copying takes less time than a prefill; False while either is unknown."""
        if self.bus_bytes_per_second is None or self.prefill_tokens_per_second is None:
            return False
        copy_seconds = num_bytes / self.bus_bytes_per_second
        return copy_seconds < num_tokens / self.prefill_tokens_per_second


@dataclass(frozen=True, slots=True)
class OffloadedSequence:
    """The keys and states of one sequence, in host memory."""

    policy_version: int
    num_computed: int
    """Number of leading tokens whose keys are stored."""
    num_blocks: int
    num_bytes: int
    segments: list[torch.Tensor]
    copied: torch.cuda.Event | None
    """Event recorded after the copies; None: the device has no streams."""


class KVOffloader:
    """Copy preempted sequences to host memory and back, within a budget of bytes."""

    def __init__(
        self,
        storage: CacheStorage,
        max_bytes: int,
        all_reduce_min: Callable[[int], int] = int,
    ) -> None:
        """Start empty; host memory is allocated as sequences need it, at most `max_bytes`.

        `all_reduce_min` returns the minimum of a number over the processes that preempt together.
        """
        self._storage = storage
        self._all_reduce_min = all_reduce_min
        self.max_bytes = max_bytes
        self.speeds = OffloadSpeeds()
        segment = min(MAX_SEGMENT_BYTES, max(MIN_SEGMENT_BYTES, max_bytes // NUM_SEGMENTS))
        self._segment_bytes = 1 << (segment.bit_length() - 1)
        self._max_segments = max_bytes // self._segment_bytes
        self._num_segments = 0
        self._free_segments: list[torch.Tensor] = []
        # By request id, the longest kept first. None: dropped to make room, which other processes
        # may not have done.
        self._kept: OrderedDict[str, OffloadedSequence | None] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of host memory that are allocated."""
        return self._num_segments * self._segment_bytes

    def holds(self, request: Request) -> bool:
        return request.request_id in self._kept

    def save(self, request: Request, policy_version: int) -> bool:
        """Copy a running sequence's keys and states to the host; return whether this succeeded.

        The sequence must still have its blocks and its table row, and must not be in a forward.
        """
        if request.has_old_keys:
            return False
        kept = self._saved(request, policy_version)
        # If one process has no room, no process keeps the sequence.
        is_kept = bool(self._all_reduce_min(kept is not None))
        if is_kept:
            self._kept[request.request_id] = kept
        elif kept is not None:
            self._free_segments += kept.segments
        return is_kept

    def restore(self, request: Request, policy_version: int) -> bool:
        """Copy a sequence's keys and states into its new blocks and table row.

        `request.num_computed` tokens are in shared blocks already. If the keys must be recomputed
        instead, forgets them and returns False.
        """
        kept = self._kept.pop(request.request_id)
        is_restored = False
        if kept is not None and kept.policy_version == policy_version:
            is_restored = self._restored(request, kept)
        is_restored = bool(self._all_reduce_min(is_restored))
        if is_restored:
            assert kept is not None
            request.num_computed = kept.num_computed
        self._release(kept)
        return is_restored

    def drop(self, request: Request) -> None:
        """Forget the keys of a sequence, if any are kept."""
        self._release(self._kept.pop(request.request_id, None))

    def clear(self) -> None:
        """Forget all keys; the host memory stays allocated for later sequences."""
        while self._kept:
            _, kept = self._kept.popitem()
            self._release(kept)

    def release(self) -> None:
        """Forget all keys, and give the host memory back."""
        self.clear()
        is_pinned = bool(self._free_segments) and self._is_pinned
        self._free_segments.clear()
        self._num_segments = 0
        if is_pinned:
            empty_host_cache()

    @property
    def _is_pinned(self) -> bool:
        return self._storage.device.type == "cuda"

    def _release(self, kept: OffloadedSequence | None) -> None:
        if kept is not None:
            self._free_segments += kept.segments

    def _saved(self, request: Request, policy_version: int) -> OffloadedSequence | None:
        storage = self._storage
        num_blocks = -(-request.num_computed // storage.plan.block_size)
        num_bytes = num_blocks * storage.plan.bytes_per_block + storage.plan.bytes_per_sequence
        if not num_bytes or not self._is_worth_it(2 * num_bytes, request.num_computed):
            return None
        segments = self._take_segments(-(-num_bytes // self._segment_bytes))
        if segments is None:
            return None
        try:
            self._copy_out(request, num_blocks, segments)
        except Exception as error:
            self._free_segments += segments
            if not devices.is_out_of_memory(error):
                raise
            # There is no room on the device to gather the blocks of one tensor.
            return None
        copied = devices.record_event(storage.device)
        return OffloadedSequence(
            policy_version=policy_version,
            num_computed=request.num_computed,
            num_blocks=num_blocks,
            num_bytes=num_bytes,
            segments=segments,
            copied=copied,
        )

    def _copy_out(
        self, request: Request, num_blocks: int, segments: Sequence[torch.Tensor]
    ) -> None:
        cache = self._storage.cache
        blocks_M = devices.to_device(request.block_ids[:num_blocks], self._storage.device)
        start = 0
        for pages_NF in cache.pages:
            data_B = _bytes_of(self._by_block(pages_NF).index_select(0, blocks_M))
            _write(segments, start, data_B)
            start += len(data_B)
        for states in cache.states:
            data_B = _bytes_of(states[request.table_row])
            _write(segments, start, data_B)
            start += len(data_B)

    def _restored(self, request: Request, kept: OffloadedSequence) -> bool:
        plan = self._storage.plan
        num_shared = request.num_computed // plan.block_size
        num_bytes = kept.num_bytes - num_shared * plan.bytes_per_block
        if not self._is_worth_it(num_bytes, request.num_tokens - request.num_computed):
            return False
        if kept.copied is not None:
            kept.copied.synchronize()
        try:
            self._copy_in(request, kept, num_shared)
        except Exception as error:
            if not devices.is_out_of_memory(error):
                raise
            return False
        return True

    def _copy_in(self, request: Request, kept: OffloadedSequence, num_shared: int) -> None:
        cache = self._storage.cache
        device = self._storage.device
        block_ids = request.block_ids[num_shared : kept.num_blocks]
        blocks_M = devices.to_device(block_ids, device)
        start = 0
        for pages_NF in cache.pages:
            by_block = self._by_block(pages_NF)
            block_bytes = by_block.shape[1] * by_block.element_size()
            if block_ids:
                first = start + num_shared * block_bytes
                data_B = _read(kept.segments, first, len(block_ids) * block_bytes, device)
                by_block.index_copy_(
                    0, blocks_M, data_B.view(pages_NF.dtype).view(len(blocks_M), -1)
                )
            start += kept.num_blocks * block_bytes
        for states in cache.states:
            row = states[request.table_row]
            data_B = _read(kept.segments, start, row.nbytes, device)
            row.copy_(data_B.view(row.dtype).view(row.shape))
            start += row.nbytes

    def _by_block(self, pages_NF: torch.Tensor) -> torch.Tensor:
        """Return pages with all tokens of a block in one row."""
        return pages_NF.view(-1, self._storage.plan.block_size * pages_NF.shape[1])

    def _is_worth_it(self, num_bytes: int, num_tokens: int) -> bool:
        speeds = self.speeds
        if speeds.bus_bytes_per_second is None and speeds.prefill_tokens_per_second is not None:
            speeds.bus_bytes_per_second = self._measured_bus()
        return speeds.is_copy_faster(num_bytes, num_tokens)

    def _measured_bus(self) -> float | None:
        """Return the bytes per second of the slower direction; None without host memory."""
        segments = self._take_segments(1)
        if segments is None:
            return None
        host_B = segments[0][:MEASURED_BYTES]
        device = self._storage.device
        there_B = torch.empty(len(host_B), dtype=torch.uint8, device=device)
        seconds = 0.0
        for source, target in ((host_B, there_B), (there_B, host_B)):
            # The first copy may include one-time setup.
            target.copy_(source, non_blocking=True)
            _wait(device)
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            _wait(device)
            seconds = max(seconds, time.perf_counter() - started)
        self._free_segments += segments
        return len(host_B) / max(seconds, 1e-9)

    def _take_segments(self, count: int) -> list[torch.Tensor] | None:
        """Return this many segments, dropping the oldest sequences; None if too few exist."""
        if count > self._max_segments:
            return None
        while len(self._free_segments) < count:
            if self._num_segments < self._max_segments:
                self._allocate()
            elif not self._drop_longest_kept():
                return None
        taken = self._free_segments[:count]
        del self._free_segments[:count]
        return taken

    def _allocate(self) -> None:
        """Allocate a segment; if that fails, lower the maximum number of segments."""
        size = self._segment_bytes
        try:
            segment = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        except (RuntimeError, MemoryError) as error:
            _LOGGER.warning(
                f"no host memory beyond {self.num_bytes / GIB:.3f} of the "
                f"{self.max_bytes / GIB:.3f} GiB for preempted keys ({error}); the other keys are "
                "recomputed. Lower cpu_offload_space."
            )
            self._max_segments = self._num_segments
            return
        self._free_segments.append(segment)
        self._num_segments += 1

    def _drop_longest_kept(self) -> bool:
        for request_id, kept in self._kept.items():
            if kept is not None:
                self._release(kept)
                self._kept[request_id] = None
                return True
        return False


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def _slices(segments: Sequence[torch.Tensor], start: int, num_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the slices of segments that hold bytes `start .. start + num_bytes`, in order."""
    size = len(segments[0])
    end = start + num_bytes
    while start < end:
        index, offset = divmod(start, size)
        length = min(size - offset, end - start)
        yield segments[index][offset : offset + length]
        start += length


def _write(segments: Sequence[torch.Tensor], start: int, data_B: torch.Tensor) -> None:
    for target in _slices(segments, start, len(data_B)):
        target.copy_(data_B[: len(target)], non_blocking=True)
        data_B = data_B[len(target) :]


def _read(
    segments: Sequence[torch.Tensor], start: int, num_bytes: int, device: torch.device
) -> torch.Tensor:
    data_B = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    rest_B = data_B
    for source in _slices(segments, start, num_bytes):
        rest_B[: len(source)].copy_(source, non_blocking=True)
        rest_B = rest_B[len(source) :]
    return data_B


def _wait(device: torch.device) -> None:
    """Wait for all work of the calling thread's stream."""
    event = devices.record_event(device)
    if event is not None:
        event.synchronize()
