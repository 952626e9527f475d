"""Allocate, grow and release the cache's tensors, within the memory plan."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.device import is_out_of_memory
from cb_rollout.engine.memory.plan import GIB, MemoryPlan
from cb_rollout.engine.request import Request
from cb_rollout.errors import OutOfCacheMemoryError

_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class CacheStorage:
    """A paged cache and its block table, allocated and released as the engine needs them."""

    layout: CacheLayout
    plan: MemoryPlan
    device: torch.device
    all_reduce_min: Callable[[int], int] = int
    """Returns the smallest of a number over the processes that must allocate the same blocks."""
    cache: PagedCache = field(init=False)
    table: BlockTable = field(init=False)
    is_allocated: bool = field(default=False, init=False)
    """True while there is a cache and a table."""
    _num_blocks: int = field(default=0, init=False)

    @property
    def num_bytes(self) -> int:
        return self.cache.num_bytes if self.is_allocated else 0

    def keep_routes(self, request: Request) -> None:
        """Save the experts of a sequence's tokens before it loses its blocks."""
        if self.layout.routes is None or not self.is_allocated or not request.num_generated:
            return
        size = self.table.block_size
        positions = torch.arange(request.num_computed)
        slots = torch.tensor(request.block_ids)[positions // size] * size + positions % size
        new = self.cache.read_routes(devices.moved(slots, self.device)).cpu().numpy()
        old = request.routed_experts
        request.routed_experts = new if old is None else np.concatenate([old, new[len(old) :]])

    def release(self, layout: CacheLayout, plan: MemoryPlan) -> None:
        """Release the memory; the next allocation follows this layout and plan."""
        if self.is_allocated:
            self.is_allocated = False
            self._num_blocks = 0
            del self.cache
            del self.table
            devices.empty_cache(self.device)
        self.layout = layout
        self.plan = plan

    def allocate(self, num_blocks: int, at_least: int = 1) -> int:
        """Allocate `num_blocks` blocks, or as many as fit; return the number allocated.

        The plan may allow fewer blocks, or fix the number. Raises `OutOfCacheMemoryError` if
        there is no memory for `at_least` blocks.
        """
        wanted = self.plan.num_blocks
        block_size = self.plan.block_size
        num_rows = self.plan.num_slots
        if not self.plan.is_fixed:
            wanted = min(num_blocks, wanted)
        at_least = min(at_least, wanted)
        num_affordable = self._num_affordable(self.plan.state_bytes)
        num_blocks = self.all_reduce_min(min(wanted, num_affordable))
        while True:
            if num_blocks < at_least:
                raise self._out_of_memory(at_least)
            create = partial(
                PagedCache,
                self.layout,
                num_blocks=num_blocks,
                block_size=block_size,
                num_table_rows=num_rows,
                device=self.device,
            )
            cache, cause = self._attempted(create)
            if self.all_reduce_min(cache is not None):
                break
            if num_blocks == at_least:
                raise self._out_of_memory(at_least) from cause
            num_blocks = max(at_least, _shrunk(num_blocks))
        if num_blocks < wanted:
            knobs = "max_memory_percent, or set training_reserve_gib"
            if self.plan.is_fixed:
                knobs = "num_blocks"
            _LOGGER.warning(
                f"no memory for {wanted} KV cache blocks ({self._size(wanted)}): {num_blocks} are "
                f"allocated ({self._size(num_blocks)}); {self._free_now()}. Fewer sequences run "
                f"together, which is slower. Lower {knobs}."
            )
        self.cache = cache
        self.table = BlockTable(num_rows, block_size, self.device)
        self.is_allocated = True
        self._num_blocks = num_blocks
        return num_blocks

    def _attempted(self, allocate: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            return allocate(), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            devices.empty_cache(self.device)
            return None, error

    def _num_affordable(self, other_bytes: int = 0) -> int:
        # On a CPU, the system grants more memory than there is, and kills a process that uses it.
        free = devices.memory_after_release(self.device).free_bytes - other_bytes
        return max(0, free) // max(1, self.plan.bytes_per_block)

    def grow(self, count: int, usable: int) -> int:
        """Allocate `count` more blocks, or as many as fit; return the total.

        The total is doubled, so that growing stays rare, but never beyond `usable`.
        """
        now = self._num_blocks
        target = min(self.plan.num_blocks, max(2 * now, now + count), max(usable, now + count))
        if target > now:
            target = self.all_reduce_min(min(target, now + self._num_affordable()))
        while self.is_allocated and target > now:
            _, error = self._attempted(lambda size=target: self.cache.grow(size))
            if self.all_reduce_min(error is None):
                self._num_blocks = target
                break
            target = now + _shrunk(target - now)
        return self._num_blocks

    def _out_of_memory(self, num_blocks: int) -> OutOfCacheMemoryError:
        knobs = "max_new_tokens" if num_blocks > 1 else "block_size"
        if self.plan.state_bytes:
            knobs += " or max_requests_per_batch"
        return OutOfCacheMemoryError(
            f"no memory for {num_blocks} KV cache blocks ({self._size(num_blocks)}), which the "
            f"shortest request needs: {self._free_now()}. Free some, or lower {knobs}. The plan "
            f"was:\n{self.plan}"
        )

    def _size(self, num_blocks: int) -> str:
        return f"{num_blocks * self.plan.bytes_per_block / GIB:.3f} GiB"

    def _free_now(self) -> str:
        free = devices.memory_after_release(self.device).free_bytes
        return f"{free / GIB:.3f} GiB are free on {self.device}"


def _shrunk(num_blocks: int) -> int:
    return num_blocks - max(1, num_blocks // 10)
