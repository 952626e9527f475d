"""Attention of a decode step by a C++ kernel; compiled once for each form of a layer.

Called by the thread that runs a decode step.

B: rows, H: query heads, K: key heads, D: size of a key, E: size of a value, P: places of the pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from cb_rollout.engine.attention.backend import AttentionSpec, UnsupportedAttentionError
from cb_rollout.engine.attention.decode_cache import DecodeLayer
from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.paged import PagedCache, PagedLayer
from cb_rollout.engine.native.library import COUNT, NUMBER, TENSOR, TYPES, library

_STRIDED = (TENSOR, COUNT, COUNT, COUNT)
_ARGUMENTS = (
    *(_STRIDED * 3),
    *(TENSOR, TENSOR, TENSOR),
    *(TENSOR, COUNT, COUNT, TENSOR, TENSOR, COUNT),
    *(NUMBER, NUMBER, COUNT, TENSOR),
)


@dataclass(frozen=True, slots=True)
class CpuPagedAttention:
    """Attention of one step whose C++ kernel attends over the pages in place."""

    cache: PagedCache
    table: BlockTable
    table_rows_B: torch.Tensor
    lengths_B: torch.Tensor

    def attend(
        self,
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Attend as `PagedAttention` says; all tensors have the dtype of the pages."""
        given = {query.dtype, key.dtype, value.dtype}
        if given != {layer.key_dtype} or layer.value_dtype != layer.key_dtype:
            raise UnsupportedAttentionError(
                f"its queries are {query.dtype}, its keys {key.dtype}, its values {value.dtype}, "
                f"and its pages {layer.key_dtype} and {layer.value_dtype}"
            )
        paged = self.cache.layers[layer.index]
        assert isinstance(paged, PagedLayer)
        where = paged.pages, self.table, self.table_rows_B, self.lengths_B
        return attend(query, key, value, *where, spec)


def attend(
    query_BH1D: torch.Tensor,
    key_BK1D: torch.Tensor,
    value_BK1E: torch.Tensor,
    pages: Sequence[torch.Tensor],
    table: BlockTable,
    table_rows_B: torch.Tensor,
    lengths_B: torch.Tensor,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Write each row's newest key and value, and attend over all of its keys.

    Every row's are written before any row attends, so that rows of one table row see each other.

    Args:
        query_BH1D: the new tokens' queries, in one of `TYPES`, as all states.
        key_BK1D: their keys.
        value_BK1E: their values.
        pages: of keys and of values, `[P, K x D]` and `[P, K x E]`; written to.
        table: where each table row's blocks are.
        table_rows_B: int64.
        lengths_B: int64; each row's tokens, the new one included, at least one.
        spec: scale, window, cap and sinks.

    Returns:
        `[B, 1, H, E]`, in the query's dtype.

    Raises:
        Exception: what the compiler raises, at the first call for states of a spec.
    """
    B, H, _, D = query_BH1D.shape
    _, K, _, E = value_BK1E.shape
    outputs_B1HE = query_BH1D.new_empty(B, 1, H, E)
    sinks_H = None if spec.sinks_H is None else spec.sinks_H.to(query_BH1D.dtype).contiguous()
    blocks = table.blocks
    _kernel(query_BH1D.dtype, H, K, D, E)(
        *_strided(query_BH1D),
        *_strided(key_BK1D),
        *_strided(value_BK1E),
        outputs_B1HE.data_ptr(),
        pages[0].data_ptr(),
        pages[1].data_ptr(),
        blocks.data_ptr(),
        blocks.shape[1],
        table.block_size,
        table_rows_B.data_ptr(),
        lengths_B.data_ptr(),
        B,
        spec.scale,
        spec.softcap or 0.0,
        spec.window or 0,
        None if sinks_H is None else sinks_H.data_ptr(),
    )
    return outputs_B1HE


@cache
def _kernel(
    dtype: torch.dtype, num_heads: int, num_key_heads: int, key_size: int, value_size: int
) -> Any:
    """Compile the kernel for states of one form: known sizes let the compiler unroll loops."""
    kernel = library(
        "attend",
        REAL=TYPES[dtype],
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=num_key_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
    ).attend
    kernel.argtypes, kernel.restype = _ARGUMENTS, None
    return kernel


def _strided(states_BN1S: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the address of states, and the strides of rows, heads and numbers."""
    row, head, _, number = states_BN1S.stride()
    return states_BN1S.data_ptr(), row, head, number
