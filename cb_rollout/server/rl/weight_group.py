"""Receive tensors that a trainer broadcasts, over a gloo group separate from the process's own.

Rank 0 is the trainer, which also holds the store. It creates its side with `join`, or with the
constructors that `join` calls. Called on the thread of weight updates.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from cb_rollout.errors import WeightSyncError, error_text

# The prefix of the group's keys in the store.
PREFIX = "cb_rollout"

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")
}

# Name, dtype and shape.
Described = tuple[str, torch.dtype, tuple[int, ...]]


def described(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[Described]:
    """Return descriptions of tensors from vLLM's three lists; refuse dtypes not in `DTYPES`."""
    if not len(names) == len(dtype_names) == len(shapes):
        raise WeightSyncError("names, dtype_names and shapes differ in length.")
    if unknown := sorted(set(dtype_names) - DTYPES.keys()):
        raise WeightSyncError(f"the dtype {unknown[0]!r} is not one of {', '.join(DTYPES)}.")
    dtypes = map(DTYPES.__getitem__, dtype_names)
    return list(zip(names, dtypes, map(tuple, shapes), strict=True))


class WeightGroup:
    """A group with one trainer, whose rank is 0."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @classmethod
    def join(
        cls, master_address: str, master_port: int, rank: int, world_size: int, seconds: float
    ) -> Self:
        """Join a trainer's group.

        Args:
            master_address: host of the store, which rank 0 holds.
            master_port: port of the store.
            rank: rank of this process.
            world_size: number of processes in the group.
            seconds: longest wait for the processes, and for each broadcast.

        Raises:
            WeightSyncError: the processes did not come together in time.
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
        """Overwrite a tensor with rank 0's; `WeightSyncError`: a process is gone or slow."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise WeightSyncError(f"the broadcast was cut off ({error_text(error)}).") from error

    def receive(self, tensors: Sequence[Described]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the described tensors; `WeightSyncError`: the broadcasts ended early."""
        for name, dtype, shape in tensors:
            tensor = torch.empty(shape, dtype=dtype)
            self.broadcast(tensor)
            yield name, tensor
