"""Launch the kernels of a decode step. Imports Triton, so nothing imports it at the top.

Keys are cut into stretches on the device, and one program attends over each. A stretch is as long
as keeps all processors busy, for the keys that all rows have together. So one long row among short
ones is cut alone, and a prompt that one group shares is cut as well. A list of fixed size holds the
stretches, so a captured CUDA graph stays valid while rows grow.

B: rows, H: query heads, K: key heads, D: size of a key, E: size of a value, T: shared tiles, O:
most stretches of rows' own keys, S: most of shared prompts. Of a grouped product: S: rows, G:
groups, M: size of a row, N: size of a result.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Triton types compile-time arguments as `constexpr`, but takes plain values and launch options.

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton import knobs

from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.attention.decode_cache import AttentionSpec, DecodeLayer
from cb_rollout.engine.attention.shared_prefix import AttentionMetadata
from cb_rollout.engine.attention.triton.kernels import (
    attend_kernel,
    cut_kernel,
    grouped_product_kernel,
    join_kernel,
    move_states_kernel,
    write_kernel,
)
from cb_rollout.engine.kv_cache.layout import TensorSpec
from cb_rollout.engine.numerics.kernels import with_unit_stride

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

# Stages of the loop over keys: `scripts/gpu_bench.py --parts stages` times others on a card.
NUM_STAGES, FEW_ROW_STAGES, FEW_ROWS = 2, 3, 8

# More keys at a time would leave a short row's tile half empty.
MAX_TILE_KEYS = 128

# Numbers of partial outputs that a join holds at a time.
JOINED_NUMBERS = 4096

# Numbers of a state that a program copies, more of which spill registers, and the type that states
# are copied as, by bytes of a number.
STATE_CHUNK = 1024
COPIED = {
    1: (torch.int8, tl.int8),
    2: (torch.int16, tl.int16),
    4: (torch.int32, tl.int32),
    8: (torch.int64, tl.int64),
}

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Queries, outputs, and of stretches partial outputs and the log-sum-exp of each."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """The stretches of one step, for the layers of one window; all tensors are int32."""

    sizes: torch.Tensor
    """Keys of a stretch of rows' own keys, and of a stretch of shared prompts."""
    own_O: torch.Tensor
    """Items: row x `MAX_SPLITS` + the stretch's number; -1: there is no such stretch."""
    shared_S: torch.Tensor
    """Items of tiles, in the same way."""
    first_parts: torch.Tensor
    """`[B + 1]`: each row's first part among all partial outputs, and the end of the last."""
    own_counts_B: torch.Tensor
    """Parts of each row's own keys, which stand before those of its shared prompt."""
    max_parts: int
    """Most parts of all rows together."""


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
        write(key[:, :, 0], value[:, :, 0], layer, self.metadata)
        heads_per_key = query.shape[1] // layer.num_key_heads
        self.rows_per_tile[layer.index] = shared_rows(heads_per_key, layer)
        if self.metadata.num_stretches and spec.window not in self.work:
            self.work[spec.window] = cut(self.metadata, spec.window)
        work = self.work.get(spec.window)
        return attend(query[:, :, 0], layer, self.metadata, spec, work)[:, None]


def shared_rows(heads_per_key: int, layer: DecodeLayer) -> int:
    """Return the number of rows whose queries of one key head of a layer fit a tile."""
    is_wide = max(layer.key_size, layer.value_size) > 128 or _is_single(layer)
    tile_rows = WIDE_SHARED_TILE_ROWS if is_wide else SHARED_TILE_ROWS
    return max(1, tile_rows // heads_per_key)


def num_stages(num_rows: int, *, is_split: bool) -> int:
    """Return the stages of the loop over rows' own keys.

    Modelled, not measured: with two, a tile waits for its block ids before its keys; three read
    the ids a tile ahead, but an H100's processor then holds four programs, not five. Few rows that
    are split launch about four programs a processor. Many rows launch more, which hide the wait.
    """
    return FEW_ROW_STAGES if is_split and num_rows <= FEW_ROWS else NUM_STAGES


def write(
    keys_BKD: torch.Tensor,
    values_BKE: torch.Tensor,
    layer: DecodeLayer,
    metadata: AttentionMetadata,
) -> None:
    """Write each row's newest key and value into its page."""
    (B, K, D), E = keys_BKD.shape, values_BKE.shape[-1]
    keys_BKD, values_BKE = with_unit_stride(keys_BKD), with_unit_stride(values_BKE)
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
        KEY_TYPE=TYPES[layer.key_dtype],
        VALUE_TYPE=TYPES[layer.value_dtype],
        WIDTH=triton.next_power_of_2(K * max(D, E)),
    )


