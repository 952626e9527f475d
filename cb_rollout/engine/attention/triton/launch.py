"""Launches the kernels of a decode step; needs nothing but torch and triton.

B: rows, H: query heads, K: key heads, D: size of a key, E: size of a value.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Triton calls a kernel's compile-time arguments `constexpr`, and is launched with plain values,
# and with options of its own beside them.

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from cb_rollout.engine.attention.backend import AttentionMetadata, AttentionSpec
from cb_rollout.engine.attention.triton.kernels import attend_kernel, join_kernel, write_kernel

MIN_TILE_ROWS = 16
# The least that a tensor-core product takes.

SHARED_TILE_ROWS, WIDE_SHARED_TILE_ROWS = 64, 32
# Queries packed over one shared stretch, at head sizes up to 128 and beyond: what registers and
# shared memory hold.

MAX_TILE_KEYS = 128
# More keys at a time would leave a short row's tile half empty.

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

Types = tuple[Any, Any]
# Triton's names of the dtypes of a layer's keys and values.


def shared_rows(heads_per_key: int, size: int) -> int:
    """Rows whose queries of one key head, each of `size`, fit a shared tile."""
    tile_rows = SHARED_TILE_ROWS if size <= 128 else WIDE_SHARED_TILE_ROWS
    return max(1, tile_rows // heads_per_key)


def write(
    keys_BKD: torch.Tensor,
    values_BKE: torch.Tensor,
    metadata: AttentionMetadata,
    layer: int,
    types: Types,
) -> None:
    """Write each row's newest key and value into its page."""
    B, K, D = keys_BKD.shape
    E = values_BKE.shape[-1]
    keys_BKD, values_BKE = _dense(keys_BKD), _dense(values_BKE)
    write_kernel[(B,)](
        keys_BKD,
        values_BKE,
        metadata.addresses,
        _of_layer(metadata, layer),
        metadata.table_rows_B,
        metadata.lengths_B,
        *keys_BKD.stride()[:2],
        *values_BKE.stride()[:2],
        BLOCK_SIZE=metadata.block_size,
        NUM_KEY_HEADS=K,
        KEY_SIZE=D,
        VALUE_SIZE=E,
        KEY_TYPE=types[0],
        VALUE_TYPE=types[1],
        WIDTH=triton.next_power_of_2(K * max(D, E)),
    )


def attend(
    queries_BHD: torch.Tensor,
    num_key_heads: int,
    value_size: int,
    metadata: AttentionMetadata,
    layer: int,
    types: Types,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Attention of each row's newest token over all of its keys.

    Args:
        queries_BHD: the new tokens' queries.
        num_key_heads: heads of the pages.
        value_size: E.
        metadata: where the rows lie.
        layer: which layer's pages.
        types: of its pages.
        spec: scale, window, cap and sinks.

    Returns:
        `[B, H, E]` in the queries' dtype; zeros where a row has no tokens.
    """
    B, H, D = queries_BHD.shape
    queries_BHD = _dense(queries_BHD)
    device = queries_BHD.device
    has_shared = metadata.first_T is not None
    num_shared = metadata.num_shared_splits if has_shared else 0
    num_parts = metadata.num_splits + num_shared
    outputs_BHE = torch.empty(B, H, value_size, dtype=queries_BHD.dtype, device=device)
    is_whole = num_parts == 1
    partials = sums = outputs_BHE
    if not is_whole:
        partials = torch.empty(B, H, num_parts, value_size, dtype=torch.float32, device=device)
        sums = torch.empty(B, H, num_parts, dtype=torch.float32, device=device)
    nothing = metadata.lengths_B
    sinks = nothing if spec.sinks_H is None else spec.sinks_H
    heads_per_key = H // num_key_heads

    def launch(num_units: int, num_splits: int, first_part: int, is_shared: bool) -> None:
        rows = metadata.rows_per_tile if is_shared else 1
        tile_rows = max(MIN_TILE_ROWS, triton.next_power_of_2(rows * heads_per_key))
        tile_keys = _tile_keys(triton.next_power_of_2(max(D, value_size, MIN_TILE_ROWS)), types)
        attend_kernel[(num_units * num_splits, num_key_heads)](
            queries_BHD,
            outputs_BHE,
            partials,
            sums,
            metadata.addresses,
            _of_layer(metadata, layer),
            metadata.table_rows_B,
            metadata.lengths_B,
            nothing if metadata.shared_B is None else metadata.shared_B,
            nothing if metadata.first_T is None else metadata.first_T,
            nothing if metadata.count_T is None else metadata.count_T,
            sinks,
            *queries_BHD.stride()[:2],
            num_splits,
            num_parts,
            first_part,
            float(spec.scale),
            float(spec.softcap or 0.0),
            int(spec.window or 0),
            BLOCK_SIZE=metadata.block_size,
            NUM_HEADS=H,
            NUM_KEY_HEADS=num_key_heads,
            KEY_SIZE=D,
            VALUE_SIZE=value_size,
            KEY_TYPE=types[0],
            VALUE_TYPE=types[1],
            IS_INTERPRETED=knobs.runtime.interpret,
            IS_SHARED=is_shared,
            HAS_SHARED=has_shared,
            HAS_WINDOW=spec.window is not None,
            HAS_SOFTCAP=spec.softcap is not None,
            HAS_SINKS=spec.sinks_H is not None,
            IS_WHOLE=is_whole,
            TILE_ROWS=tile_rows,
            TILE_KEYS=tile_keys,
            LEAST_STRETCH=-(-metadata.least_stretch // tile_keys) * tile_keys,
            KEY_WIDTH=triton.next_power_of_2(max(D, MIN_TILE_ROWS)),
            VALUE_WIDTH=triton.next_power_of_2(max(value_size, MIN_TILE_ROWS)),
            num_warps=4,
            num_stages=2,
        )

    launch(B, metadata.num_splits, 0, is_shared=False)
    if metadata.first_T is not None:
        num_tiles = metadata.first_T.shape[0]
        launch(num_tiles, num_shared, metadata.num_splits, is_shared=True)
    if not is_whole:
        join_kernel[(B, H)](
            outputs_BHE,
            partials,
            sums,
            nothing if metadata.shared_B is None else metadata.shared_B,
            sinks,
            num_parts,
            metadata.num_splits,
            NUM_HEADS=H,
            VALUE_SIZE=value_size,
            HAS_SHARED=has_shared,
            HAS_SINKS=spec.sinks_H is not None,
            PARTS_WIDTH=triton.next_power_of_2(num_parts),
            VALUE_WIDTH=triton.next_power_of_2(value_size),
        )
    return outputs_BHE


def _of_layer(metadata: AttentionMetadata, layer: int) -> torch.Tensor:
    return metadata.addresses[2 * layer + 2 : 2 * layer + 4]


def _tile_keys(width: int, types: Types) -> int:
    """Keys read at a time: as many as shared memory holds twice, for any card from Ampere on."""
    is_single = tl.float32 in types
    return min(MAX_TILE_KEYS, max(MIN_TILE_ROWS, (4096 if is_single else 8192) // width))


def _dense(states: torch.Tensor) -> torch.Tensor:
    """The same, with a token's numbers side by side."""
    return states if states.stride(-1) == 1 else states.contiguous()
