"""Define the Triton kernels of a decode step: one new token a row, over paged keys.

`write_kernel` writes new keys and values into their pages. `attend_kernel` attends over stretches
of keys (flash decoding: partial outputs and the log-sum-exp of each). `join_kernel` joins the
partial outputs. A stretch is a part of a row's own keys, or of a prompt that several rows share;
their queries are then packed into one tile, which reads the prompt once. `grouped_product_kernel`
multiplies the tokens of each expert by its weight.

The kernels find pages and block table through addresses in device memory, not as arguments, so a
captured CUDA graph stays valid when the cache grows or is allocated anew. `header` holds the block
table's address and width, `layer_addresses` the addresses of a layer's pages of keys and of values.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kernel(
    new_keys,
    new_values,
    header,
    layer_addresses,
    table_rows,
    lengths,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write one row's newest key and value."""
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    if length > 0:
        table = tl.load(header).to(tl.pointer_type(tl.int64))
        table_width = tl.load(header + 1)
        position = length - 1
        table_row = tl.load(table_rows + row).to(tl.int64)
        block = tl.load(table + table_row * table_width + position // BLOCK_SIZE)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        offsets = tl.arange(0, WIDTH)
        keys = tl.load(layer_addresses).to(tl.pointer_type(KEY_TYPE))
        is_key = offsets < NUM_KEY_HEADS * KEY_SIZE
        source = (offsets // KEY_SIZE) * key_head_stride + offsets % KEY_SIZE
        new = tl.load(new_keys + row * key_row_stride + source, mask=is_key)
        tl.store(keys + slot * (NUM_KEY_HEADS * KEY_SIZE) + offsets, new, mask=is_key)
        values = tl.load(layer_addresses + 1).to(tl.pointer_type(VALUE_TYPE))
        is_value = offsets < NUM_KEY_HEADS * VALUE_SIZE
        source = (offsets // VALUE_SIZE) * value_head_stride + offsets % VALUE_SIZE
        new = tl.load(new_values + row * value_row_stride + source, mask=is_value)
        tl.store(values + slot * (NUM_KEY_HEADS * VALUE_SIZE) + offsets, new, mask=is_value)


@triton.jit(do_not_specialize=["num_splits", "num_parts", "first_part", "window"])
def attend_kernel(
    queries,
    outputs,
    partials,
    sums,
    header,
    layer_addresses,
    table_rows,
    lengths,
    shared,
    first_rows,
    row_counts,
    sinks,
    query_row_stride,
    query_head_stride,
    num_splits,
    num_parts,
    first_part,
    scale,
    softcap,
    window,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    IS_SHARED: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    LEAST_STRETCH: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Attend over one stretch of keys of one key head; `IS_WHOLE`: it is the only one."""
    HEADS_PER_KEY: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    # Triton 3.9's interpreter multiplies the bits of bfloat16 as integers.
    KEY_DOT: tl.constexpr = tl.float32 if IS_INTERPRETED else KEY_TYPE
    VALUE_DOT: tl.constexpr = tl.float32 if IS_INTERPRETED else VALUE_TYPE
    unit = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    key_head = tl.program_id(1)
    tile = tl.arange(0, TILE_ROWS)
    if IS_SHARED:
        first_row = tl.load(first_rows + unit)
        num_rows = tl.load(row_counts + unit)
        begin = 0
        end = tl.load(shared + first_row, mask=num_rows > 0, other=0)
    else:
        first_row = unit
        num_rows = 1
        begin = 0
        if HAS_SHARED:
            begin = tl.load(shared + unit)
        end = tl.load(lengths + unit)
    member = tile // HEADS_PER_KEY
    is_query = member < num_rows
    rows = (first_row + member).to(tl.int64)
    heads = key_head * HEADS_PER_KEY + tile % HEADS_PER_KEY
    earliest = tl.zeros([TILE_ROWS], tl.int32)
    if HAS_WINDOW:
        row_lengths = tl.load(lengths + rows, mask=is_query, other=2147483647)
        earliest = tl.maximum(row_lengths - window, 0)
        begin = tl.minimum(tl.maximum(begin, tl.min(earliest, 0)), end)
    # Stretches start at whole tiles, so that a split does not read half a tile twice.
    num_keys = tl.maximum(end - begin, 0)
    stretch = (num_keys + num_splits * TILE_KEYS - 1) // (num_splits * TILE_KEYS) * TILE_KEYS
    stretch = tl.maximum(stretch, LEAST_STRETCH)
    start = begin + split * stretch
    stop = tl.minimum(start + stretch, end)

    key_offsets = tl.arange(0, KEY_WIDTH)
    value_offsets = tl.arange(0, VALUE_WIDTH)
    query_offsets = rows[:, None] * query_row_stride + heads[:, None] * query_head_stride
    query = tl.load(
        queries + query_offsets + key_offsets[None, :],
        mask=is_query[:, None] & (key_offsets[None, :] < KEY_SIZE),
        other=0.0,
    )
    query = query.to(KEY_TYPE).to(KEY_DOT)
    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    output = tl.zeros([TILE_ROWS, VALUE_WIDTH], tl.float32)

    table = tl.load(header).to(tl.pointer_type(tl.int64))
    table_width = tl.load(header + 1)
    table_row = tl.load(table_rows + first_row, mask=num_rows > 0, other=0).to(tl.int64)
    row_blocks = table + table_row * table_width
    keys = tl.load(layer_addresses).to(tl.pointer_type(KEY_TYPE))
    values = tl.load(layer_addresses + 1).to(tl.pointer_type(VALUE_TYPE))
    keys = tl.multiple_of(keys, 16)
    values = tl.multiple_of(values, 16)
    keys += key_head * KEY_SIZE
    values += key_head * VALUE_SIZE
    for at in range(start, stop, TILE_KEYS):
        positions = at + tl.arange(0, TILE_KEYS)
        is_key = positions < stop
        block = tl.load(row_blocks + positions // BLOCK_SIZE, mask=is_key, other=0)
        slot = block * BLOCK_SIZE + positions % BLOCK_SIZE
        key = tl.load(
            keys + slot[None, :] * (NUM_KEY_HEADS * KEY_SIZE) + key_offsets[:, None],
            mask=is_key[None, :] & (key_offsets[:, None] < KEY_SIZE),
            other=0.0,
        )
        scores = tl.dot(query, key.to(KEY_DOT), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        is_seen = is_key[None, :] & is_query[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (positions[None, :] >= earliest[:, None])
        scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # Before any key is seen both are -inf, and their difference would be NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(
            values + slot[:, None] * (NUM_KEY_HEADS * VALUE_SIZE) + value_offsets[None, :],
            mask=is_key[:, None] & (value_offsets[None, :] < VALUE_SIZE),
            other=0.0,
        )
        output = output * shrink[:, None]
        weights = weights.to(VALUE_TYPE).to(VALUE_DOT)
        output += tl.dot(weights, value.to(VALUE_DOT), input_precision="ieee")
        largest = new_largest

    is_output = is_query[:, None] & (value_offsets[None, :] < VALUE_SIZE)
    if IS_WHOLE:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
            new_largest = tl.maximum(largest, sink)
            shrink = tl.exp2(largest - new_largest)
            output = output * shrink[:, None]
            total = total * shrink + tl.exp2(sink - new_largest)
        output = output / tl.where(total == 0.0, 1.0, total)[:, None]
        targets = (rows * NUM_HEADS + heads)[:, None] * VALUE_SIZE + value_offsets[None, :]
        tl.store(outputs + targets, output, mask=is_output)
    else:
        output = output / tl.where(total == 0.0, 1.0, total)[:, None]
        part = (rows * NUM_HEADS + heads) * num_parts + first_part + split
        targets = part[:, None] * VALUE_SIZE + value_offsets[None, :]
        if start < stop:
            tl.store(partials + targets, output, mask=is_output)
        # A stretch without keys has no share of the softmax.
        known = tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(sums + part, largest + known, mask=is_query)


@triton.jit(do_not_specialize=["num_parts", "num_own_parts"])
def join_kernel(
    outputs,
    partials,
    sums,
    shared,
    sinks,
    num_parts,
    num_own_parts,
    NUM_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTS_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Join one head's partial outputs, weighted by their shares of the softmax."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    parts = tl.arange(0, PARTS_WIDTH)
    num_valid = num_parts
    if HAS_SHARED:
        num_valid = tl.where(tl.load(shared + row) > 0, num_parts, num_own_parts)
    is_part = parts < num_valid
    first = (row * NUM_HEADS + head) * num_parts
    part_sums = tl.load(sums + first + parts, mask=is_part, other=float("-inf"))
    largest = tl.max(part_sums, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    shares = tl.exp2(part_sums - base)
    total = tl.sum(shares, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    value_offsets = tl.arange(0, VALUE_WIDTH)
    is_value = value_offsets < VALUE_SIZE
    # Stretches without a share were never written.
    is_part = is_part & (part_sums > float("-inf"))
    partial = tl.load(
        partials + (first + parts)[:, None] * VALUE_SIZE + value_offsets[None, :],
        mask=is_part[:, None] & is_value[None, :],
        other=0.0,
    )
    output = tl.sum(partial * shares[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(outputs + (row * NUM_HEADS + head) * VALUE_SIZE + value_offsets, output, mask=is_value)


@triton.jit
def grouped_product_kernel(
    rows,
    weights,
    ends,
    outputs,
    num_groups,
    size,
    num_columns,
    row_stride,
    group_stride,
    size_stride,
    column_stride,
    IS_INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Compute one tile of one group's rows; programs beyond the last tile do nothing."""
    tile = tl.program_id(0)
    groups = tl.arange(0, GROUPS_WIDTH)
    is_group = groups < num_groups
    group_ends = tl.load(ends + groups, mask=is_group, other=0)
    starts = tl.load(ends + groups - 1, mask=is_group & (groups > 0), other=0)
    num_tiles = tl.where(is_group, (group_ends - starts + TILE_ROWS - 1) // TILE_ROWS, 0)
    last_tiles = tl.cumsum(num_tiles, 0)
    is_own = (last_tiles > tile) & (last_tiles - num_tiles <= tile)
    if tl.sum(is_own.to(tl.int32), 0) > 0:
        group = tl.sum(tl.where(is_own, groups, 0), 0).to(tl.int64)
        first_tile = tl.sum(tl.where(is_own, last_tiles - num_tiles, 0), 0)
        start = tl.sum(tl.where(is_own, starts, 0), 0)
        stop = tl.sum(tl.where(is_own, group_ends, 0), 0)
        own_rows = start + (tile - first_tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        is_row = own_rows < stop
        columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        is_column = columns < num_columns
        weights += group * group_stride
        total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        for at in range(0, size, TILE_SIZE):
            places = at + tl.arange(0, TILE_SIZE)
            is_place = places < size
            left = tl.load(
                rows + own_rows.to(tl.int64)[:, None] * row_stride + places[None, :],
                mask=is_row[:, None] & is_place[None, :],
                other=0.0,
            )
            right = tl.load(
                weights
                + places.to(tl.int64)[:, None] * size_stride
                + columns.to(tl.int64)[None, :] * column_stride,
                mask=is_place[:, None] & is_column[None, :],
                other=0.0,
            )
            if IS_INTERPRETED:
                # Triton 3.9's interpreter multiplies the bits of bfloat16 as integers.
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total += tl.dot(left, right, input_precision=PRECISION)
        targets = own_rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(outputs + targets, total, mask=is_row[:, None] & is_column[None, :])
