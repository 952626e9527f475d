"""Allocate, grow and release the cache's tensors, within the memory plan.

With torch_memory_saver, which only this file imports, released GPU memory is allocated again at the
same addresses, so that CUDA graphs stay valid. That library ends the process where a pool that is
resumed does not fit, or a paused one is freed: memory is checked first, and paused pools are kept.
"""

import importlib
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import PagedCache
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.device import is_out_of_memory
from cb_rollout.engine.memory.plan import GIB, MemoryPlan
from cb_rollout.engine.request import Limits
from cb_rollout.errors import OutOfCacheMemoryError

_LOGGER = logging.getLogger(__name__)

# Each pool has a tag of its own: memory of a paused one must not serve another.
_TAG_NUMBERS = itertools.count()

# The paused pools, by tag.
_PAUSED: dict[str, object] = {}


class MemorySaver:
    """Pause and resume memory pools through torch_memory_saver's interface."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @contextmanager
    def allocating(self) -> Iterator[str]:
        """Make tensors allocated inside pausable, under the tag that is yielded."""
        tag = f"cb_rollout_{os.getpid()}_{next(_TAG_NUMBERS)}"
        with self._library.region(tag=tag):
            yield tag

    def pause(self, tag: str, pool: object) -> None:
        """Release the memory of `pool`: its contents are lost, its addresses kept."""
        _PAUSED[tag] = pool
        self._library.pause(tag)

    def resume(self, tag: str) -> Any:
        """Allocate a pool's memory again, of which there must be enough; return the pool."""
        self._library.resume(tag)
        return _PAUSED.pop(tag)


def create_saver(device: torch.device) -> MemorySaver | None:
    """Return the memory saver for `device`; None: there is none."""
    if device.type != "cuda" or importlib.util.find_spec("torch_memory_saver") is None:
        return None
    library: Any = importlib.import_module("torch_memory_saver").torch_memory_saver
    try:
        if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
            # The other mode needs a library that is loaded before Python.
            library.hook_mode = "torch"
        with library.region(tag="cb_rollout_trial"):
            torch.zeros(1, device=device)
    except (AssertionError, AttributeError, ImportError, OSError, RuntimeError) as error:
        _LOGGER.warning(
            "torch_memory_saver cannot be used (%s); the cache will be allocated anew.", error
        )
        return None
    return MemorySaver(library)


