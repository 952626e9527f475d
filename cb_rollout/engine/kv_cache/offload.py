"""Keep the keys of preempted sequences in system memory until they run again.

Keeps only keys of the current policy, for models without recurrent states. The scheduler calls it.
"""

import torch

from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request


class KVOffloader:
    """Copy blocks to system memory and back, up to `max_bytes` at once."""

    def __init__(self, storage: CacheStorage, block_size: int, max_bytes: int) -> None:
        self._storage, self._block_size, self._max_bytes = storage, block_size, max_bytes
        # Of each sequence: its computed tokens, and their blocks of each of the cache's tensors.
        self._saved: dict[str, tuple[int, list[torch.Tensor]]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, saved in self._saved.values() for tensor in saved)

    def save(self, request: Request) -> None:
        """Copy the computed blocks of a sequence, if they fit and are of the current policy."""
        if request.has_old_keys:
            return
        num_blocks = -(-request.num_computed // self._block_size)
        pages = self._storage.cache.tensors
        size = sum(tensor[: self._block_size].nbytes for tensor in pages) * num_blocks
        if self.num_bytes + size > self._max_bytes:
            return
        block_ids = request.block_ids[:num_blocks]
        blocks = [self._blocks(p).index_select(0, _index(block_ids, p)).cpu() for p in pages]
        self._saved[request.request_id] = request.num_computed, blocks

    def restore(self, request: Request) -> None:
        """Write saved keys into a sequence's new blocks, after those of a shared prefix."""
        num_computed, saved = self._saved.pop(request.request_id, (0, []))
        if num_computed <= request.num_computed:
            return
        first = request.num_computed // self._block_size
        block_ids = request.block_ids[first : saved[0].shape[0]]
        for pages, blocks in zip(self._storage.cache.tensors, saved, strict=True):
            target = self._blocks(pages)
            target.index_copy_(0, _index(block_ids, pages), blocks[first:].to(pages.device))
        request.num_computed = num_computed

    def drop(self, request: Request) -> None:
        self._saved.pop(request.request_id, None)

    def clear(self) -> None:
        self._saved.clear()

    def _blocks(self, pages_NF: torch.Tensor) -> torch.Tensor:
        return pages_NF.view(-1, self._block_size, pages_NF.shape[1])


def _index(block_ids: list[int], pages: torch.Tensor) -> torch.Tensor:
    return devices.to_device(block_ids, pages.device)
