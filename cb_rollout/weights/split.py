"""Describe how the tensors of a copy are divided over a tensor-parallel group."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cb_rollout.compat import tensor_parallel as tensor_parallel_compat


@dataclass(frozen=True, eq=False)
class Split:
    """Division of a tensor along one dimension over the processes of a tensor-parallel group."""

    dim: int
    """Dimension that is divided, from 0."""
    indices: tuple[torch.Tensor, ...]
    """Indices along it that each process of the group holds: int64, ascending, on the CPU."""
    place: int
    """Place of this process in the group."""

    @property
    def own(self) -> torch.Tensor:
        """Return the indices that this process holds."""
        return self.indices[self.place]

    def part(self, whole: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Return this process's part of a whole tensor.

        Args:
            whole: the tensor, or a factor of it.
            dim: the factor's dimension that is the divided one of the tensor; None: `self.dim`.
        """
        return whole.index_select(self.dim if dim is None else dim, self.own.to(whole.device))


Splits = Sequence[Split | None]
"""For each of some tensors its division; None: every process holds it whole."""


def split_of(tensor: torch.Tensor) -> Split | None:
    """Return the division of a copy's tensor; None: each process holds it whole."""
    found = tensor_parallel_compat.split_indices(tensor)
    return None if found is None else Split(*found)


def parts(tensors: Sequence[torch.Tensor], splits: Splits | None) -> list[torch.Tensor]:
    """Return this process's parts of whole tensors; without `splits` the tensors themselves."""
    if splits is None:
        return list(tensors)
    return [
        tensor if split is None else split.part(tensor)
        for tensor, split in zip(tensors, splits, strict=True)
    ]
