"""Receive tensors that a trainer broadcasts, by a gloo group of torch.distributed.

Owns one group, apart from the process's own: rank 0 is the trainer, which also holds the store at
`master_address:master_port`. A trainer makes its side by `join`, or by the two constructors in it.
Called on the thread of weight updates.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from cb_rollout.errors import WeightSyncError, error_text
from cb_rollout.server.rl.staged_weights import require_equal_digest

# The prefix of the group's keys in the store.
PREFIX = "cb_rollout"

# Name, dtype and shape.
Described = tuple[str, torch.dtype, tuple[int, ...]]


class WeightGroup:
    """A group with one trainer, whose rank is 0."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @classmethod
    def join(
        cls, master_address: str, master_port: int, rank: int, world_size: int, seconds: float
    ) -> Self:
        """Join the group; waits for its other processes.

        Args:
            master_address: host of rank 0, which holds the store.
            master_port: port of the store.
            rank: of this process.
            world_size: number of processes.
            seconds: longest wait for them, and of each broadcast.

        Raises:
            WeightSyncError: the processes did not meet.
        """
        timeout = timedelta(seconds=seconds)
        try:
            store = dist.TCPStore(
                master_address,
                master_port,
                is_master=rank == 0,
                timeout=timeout,
                wait_for_workers=False,
            )
            prefixed = dist.PrefixStore(PREFIX, store)
            return cls(dist.ProcessGroupGloo(prefixed, rank, world_size, timeout))
        except (RuntimeError, ValueError) as error:
            raise WeightSyncError(
                f"no group was formed at {master_address}:{master_port} ({error_text(error)})."
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor from rank 0 to the others, in place.

        Raises:
            WeightSyncError: a process is gone, or too slow.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise WeightSyncError(f"the broadcast was cut off ({error_text(error)}).") from error

    def receive(
        self, tensors: Sequence[Described], buffer_bytes: int | None, sha256: str | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the trainer broadcasts, in its order.

        Args:
            tensors: their descriptions.
            buffer_bytes: None: one broadcast a tensor; else vLLM's packing: a broadcast has the
                next tensors, as bytes, up to the first with which it has more than this.
            sha256: digest of all bytes in this order, checked after the last; None: not checked.

        Raises:
            WeightSyncError: the broadcasts ended early, or the digest differs.
        """
        digest = hashlib.sha256()
        for part in _parts(tensors, buffer_bytes):
            received = self._received(part, is_packed=buffer_bytes is not None)
            for (name, _, _), tensor in zip(part, received, strict=True):
                if sha256 is not None:
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
                yield name, tensor
        if sha256 is not None:
            require_equal_digest("what was received", digest.hexdigest(), sha256)

    def _received(self, part: Sequence[Described], is_packed: bool) -> list[torch.Tensor]:
        """Return the tensors of one broadcast."""
        if not is_packed:
            ((_, dtype, shape),) = part
            tensor = torch.empty(shape, dtype=dtype)
            self.broadcast(tensor)
            return [tensor]
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in part]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        self.broadcast(buffer)
        # A view of another dtype must begin at a multiple of its size, which a copy does.
        return [
            raw.clone().view(dtype).view(shape)
            for (_, dtype, shape), raw in zip(part, buffer.split(sizes), strict=True)
        ]


def _parts(tensors: Sequence[Described], buffer_bytes: int | None) -> Iterator[list[Described]]:
    """Yield the tensors of each broadcast."""
    part: list[Described] = []
    num_bytes = 0
    for described in tensors:
        _, dtype, shape = described
        part.append(described)
        num_bytes += math.prod(shape) * dtype.itemsize
        if buffer_bytes is None or num_bytes > buffer_bytes:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part
