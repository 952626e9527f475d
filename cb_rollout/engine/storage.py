"""The cache's tensors: planned from what the device has, allocated when needed, given back.

Owns when memory is taken. What lies where is the cache's affair.
"""

import torch

from cb_rollout import _compat
from cb_rollout.config import RolloutConfig
from cb_rollout.engine import device as devices
from cb_rollout.engine.cache import BlockTable, PagedCache
from cb_rollout.engine.faults import is_out_of_memory
from cb_rollout.engine.limits import Limits
from cb_rollout.engine.probe import CacheLayout
from cb_rollout.errors import OutOfCacheMemoryError
from cb_rollout.memory import GIB, MemoryPlan, create_memory_plan, training_reserve


def plan_memory(
    model: torch.nn.Module,
    config: RolloutConfig,
    layout: CacheLayout,
    device: torch.device,
) -> MemoryPlan:
    """What the cache may take of what is free now, and how many sequences it may serve at once.

    The automatic reserve counts the gradients and Adam moments of trainable parameters that have
    no gradient yet, for a model in training mode.
    """
    reserve = config.training_reserve_gib
    if isinstance(reserve, str):
        trainable = [p for p in model.parameters() if p.requires_grad and model.training]
        reserve_bytes = training_reserve(
            sum(_compat.local_part(p).nbytes for p in trainable),
            sum(_compat.local_part(p.grad).nbytes for p in trainable if p.grad is not None),
        )
    else:
        reserve_bytes = int(reserve * GIB)
    return create_memory_plan(
        free_bytes=devices.free_bytes(device),
        training_reserve_bytes=reserve_bytes,
        max_memory_percent=config.max_memory_percent,
        bytes_per_block=layout.bytes_per_token * config.block_size,
        bytes_per_sequence=layout.bytes_per_sequence,
        max_requests=config.max_requests_per_batch or devices.max_requests_per_batch(device),
        num_blocks=config.num_blocks,
    )


class CacheStorage:
    """A paged cache and its block table, for as long as they are needed."""

    def __init__(
        self, layout: CacheLayout, limits: Limits, plan: MemoryPlan, device: torch.device
    ) -> None:
        """Hold nothing yet."""
        self._layout, self._limits, self._plan, self._device = layout, limits, plan, device
        self._num_blocks = 0
        self._held: tuple[PagedCache, BlockTable] | None = None

    @property
    def is_allocated(self) -> bool:
        """Whether memory is held."""
        return self._held is not None

    @property
    def cache(self) -> PagedCache:
        """The cache, which must be allocated."""
        assert self._held is not None
        return self._held[0]

    @property
    def table(self) -> BlockTable:
        """The block table, which must be allocated."""
        assert self._held is not None
        return self._held[1]

    @property
    def num_bytes(self) -> int:
        """Bytes held for keys, values and states."""
        return self.cache.num_bytes if self._held else 0

    def allocate(self, num_blocks: int, at_least: int = 1) -> int:
        """Take memory for `num_blocks` blocks, or as many as there are; returns how many.

        Args:
            num_blocks: what the workload can use; the plan may allow less, or fix another number.
            at_least: where the device refuses, half as many are tried, down to this.

        Raises:
            OutOfCacheMemoryError: the device refused even that.
        """
        planned = self._plan.num_blocks
        num_blocks = planned if self._plan.is_fixed else min(num_blocks, planned)
        while True:
            try:
                cache = PagedCache(
                    self._layout,
                    num_blocks=num_blocks,
                    block_size=self._limits.block_size,
                    num_slots=self._limits.max_requests,
                    device=self._device,
                )
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                devices.empty_cache(self._device)
                if num_blocks <= at_least:
                    raise OutOfCacheMemoryError(
                        f"no memory for {num_blocks} KV cache blocks; lower max_memory_percent "
                        f"(now {self._plan.max_memory_percent}) or num_blocks.\n{self._plan}"
                    ) from error
                num_blocks = max(at_least, num_blocks // 2)
        table = BlockTable(self._limits.max_requests, self._limits.block_size, self._device)
        self._num_blocks, self._held = num_blocks, (cache, table)
        return num_blocks

    def grow(self, count: int) -> int:
        """Make room for `count` more blocks, or as many as there are; returns the total."""
        now = self._num_blocks
        target = min(self._plan.num_blocks, max(2 * now, now + count))
        while self._held is not None and target > now:
            try:
                self.cache.grow(target)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                devices.empty_cache(self._device)
                target = (now + target) // 2
            else:
                self._num_blocks = target
                break
        return self._num_blocks
