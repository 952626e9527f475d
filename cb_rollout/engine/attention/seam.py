"""What a runner expects of whatever runs its decode steps without a gather.

B: rows, V: vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from transformers.cache_utils import Cache

from cb_rollout.engine.block_table import BlockTable
from cb_rollout.engine.cache import PagedCache

Forward = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Cache], torch.Tensor]
# Token ids, mask, positions and cache to float32 logits: one call of the model.


class Decoding(Protocol):
    """Runs decode steps without a gather."""

    def logits(
        self,
        forward: Forward,
        new_tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        slots: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
    ) -> torch.Tensor:
        """As `ModelRunner.logits`, for rows of one new token each."""
        ...

    def check_weights(self, model: torch.nn.Module) -> None:
        """Forget what relies on weights that no longer are where they were."""
        ...
