"""Run a model's own forward again with other rounding errors of the same size.

The errors of one forward at one position share a cause, so they are a single random draw, whatever
the size of the vocabulary; by chance, a draw may be ten times smaller than the next. Called by the
thread that runs the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def redrawn_rounding(dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Shift this thread's embedding outputs by up to one unit in the last place.

    Every later operator then rounds different numbers. Weights and torch's random state do not
    change. Processes that share a forward must pass the same seed.

    Args:
        dtype: the forward's precision, whose unit is taken; under autocast, that of the products.
        seed: chooses the errors; one seed gives the same bits again.
    """
    with _MovedEmbeddings(dtype, seed):
        yield


class _MovedEmbeddings(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self._eps = torch.finfo(dtype).eps
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.embedding.default:
            return result
        # On the CPU, so that every device moves them alike.
        steps = torch.rand(result.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        moved = result.double() * (1 + self._eps * steps.to(result.device))
        return moved.to(result.dtype)