class CacheStorage:
    """A paged cache and its block table, allocated and released as the engine needs them."""

    def __init__(
        self,
        layout: CacheLayout,
        limits: Limits,
        plan: MemoryPlan,
        device: torch.device,
        saver: MemorySaver | None = None,
        all_reduce_min: Callable[[int], int] = int,
    ) -> None:
        """Allocate nothing yet.

        `saver` keeps addresses while memory is released; None: nothing does. `all_reduce_min`
        returns the smallest of a number over the processes that share a cache's heads, which must
        allocate the same blocks.
        """
        self._layout, self._limits, self._plan, self._device = layout, limits, plan, device
        self._saver, self._all_reduce_min = saver, all_reduce_min
        self._num_blocks = 0
        self._held: tuple[PagedCache, BlockTable] | None = None
        self._tag: str | None = None
        # Blocks and table rows of the paused pool.
        self._paused: tuple[int, int] | None = None

    @property
    def is_allocated(self) -> bool:
        return self._held is not None

    @property
    def cache(self) -> PagedCache:
        assert self._held is not None
        return self._held[0]

    @property
    def table(self) -> BlockTable:
        assert self._held is not None
        return self._held[1]

    @property
    def num_bytes(self) -> int:
        return self.cache.num_bytes if self._held else 0

    def release(self, limits: Limits, plan: MemoryPlan, layout: CacheLayout | None = None) -> None:
        """Release the memory; the next allocation follows these limits, this plan and layout."""
        if self._held is not None:
            if self._saver is not None and self._tag is not None:
                self._saver.pause(self._tag, self.cache)
                self._paused = (self._num_blocks, self._limits.max_requests)
            self._held, self._num_blocks = None, 0
            devices.empty_cache(self._device)
        self._limits, self._plan = limits, plan
        if layout is not None and layout is not self._layout:
            self._layout, self._tag, self._paused = layout, None, None

    def allocate(self, num_blocks: int, at_least: int = 1) -> int:
        """Allocate `num_blocks` blocks, or as many as fit; return the number allocated.

        The plan may allow less than these, or fix another number.

        Raises:
            OutOfCacheMemoryError: there is no memory for `at_least` blocks.
        """
        wanted = self._plan.num_blocks
        if not self._plan.is_fixed:
            wanted = min(num_blocks, wanted)
        at_least = min(at_least, wanted)
        num_blocks = self._all_reduce_min(min(wanted, self._num_affordable(self._plan.state_bytes)))
        while True:
            if num_blocks < at_least:
                raise self._out_of_memory(at_least)
            cache, cause = self._attempted(
                lambda size=num_blocks: self._resumed(size) or self._new(size)
            )
            if self._all_reduce_min(cache is not None):
                break
            if num_blocks == at_least:
                raise self._out_of_memory(at_least) from cause
            num_blocks = max(at_least, _shrunk(num_blocks))
        if num_blocks < wanted:
            automatic = "max_memory_percent, or set training_reserve_gib"
            _LOGGER.warning(
                f"no memory for {wanted} KV cache blocks ({self._size(wanted)}): {num_blocks} are "
                f"taken ({self._size(num_blocks)}); {self._free_now()}. Fewer sequences run "
                f"together. Lower {'num_blocks' if self._plan.is_fixed else automatic}."
            )
        table = BlockTable(self._limits.max_requests, self._limits.block_size, self._device)
        self._num_blocks, self._held = num_blocks, (cache, table)
        return num_blocks

    def _attempted(self, allocate: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            return allocate(), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            devices.empty_cache(self._device)
            return None, error

    def _num_affordable(self, other_bytes: int = 0) -> int:
        # A CPU allocates more than it has, and ends the process that uses it.
        free = devices.memory_after_release(self._device).free_bytes - other_bytes
        return max(0, free) // max(1, self._plan.bytes_per_block)

    def _resumed(self, num_blocks: int) -> PagedCache | None:
        size = (num_blocks, self._limits.max_requests)
        if self._saver is None or self._tag is None or self._paused != size:
            return None
        self._paused = None
        cache: PagedCache = self._saver.resume(self._tag)
        for tensor in cache.tensors:
            tensor.zero_()
        return cache

    def _new(self, num_blocks: int) -> PagedCache:
        self._tag = self._paused = None
        with nullcontext() if self._saver is None else self._saver.allocating() as tag:
            cache = PagedCache(
                self._layout,
                num_blocks=num_blocks,
                block_size=self._limits.block_size,
                num_table_rows=self._limits.max_requests,
                device=self._device,
            )
        self._tag = tag
        return cache

    def grow(self, count: int, usable: int) -> int:
        """Allocate `count` more blocks, or as many as fit; return the total.

        The total is doubled, so that growing stays rare, but never beyond `usable`.
        """
        now = self._num_blocks
        target = min(self._plan.num_blocks, max(2 * now, now + count), max(usable, now + count))
        if target > now:
            target = self._all_reduce_min(min(target, now + self._num_affordable()))
        while self._held is not None and target > now:
            _, error = self._attempted(lambda size=target: self.cache.grow(size))
            if self._all_reduce_min(error is None):
                self._num_blocks = target
                # The new pages are outside the pausable pool.
                self._tag = None
                break
            target = now + _shrunk(target - now)
        return self._num_blocks

    def _out_of_memory(self, num_blocks: int) -> OutOfCacheMemoryError:
        knobs = "max_new_tokens" if num_blocks > 1 else "block_size"
        if self._plan.state_bytes:
            knobs += " or max_requests_per_batch"
        return OutOfCacheMemoryError(
            f"no memory for {num_blocks} KV cache blocks ({self._size(num_blocks)}), which the "
            f"shortest request needs: {self._free_now()}. Free some, or lower {knobs}. The plan "
            f"was:\n{self._plan}"
        )

    def _size(self, num_blocks: int) -> str:
        return f"{num_blocks * self._plan.bytes_per_block / GIB:.3f} GiB"

    def _free_now(self) -> str:
        free = devices.memory_after_release(self._device).free_bytes
        return f"{free / GIB:.3f} GiB are free on {self._device}"


def _shrunk(num_blocks: int) -> int:
    return num_blocks - max(1, num_blocks // 10)