def attend(
    queries_BHD: torch.Tensor,
    layer: DecodeLayer,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    work: WorkList | None,
) -> torch.Tensor:
    """Return the attention of each row's newest token over all of its keys.

    The kernel casts queries to the keys' dtype. `work`: the stretches of the layer's window; None:
    one program attends over all keys of a row. Returns `[B, H, E]` in the values' dtype, zeros
    where a row has no tokens.
    """
    (B, H, _), E = queries_BHD.shape, layer.value_size
    outputs_BHE = queries_BHD.new_empty(B, H, E, dtype=layer.value_dtype)
    # Each part's output, and its log-sum-exp, base 2.
    partials = sums = None
    if work is not None:
        partials = outputs_BHE.new_empty(work.max_parts, H, E, dtype=torch.float32)
        sums = outputs_BHE.new_empty(work.max_parts, H, dtype=torch.float32)
    buffers = with_unit_stride(queries_BHD), outputs_BHE, partials, sums
    _launch_attend(buffers, layer, metadata, spec, work, is_shared=False)
    if work is not None:
        if metadata.shared_B is not None:
            _launch_attend(buffers, layer, metadata, spec, work, is_shared=True)
        _launch_join(buffers, layer, spec.sinks_H, work)
    return outputs_BHE


def _launch_attend(
    buffers: Buffers,
    layer: DecodeLayer,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    work: WorkList | None,
    *,
    is_shared: bool,
) -> None:
    """Attend over the rows' own keys, or over the prompts of shared tiles."""
    queries_BHD, K, D, E = buffers[0], layer.num_key_heads, layer.key_size, layer.value_size
    B, H, _ = queries_BHD.shape
    items = None if work is None else work.shared_S if is_shared else work.own_O
    rows = metadata.rows_per_tile if is_shared else 1
    is_wide = _is_single(layer) or (is_shared and max(D, E) > 128)
    width = triton.next_power_of_2(max(D, E, MIN_TILE_ROWS))
    attend_kernel[(B if items is None else items.shape[0], K)](
        *buffers,
        metadata.addresses,
        _layer_addresses(metadata, layer),
        metadata.table_rows_B,
        metadata.lengths_B,
        *(metadata.shared_B, metadata.first_T, metadata.count_T),
        spec.sinks_H,
        *queries_BHD.stride()[:2],
        items,
        *((work.sizes, work.first_parts, work.own_counts_B) if work else (None,) * 3),
        float(spec.scale),
        spec.softcap,
        spec.window,
        BLOCK_SIZE=metadata.block_size,
        NUM_HEADS=H,
        NUM_KEY_HEADS=K,
        KEY_SIZE=D,
        VALUE_SIZE=E,
        KEY_TYPE=TYPES[layer.key_dtype],
        VALUE_TYPE=TYPES[layer.value_dtype],
        IS_INTERPRETED=knobs.runtime.interpret,
        IS_SHARED=is_shared,
        TILE_ROWS=max(MIN_TILE_ROWS, triton.next_power_of_2(rows * (H // K))),
        TILE_KEYS=_tile_keys(width, layer),
        KEY_WIDTH=triton.next_power_of_2(max(D, MIN_TILE_ROWS)),
        VALUE_WIDTH=triton.next_power_of_2(max(E, MIN_TILE_ROWS)),
        num_warps=WIDE_NUM_WARPS if work and is_wide else NUM_WARPS,
        num_stages=num_stages(B, is_split=work is not None and not is_shared),
    )


def _launch_join(
    buffers: Buffers,
    layer: DecodeLayer,
    sinks_H: torch.Tensor | None,
    work: WorkList,
) -> None:
    """Join the parts of each row and head."""
    B, H, E = buffers[1].shape
    heads_width = triton.next_power_of_2(H // layer.num_key_heads)
    value_width = triton.next_power_of_2(E)
    join_kernel[(B, layer.num_key_heads)](
        *buffers[1:],
        work.first_parts,
        sinks_H,
        NUM_HEADS=H,
        NUM_KEY_HEADS=layer.num_key_heads,
        VALUE_SIZE=E,
        PARTS=max(1, JOINED_NUMBERS // (heads_width * value_width)),
        HEADS_WIDTH=heads_width,
        VALUE_WIDTH=value_width,
        num_warps=4,
    )


def cut(metadata: AttentionMetadata, window: int | None) -> WorkList:
    """Cut the keys of a step, by one launch.

    Args:
        metadata: the step; `num_stretches` is not 0.
        window: newest tokens that the layers see; None: all.
    """
    lengths_B = metadata.lengths_B
    B, extra = lengths_B.shape[0], metadata.num_stretches
    has_shared = metadata.shared_B is not None
    T = 0 if metadata.first_T is None else metadata.first_T.shape[0]
    num_shared = T + extra if has_shared else 0
    # A tile of full size has a part of each of its rows in every stretch.
    max_parts = B + extra + (B + metadata.rows_per_tile * extra if has_shared else 0)
    work = WorkList(
        lengths_B.new_empty(2),
        lengths_B.new_empty(B + extra),
        lengths_B.new_empty(num_shared),
        lengths_B.new_empty(B + 1),
        lengths_B.new_empty(B),
        max_parts,
    )
    cut_kernel[(1,)](
        lengths_B,
        *(metadata.shared_B, metadata.first_T, metadata.count_T),
        *(work.sizes, work.own_O, work.shared_S, work.first_parts, work.own_counts_B),
        *(B, T, B + extra, num_shared),
        *(extra, metadata.least_stretch, metadata.stretch_interval, window),
        ROWS_WIDTH=triton.next_power_of_2(B),
        TILES_WIDTH=triton.next_power_of_2(max(1, T)),
        OWN_WIDTH=triton.next_power_of_2(B + extra),
        SHARED_WIDTH=triton.next_power_of_2(max(1, num_shared)),
        num_warps=4,
    )
    return work


@dataclass(frozen=True, slots=True)
class StateTable(TensorSpec):
    """A table of one state, with a row for each sequence."""

    number: int
    """Place of its address in `AttentionMetadata.addresses`."""


def move_states(
    table: StateTable, metadata: AttentionMetadata, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Load the rows' states from a table, or save `rows` there; return them, `[B, *table.shape]`.

    An empty row gets zeros, and is not saved.
    """
    shape, is_loaded = (metadata.lengths_B.shape[0], *table.shape), rows is None
    if rows is None:
        rows = metadata.addresses.new_empty(shape, dtype=table.dtype)
    assert (tuple(rows.shape), rows.dtype) == (shape, table.dtype), "another state is saved"
    copied, pointed = COPIED[table.dtype.itemsize]
    move_states_kernel[(shape[0], triton.cdiv(table.num_elements, STATE_CHUNK))](
        rows.contiguous().view(copied),
        metadata.addresses[table.number :],
        metadata.table_rows_B,
        metadata.lengths_B,
        table.num_elements,
        TYPE=pointed,
        CHUNK=STATE_CHUNK,
        IS_LOADED=is_loaded,
    )
    return rows


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


def _layer_addresses(metadata: AttentionMetadata, layer: DecodeLayer) -> torch.Tensor:
    return metadata.addresses[2 * layer.index + 2 : 2 * layer.index + 4]


def _is_single(layer: DecodeLayer) -> bool:
    return torch.float32 in (layer.key_dtype, layer.value_dtype)


def _tile_keys(width: int, layer: DecodeLayer) -> int:
    """Return the keys read at a time: shared memory of any card since Ampere holds them twice."""
    num_numbers = 2048 if _is_single(layer) else 8192
    return min(MAX_TILE_KEYS, max(MIN_TILE_ROWS, num_numbers // width))
