"""Decode steps of one model on the pages themselves, on a CPU.

B: rows, V: vocabulary.
"""

from collections.abc import Sequence

import torch

from cb_rollout.engine import device as devices
from cb_rollout.engine.attention import few_row_linear
from cb_rollout.engine.attention.cpp_decode import CppReader
from cb_rollout.engine.attention.decode_cache import DecodeCache
from cb_rollout.engine.attention.listed_forward import ListedForward
from cb_rollout.engine.attention.seam import Forward
from cb_rollout.engine.block_table import BlockTable
from cb_rollout.engine.cache import PagedCache
from cb_rollout.engine.probe import CacheLayout

CPU = torch.device("cpu")


class CppDecoding:
    """Runs decode steps with no gather, on a CPU."""

    def __init__(self, layout: CacheLayout) -> None:
        """Prepare for pages of this layout."""
        self.cache = DecodeCache(layout, CPU)
        self.listed = ListedForward(self.cache, can_be_listed=not layout.is_recurrent)
        if self.listed.can_be_listed:
            few_row_linear.prepare(self.cache.paged[0].key_dtype)

    def check_weights(self, model: torch.nn.Module) -> None:
        """Forget what relies on weights that no longer are where they were."""
        self.listed.check_weights(model)

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
        tokens = [token_id for (token_id,) in new_tokens]
        tokens_B, lengths_B, slots_B = (devices.sent(v, CPU) for v in (tokens, lengths, slots))
        reader = CppReader(cache, table, slots_B, lengths_B)
        positions_B1 = (lengths_B - 1)[:, None]
        return self.listed(forward, reader, tokens_B[:, None], positions_B1, slots_B, cache)
