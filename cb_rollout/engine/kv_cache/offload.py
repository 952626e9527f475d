"""What becomes of the keys of preempted sequences: by default they are forgotten.

Keys of preempted sequences, kept in host memory until these run again.

Only keys of the current policy are kept, for models that continue from keys alone.
"""

from dataclasses import dataclass

import torch

from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request


class NoOffload:
    """Keeps nothing: whoever resumes computes its keys anew."""

    def save(self, request: Request) -> None:
        """A sequence is about to lose its blocks."""

    def restore(self, request: Request) -> None:
        """A sequence was given blocks again; what is put back into them counts as computed."""

    def drop(self, request: Request) -> None:
        """A sequence ended."""

    def clear(self) -> None:
        """The policy ended under which keys were computed."""


@dataclass(slots=True)
class _Kept:
    """Whole blocks of one sequence, a tensor for each of the cache's."""

    num_computed: int
    blocks: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.blocks)


class KVOffloader(NoOffload):
    """Takes blocks out of a cache and puts them back into others."""

    def __init__(self, storage: CacheStorage, block_size: int, max_bytes: int) -> None:
        """Keep nothing yet, and at most `max_bytes` at once."""
        self._storage, self._block_size, self._max_bytes = storage, block_size, max_bytes
        self._kept: dict[str, _Kept] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(kept.num_bytes for kept in self._kept.values())

    def save(self, request: Request) -> None:
        """Copy what a sequence has in the cache, if there is room and others may not rely on it."""
        if request.has_old_keys:
            return
        num_blocks = -(-request.num_computed // self._block_size)
        pages = self._storage.cache.tensors
        size = sum(tensor[: self._block_size].nbytes for tensor in pages) * num_blocks
        if self.num_bytes + size > self._max_bytes:
            return
        block_ids = request.block_ids[:num_blocks]
        blocks = [self._blocks(p).index_select(0, _index(block_ids, p)).cpu() for p in pages]
        self._kept[request.request_id] = _Kept(request.num_computed, blocks)

    def restore(self, request: Request) -> None:
        """Put a sequence's keys into its new blocks, beside those that it shares already."""
        kept = self._kept.pop(request.request_id, None)
        if kept is None or kept.num_computed <= request.num_computed:
            return
        first = request.num_computed // self._block_size
        num_blocks = kept.blocks[0].shape[0]
        block_ids = request.block_ids[first:num_blocks]
        for pages, blocks in zip(self._storage.cache.tensors, kept.blocks, strict=True):
            target = self._blocks(pages)
            target.index_copy_(0, _index(block_ids, pages), blocks[first:].to(pages.device))
        request.num_computed = kept.num_computed

    def drop(self, request: Request) -> None:
        """Forget a sequence that ended."""
        self._kept.pop(request.request_id, None)

    def clear(self) -> None:
        """Forget all: their policy is over."""
        self._kept.clear()

    def _blocks(self, pages_NF: torch.Tensor) -> torch.Tensor:
        return pages_NF.view(-1, self._block_size, pages_NF.shape[1])


def _index(block_ids: list[int], pages: torch.Tensor) -> torch.Tensor:
    return devices.to_device(block_ids, pages.device)
