"""Decode steps of one model on the pages themselves, on a CPU.

B: rows, V: vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cb_rollout.engine.attention import cpp_layers
from cb_rollout.engine.attention.cpp_decode import attend
from cb_rollout.engine.attention.decode_cache import DecodeCache, DecodeLayer
from cb_rollout.engine.attention.listed_forward import ListedForward
from cb_rollout.engine.attention.places import Form, NotOrdinaryError
from cb_rollout.engine.attention.seam import Forward
from cb_rollout.engine.block_table import BlockTable
from cb_rollout.engine.cache import PagedCache, PagedLayer
from cb_rollout.engine.probe import CacheLayout


@dataclass(frozen=True, slots=True)
class CppReader:
    """Attends by a C++ kernel that reads the pages where they lie, for one step."""

    cache: PagedCache
    table: BlockTable
    slots_B: torch.Tensor
    lengths_B: torch.Tensor

    def attend(
        self,
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        form: Form,
    ) -> torch.Tensor:
        """See `Reader`; everything in the pages' type."""
        given = {query.dtype, key.dtype, value.dtype}
        if given != {layer.key_dtype} or layer.value_dtype != layer.key_dtype:
            raise NotOrdinaryError(
                f"its queries are {query.dtype}, its keys {key.dtype}, its values {value.dtype}, "
                f"and its pages {layer.key_dtype} and {layer.value_dtype}"
            )
        paged = self.cache.layers[layer.index]
        assert isinstance(paged, PagedLayer)
        where = paged.pages, self.table, self.slots_B, self.lengths_B
        return attend(query, key, value, *where, form)


class CppDecoding:
    """Runs decode steps with no gather, on a CPU."""

    def __init__(self, layout: CacheLayout) -> None:
        """Prepare for pages of this layout."""
        self.cache = DecodeCache(layout, torch.device("cpu"))
        self.listed = ListedForward(self.cache, can_be_listed=not layout.is_recurrent)
        if self.listed.can_be_listed:
            cpp_layers.prepare(self.cache.paged[0].key_dtype)

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
        lengths_B, slots_B = torch.tensor(lengths), torch.tensor(slots)
        reader = CppReader(cache, table, slots_B, lengths_B)
        tokens_B1 = torch.tensor(new_tokens)
        return self.listed(forward, reader, tokens_B1, (lengths_B - 1)[:, None], slots_B, cache)
