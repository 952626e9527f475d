"""Decode steps of one model on the pages themselves, on a CPU.

B: rows, V: vocabulary.
"""

from collections.abc import Sequence

import torch

from cb_rollout.engine.attention.backend import Forward
from cb_rollout.engine.attention.cpu import few_row_linear
from cb_rollout.engine.attention.cpu.attention import CpuPagedAttention
from cb_rollout.engine.attention.cpu.traced_forward import TracedForward
from cb_rollout.engine.attention.decode_cache import DecodeCache
from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import PagedCache
from cb_rollout.engine.memory import device as devices

CPU = torch.device("cpu")


class CpuBackend:
    """Runs decode steps with no gather, on a CPU."""

    def __init__(self, layout: CacheLayout) -> None:
        """Prepare for pages of this layout."""
        self.cache = DecodeCache(layout, CPU)
        self.traced_forward = TracedForward(self.cache, can_be_traced=not layout.is_recurrent)
        if self.traced_forward.can_be_traced:
            few_row_linear.prepare(self.cache.paged[0].key_dtype)

    def check_weights(self, model: torch.nn.Module) -> None:
        """Forget what relies on weights that no longer are where they were."""
        self.traced_forward.check_weights(model)

    def logits(
        self,
        forward: Forward,
        new_tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        table_rows: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
    ) -> torch.Tensor:
        """As `ModelRunner.logits`, for rows of one new token each."""
        tokens = [token_id for (token_id,) in new_tokens]
        tokens_B, lengths_B, table_rows_B = (
            devices.to_device(v, CPU) for v in (tokens, lengths, table_rows)
        )
        attention = CpuPagedAttention(cache, table, table_rows_B, lengths_B)
        positions_B1 = (lengths_B - 1)[:, None]
        return self.traced_forward(
            forward, attention, tokens_B[:, None], positions_B1, table_rows_B, cache
        )
