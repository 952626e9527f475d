"""Launch the kernels of a decode step. Imports Triton, so nothing imports it at the top.

Keys are cut into stretches on the device, and one program attends over each. The stretch length is
chosen so that all keys of the step together keep every processor busy. So one long row among short
ones is cut alone, and a prompt that a group shares is cut as well. A list of fixed size holds the
stretches, so a captured CUDA graph stays valid while rows grow.

B: rows, H: query heads, K: key heads, D: size of a key, E: size of a value, T: shared tiles, O:
maximum number of stretches of rows' own keys, S: of shared prompts. Of a grouped product: S: rows,
G: groups, M: size of a row, N: size of a result.
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

# The fewest rows of a tensor-core product.
MIN_TILE_ROWS = 16

# Columns of one tile of a grouped product, and bytes of one of its rows. A tile has at most as many
# rows as a row has numbers: more do not fit into registers.
PRODUCT_COLUMNS = 64
PRODUCT_BYTES = 128

# The most queries that are packed over one shared stretch: the first number in 16 bits with heads
# of at most 128, the second otherwise. More do not fit into registers and shared memory.
SHARED_TILE_ROWS = 64
WIDE_SHARED_TILE_ROWS = 32

# Warps of a program. A program that attends over all keys of a row spills registers with more than
# the first number. float32 products, which use no tensor cores and twice the registers, and shared
# tiles of large heads spill with fewer than the second.
NUM_WARPS = 4
WIDE_NUM_WARPS = 8

# Stages of the loop over keys: `scripts/gpu/bench.py --parts stages` times others on a card.
NUM_STAGES = 2
FEW_ROW_STAGES = 3
FEW_ROWS = 8

# The most rows and stretches that one program lists at no cost.
LEAST_CUT_WIDTH = 512

# More keys at a time would leave a short row's tile half empty.
MAX_TILE_KEYS = 128

# Numbers of partial outputs that a join holds at a time.
JOINED_NUMBERS = 4096

# Numbers of a state that one program copies: more spill registers. States are copied as integers of
# the same size, chosen by the bytes of a number.
STATE_CHUNK = 1024
COPIED = {
    1: (torch.int8, tl.int8),
    2: (torch.int16, tl.int16),
    4: (torch.int32, tl.int32),
    8: (torch.int64, tl.int64),
}

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Buffers:
    """The queries of one layer, and the buffers that its kernels write."""

    queries_BHD: torch.Tensor
    """Of any strides but the last, which is 1."""
    outputs_BHE: torch.Tensor
    """In the dtype of the pages of values."""
    partials: torch.Tensor | None = None
    """float32 `[parts, H, E]`: each part's output; None: no key is cut."""
    sums: torch.Tensor | None = None
    """float32 `[parts, H]`: each part's log-sum-exp, base 2; None: no key is cut."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """The stretches of one step, for the layers with the same window; all tensors are int32."""

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
        """Write the new states, and attend; Args: see `PagedAttention`."""
        write(key[:, :, 0], value[:, :, 0], layer, self.metadata)
        heads_per_key = query.shape[1] // layer.num_key_heads
        self.rows_per_tile[layer.index] = shared_rows(heads_per_key, layer)
        if self.metadata.num_stretches and spec.window not in self.work:
            self.work[spec.window] = cut(self.metadata, spec.window)
        work = self.work.get(spec.window)
        return attend(query[:, :, 0], layer, self.metadata, spec, work)[:, None]


def shared_rows(heads_per_key: int, layer: DecodeLayer) -> int:
    """Return the number of rows whose queries for one key head fit into a tile."""
    is_wide = max(layer.key_size, layer.value_size) > 128 or _is_single(layer)
    tile_rows = WIDE_SHARED_TILE_ROWS if is_wide else SHARED_TILE_ROWS
    return max(1, tile_rows // heads_per_key)


def num_stages(num_rows: int, *, is_split: bool) -> int:
    """Return the number of pipeline stages in the loop over rows' own keys.

    Modelled, not measured. With two stages, a tile waits for its block ids before it loads its
    keys. With three it reads the ids one tile ahead, but an H100's processor then holds four
    programs instead of five. A few split rows launch about four programs per processor; many rows
    launch more, which hide the wait.
    """
    return FEW_ROW_STAGES if is_split and num_rows <= FEW_ROWS else NUM_STAGES


def write(
    keys_BKD: torch.Tensor,
    values_BKE: torch.Tensor,
    layer: DecodeLayer,
    metadata: AttentionMetadata,
) -> None:
    """Write each row's newest key and value into its page."""
    B, K, D = keys_BKD.shape
    E = values_BKE.shape[-1]
    keys_BKD = with_unit_stride(keys_BKD)
    values_BKE = with_unit_stride(values_BKE)
    key_row_stride, key_head_stride, _ = keys_BKD.stride()
    value_row_stride, value_head_stride, _ = values_BKE.stride()
    write_kernel[(B,)](
        keys_BKD,
        values_BKE,
        metadata.addresses,
        _layer_addresses(metadata, layer),
        metadata.table_rows_B,
        metadata.lengths_B,
        key_row_stride,
        key_head_stride,
        value_row_stride,
        value_head_stride,
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

    Args:
        queries_BHD: the newest tokens' queries; the kernel casts them to the keys' dtype.
        layer: the layer that attends, whose pages hold the newest keys already.
        metadata: the rows of the step.
        spec: the layer's attention.
        work: the stretches of the layer's window; None: one program attends over all keys of a
            row.

    Returns:
        `[B, H, E]` in the values' dtype, zeros where a row has no tokens.
    """
    B, H, _ = queries_BHD.shape
    E = layer.value_size
    queries_BHD = with_unit_stride(queries_BHD)
    outputs_BHE = queries_BHD.new_empty(B, H, E, dtype=layer.value_dtype)
    if work is None:
        buffers = Buffers(queries_BHD, outputs_BHE)
        _launch_attend(buffers, layer, metadata, spec, None, is_shared=False)
        return outputs_BHE
    buffers = Buffers(
        queries_BHD,
        outputs_BHE,
        partials=outputs_BHE.new_empty(work.max_parts, H, E, dtype=torch.float32),
        sums=outputs_BHE.new_empty(work.max_parts, H, dtype=torch.float32),
    )
    _launch_attend(buffers, layer, metadata, spec, work, is_shared=False)
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
    """Attend over the rows' own keys, or over the prompts of shared tiles.

    Args:
        buffers: of this layer; with `work`, those of parts too.
        layer: the layer that attends.
        metadata: the rows of the step.
        spec: the layer's attention.
        work: the stretches of the layer's window; None: no key is cut.
        is_shared: attend over shared prompts; False: over the rows' own keys.
    """
    K = layer.num_key_heads
    D = layer.key_size
    E = layer.value_size
    B, H, _ = buffers.queries_BHD.shape
    row_stride, head_stride, _ = buffers.queries_BHD.stride()
    items: torch.Tensor | None = None
    num_programs = B
    if work is not None:
        items = work.shared_S if is_shared else work.own_O
        num_programs = items.shape[0]
    rows = metadata.rows_per_tile if is_shared else 1
    is_wide = _is_single(layer) or (is_shared and max(D, E) > 128)
    width = triton.next_power_of_2(max(D, E, MIN_TILE_ROWS))
    attend_kernel[(num_programs, K)](
        buffers.queries_BHD,
        buffers.outputs_BHE,
        buffers.partials,
        buffers.sums,
        metadata.addresses,
        _layer_addresses(metadata, layer),
        metadata.table_rows_B,
        metadata.lengths_B,
        metadata.shared_B,
        metadata.first_T,
        metadata.count_T,
        spec.sinks_H,
        row_stride,
        head_stride,
        items,
        None if work is None else work.sizes,
        None if work is None else work.first_parts,
        None if work is None else work.own_counts_B,
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
    B, H, E = buffers.outputs_BHE.shape
    heads_width = triton.next_power_of_2(H // layer.num_key_heads)
    value_width = triton.next_power_of_2(E)
    join_kernel[(B, layer.num_key_heads)](
        buffers.outputs_BHE,
        buffers.partials,
        buffers.sums,
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
    """Cut the keys of a step, in one launch.

    Args:
        metadata: the step; `num_stretches` is not 0.
        window: newest tokens that the layers see; None: all.
    """
    lengths_B = metadata.lengths_B
    B = lengths_B.shape[0]
    extra = metadata.num_stretches
    T = 0 if metadata.first_T is None else metadata.first_T.shape[0]
    num_own = B + extra
    num_shared = 0
    max_parts = B + extra
    if metadata.shared_B is not None:
        num_shared = T + extra
        # A tile of full size has a part of each of its rows in every stretch.
        max_parts += B + metadata.rows_per_tile * extra
    work = WorkList(
        sizes=lengths_B.new_empty(2),
        own_O=lengths_B.new_empty(num_own),
        shared_S=lengths_B.new_empty(num_shared),
        first_parts=lengths_B.new_empty(B + 1),
        own_counts_B=lengths_B.new_empty(B),
        max_parts=max_parts,
    )
    cut_kernel[(1,)](
        lengths_B,
        metadata.shared_B,
        metadata.first_T,
        metadata.count_T,
        work.sizes,
        work.own_O,
        work.shared_S,
        work.first_parts,
        work.own_counts_B,
        B,
        T,
        num_own,
        num_shared,
        extra,
        metadata.least_stretch,
        metadata.stretch_interval,
        window,
        ROWS_WIDTH=_cut_width(B),
        TILES_WIDTH=_cut_width(T),
        OWN_WIDTH=_cut_width(num_own),
        SHARED_WIDTH=_cut_width(num_shared),
        num_warps=4,
    )
    return work


def _cut_width(num_items: int) -> int:
    """Return the width of a list in `cut_kernel`, one of few, because each width is compiled."""
    return max(LEAST_CUT_WIDTH, triton.next_power_of_2(num_items))


@dataclass(frozen=True, slots=True)
class StateTable(TensorSpec):
    """The table of one state, with a row per sequence."""

    number: int
    """Index of its address in `AttentionMetadata.addresses`."""


def move_states(
    table: StateTable, metadata: AttentionMetadata, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Load the rows' states from a table, or save `rows` to it; return them, `[B, *table.shape]`.

    An empty row gets zeros, and is not saved.
    """
    num_rows = metadata.lengths_B.shape[0]
    shape = (num_rows, *table.shape)
    is_loaded = rows is None
    if rows is None:
        rows = metadata.addresses.new_empty(shape, dtype=table.dtype)
    assert (tuple(rows.shape), rows.dtype) == (shape, table.dtype), "another state is saved"
    copied, pointed = COPIED[table.dtype.itemsize]
    move_states_kernel[(num_rows, triton.cdiv(table.num_elements, STATE_CHUNK))](
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
    S, M = rows_SM.shape
    G, _, N = weights_GMN.shape
    if rows_SM.stride(1) != 1:
        rows_SM = rows_SM.contiguous()
    outputs_SN = rows_SM.new_empty(S, N)
    tile_rows = triton.next_power_of_2(-(-S // G))
    tile_size = PRODUCT_BYTES // rows_SM.element_size()
    tile_rows = min(tile_size, max(MIN_TILE_ROWS, tile_rows))
    # Every group may end with a tile that is not full.
    num_tiles = S // tile_rows + min(S, G)
    is_rounded = torch_compat.rounds_float32_products(rows_SM.device)
    group_stride, row_stride, column_stride = weights_GMN.stride()
    grouped_product_kernel[(num_tiles, triton.cdiv(N, PRODUCT_COLUMNS))](
        rows_SM,
        weights_GMN,
        ends_G,
        outputs_SN,
        G,
        M,
        N,
        rows_SM.stride(0),
        group_stride,
        row_stride,
        column_stride,
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
    """Return the keys per read; shared memory of any card since Ampere fits two reads."""
    num_numbers = 2048 if _is_single(layer) else 8192
    return min(MAX_TILE_KEYS, max(MIN_TILE_ROWS, num_numbers // width))
