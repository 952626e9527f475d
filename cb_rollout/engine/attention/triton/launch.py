"""Launch the kernels of a decode step. Imports Triton, so nothing imports it at the top.

B: rows, H: query heads, K: key heads, D: size of a key, E: size of a value. Of a grouped product:
S: rows, G: groups, M: size of a row, N: size of a result.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Triton types compile-time arguments as `constexpr`, but takes plain values and launch options.

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.attention.backend import AttentionMetadata, AttentionSpec
from cb_rollout.engine.attention.decode_cache import DecodeLayer
from cb_rollout.engine.attention.triton.kernels import (
    attend_kernel,
    grouped_product_kernel,
    join_kernel,
    write_kernel,
)
from cb_rollout.engine.attention.triton.work_list import WorkList, cut

# The fewest that a tensor-core product takes.
MIN_TILE_ROWS = 16

# Columns of one tile of a grouped product, and bytes of a row. A tile has at most as many rows as a
# row of it has numbers, which is what registers hold.
PRODUCT_COLUMNS, PRODUCT_BYTES = 64, 128

# Queries packed over one shared stretch, in 16 bits at head sizes up to 128, and otherwise: as many
# as registers and shared memory hold.
SHARED_TILE_ROWS, WIDE_SHARED_TILE_ROWS = 64, 32

# float32 products take no tensor cores, and twice the registers: with fewer warps they spill, as do
# shared tiles of large heads. A program that attends over all keys of a row spills with more.
NUM_WARPS, WIDE_NUM_WARPS = 4, 8

# Tiles of keys in flight: `scripts/gpu_bench.py --parts stages` times others on a card.
NUM_STAGES = 2

# More keys at a time would leave a short row's tile half empty.
MAX_TILE_KEYS = 128

# Numbers of partial outputs that a join holds at a time.
JOINED_NUMBERS = 4096

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

DTYPES = {kind: dtype for dtype, kind in TYPES.items()}

# Triton's names of the dtypes of a layer's keys and values.
Types = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class TritonPagedAttention:
    """Attend over the pages of one decode step; a `PagedAttention`."""

    metadata: AttentionMetadata
    rows_per_tile: dict[int, int]
    """Rows of a shared tile by layer; each layer sets its own as it attends."""
    work: dict[int | None, WorkList] = field(default_factory=dict)
    """The step's stretches, cut by the first layer of each window."""

    def attend(
        self,
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Write new keys and values, then attend, as `PagedAttention` says."""
        types = TYPES[layer.key_dtype], TYPES[layer.value_dtype]
        num_key_heads, E = layer.num_key_heads, layer.value_size
        write(key[:, :, 0], value[:, :, 0], self.metadata, layer.index, types)
        heads_per_key = query.shape[1] // num_key_heads
        self.rows_per_tile[layer.index] = shared_rows(heads_per_key, max(query.shape[3], E), types)
        queries_BHD = query[:, :, 0]
        if self.metadata.num_stretches and spec.window not in self.work:
            self.work[spec.window] = cut(self.metadata, spec.window)
        work = self.work.get(spec.window)
        step = self.metadata, layer.index, types, spec, work
        outputs_BHE = attend(queries_BHD, num_key_heads, E, *step)
        return outputs_BHE[:, None]


def shared_rows(heads_per_key: int, size: int, types: Types) -> int:
    """Return the number of rows whose queries of one key head, each of `size`, fit a tile."""
    is_wide = size > 128 or tl.float32 in types
    tile_rows = WIDE_SHARED_TILE_ROWS if is_wide else SHARED_TILE_ROWS
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
        _layer_addresses(metadata, layer),
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
    work: WorkList | None,
) -> torch.Tensor:
    """Return the attention of each row's newest token over all of its keys.

    Args:
        queries_BHD: the new tokens' queries; the kernel casts them to the keys' dtype.
        num_key_heads: K, the heads of the pages.
        value_size: E.
        metadata: the step's rows.
        layer: index of the layer.
        types: of the layer's pages.
        spec: scale, window, cap and sinks.
        work: the stretches of its window; None: one program attends over all keys of a row.

    Returns:
        `[B, H, E]` in the values' dtype; zeros where a row has no tokens.
    """
    B, H, _ = queries_BHD.shape
    outputs_BHE = queries_BHD.new_empty(B, H, value_size, dtype=DTYPES[types[1]])
    partials = sums = outputs_BHE
    if work is not None:
        partials = outputs_BHE.new_empty(work.max_parts, H, value_size, dtype=torch.float32)
        sums = outputs_BHE.new_empty(work.max_parts, H, dtype=torch.float32)
    launches = _Launches(
        _dense(queries_BHD),
        outputs_BHE,
        partials,
        sums,
        metadata,
        layer,
        types,
        spec,
        work,
        num_key_heads,
    )
    launches.attend(is_shared=False)
    if work is not None:
        if metadata.shared_B is not None:
            launches.attend(is_shared=True)
        launches.join(work)
    return outputs_BHE


@dataclass(slots=True)
class _Launches:
    """The launches of one layer's attention."""

    queries_BHD: torch.Tensor
    outputs_BHE: torch.Tensor
    partials: torch.Tensor
    """float32, `[parts, H, E]`; the outputs themselves if nothing is cut."""
    sums: torch.Tensor
    """float32, `[parts, H]`: each part's log-sum-exp, base 2."""
    metadata: AttentionMetadata
    layer: int
    types: Types
    spec: AttentionSpec
    work: WorkList | None
    num_key_heads: int

    def _or_any(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor, or for None one that the kernels will not read."""
        return self.metadata.lengths_B if tensor is None else tensor

    def attend(self, *, is_shared: bool) -> None:
        """Attend over the rows' own keys, or over the prompts of shared tiles."""
        metadata, spec, work = self.metadata, self.spec, self.work
        B, H, D, E = *self.queries_BHD.shape, self.outputs_BHE.shape[2]
        num_key_heads = self.num_key_heads
        items = None if work is None else work.shared_S if is_shared else work.own_O
        rows = metadata.rows_per_tile if is_shared else 1
        is_wide = tl.float32 in self.types or (is_shared and max(D, E) > 128)
        tile_keys = _tile_keys(triton.next_power_of_2(max(D, E, MIN_TILE_ROWS)), self.types)
        attend_kernel[(B if items is None else items.shape[0], num_key_heads)](
            self.queries_BHD,
            self.outputs_BHE,
            self.partials,
            self.sums,
            metadata.addresses,
            _layer_addresses(metadata, self.layer),
            metadata.table_rows_B,
            metadata.lengths_B,
            self._or_any(metadata.shared_B),
            self._or_any(metadata.first_T),
            self._or_any(metadata.count_T),
            self._or_any(spec.sinks_H),
            *self.queries_BHD.stride()[:2],
            self._or_any(items),
            self._or_any(work and work.sizes),
            self._or_any(work and work.first_parts),
            self._or_any(work and work.own_counts_B),
            float(spec.scale),
            float(spec.softcap or 0.0),
            int(spec.window or 0),
            BLOCK_SIZE=metadata.block_size,
            NUM_HEADS=H,
            NUM_KEY_HEADS=num_key_heads,
            KEY_SIZE=D,
            VALUE_SIZE=E,
            KEY_TYPE=self.types[0],
            VALUE_TYPE=self.types[1],
            IS_INTERPRETED=knobs.runtime.interpret,
            IS_SHARED=is_shared,
            HAS_SHARED=metadata.shared_B is not None,
            HAS_WINDOW=spec.window is not None,
            HAS_SOFTCAP=spec.softcap is not None,
            HAS_SINKS=spec.sinks_H is not None,
            IS_WHOLE=work is None,
            TILE_ROWS=max(MIN_TILE_ROWS, triton.next_power_of_2(rows * (H // num_key_heads))),
            TILE_KEYS=tile_keys,
            KEY_WIDTH=triton.next_power_of_2(max(D, MIN_TILE_ROWS)),
            VALUE_WIDTH=triton.next_power_of_2(max(E, MIN_TILE_ROWS)),
            num_warps=WIDE_NUM_WARPS if work and is_wide else NUM_WARPS,
            num_stages=NUM_STAGES,
        )

    def join(self, work: WorkList) -> None:
        """Join the parts of each row and head."""
        B, H, E = self.outputs_BHE.shape
        heads_width = triton.next_power_of_2(H // self.num_key_heads)
        value_width = triton.next_power_of_2(E)
        join_kernel[(B, self.num_key_heads)](
            self.outputs_BHE,
            self.partials,
            self.sums,
            work.first_parts,
            self._or_any(self.spec.sinks_H),
            NUM_HEADS=H,
            NUM_KEY_HEADS=self.num_key_heads,
            VALUE_SIZE=E,
            HAS_SINKS=self.spec.sinks_H is not None,
            PARTS=max(1, JOINED_NUMBERS // (heads_width * value_width)),
            HEADS_WIDTH=heads_width,
            VALUE_WIDTH=value_width,
            num_warps=4,
        )


def grouped_product(
    rows_SM: torch.Tensor, weights_GMN: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    """Return each row times its group's weight, `[S, N]`, as torch's `grouped_mm`.

    Args:
        rows_SM: float32, bfloat16 or float16; the rows of a group are neighbours.
        weights_GMN: of the same dtype, with any strides.
        ends_G: int32; the row after each group's last. Rows after the last group are not written.
    """
    (S, M), (G, _, N) = rows_SM.shape, weights_GMN.shape
    rows_SM = rows_SM if rows_SM.stride(1) == 1 else rows_SM.contiguous()
    outputs_SN = rows_SM.new_empty(S, N)
    tile_rows = triton.next_power_of_2(-(-S // G))
    tile_size = PRODUCT_BYTES // rows_SM.element_size()
    tile_rows = min(tile_size, max(MIN_TILE_ROWS, tile_rows))
    # Every group may end with a tile that is not full.
    num_tiles = S // tile_rows + min(S, G)
    is_rounded = torch_compat.rounds_float32_products(rows_SM.device)
    grouped_product_kernel[(num_tiles, triton.cdiv(N, PRODUCT_COLUMNS))](
        rows_SM,
        weights_GMN,
        ends_G,
        outputs_SN,
        G,
        M,
        N,
        rows_SM.stride(0),
        *weights_GMN.stride(),
        IS_INTERPRETED=knobs.runtime.interpret,
        PRECISION="tf32" if is_rounded else "ieee",
        GROUPS_WIDTH=triton.next_power_of_2(G),
        TILE_ROWS=tile_rows,
        TILE_SIZE=tile_size,
        TILE_COLUMNS=PRODUCT_COLUMNS,
        num_warps=4,
        num_stages=3,
    )
    return outputs_SN


def _layer_addresses(metadata: AttentionMetadata, layer: int) -> torch.Tensor:
    return metadata.addresses[2 * layer + 2 : 2 * layer + 4]


def _tile_keys(width: int, types: Types) -> int:
    """Return the keys read at a time: shared memory of any card since Ampere holds them twice."""
    is_single = tl.float32 in types
    return min(MAX_TILE_KEYS, max(MIN_TILE_ROWS, (2048 if is_single else 8192) // width))


def _dense(states: torch.Tensor) -> torch.Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()
