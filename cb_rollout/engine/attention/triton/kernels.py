"""Define the Triton kernels of a decode step: one new token per row, over paged keys.

`write_kernel` writes new keys and values into their pages. `attend_kernel` attends over stretches
of keys (flash decoding: a partial output and its log-sum-exp). `join_kernel` joins the partial
outputs. A stretch is a part of a row's own keys, or of a prompt that several rows share. The
queries of such rows are packed into one tile, which reads the prompt once. `cut_kernel` cuts the
keys into stretches. `grouped_product_kernel` multiplies the tokens of each expert by its weight.
`move_states_kernel` copies recurrent states out of their tables and into them.

The kernels find pages and block table through addresses in device memory, not as arguments, so a
captured CUDA graph stays valid when the cache grows or is reallocated. `header` holds the block
table's address and width, `layer_addresses` the addresses of a layer's key and value pages. None
stands for inputs that a step does not have: shared prompts, a window, a soft cap, sinks, stretches.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

# More than the stretches of a row: an item of a work list is row x MAX_SPLITS + stretch.
MAX_SPLITS = tl.constexpr(4096)


@triton.jit
def write_kernel(
    new_keys, new_values, header, layer_addresses, table_rows, lengths,
    key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    BLOCK_SIZE: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, KEY_TYPE: tl.constexpr, VALUE_TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write one row's newest key and value.

    Args:
        new_keys: `[rows, key heads, size]`, of these strides; the last one is 1.
        new_values: likewise.
        header: int64; see the module's docstring, also for `layer_addresses`.
        layer_addresses: int64.
        table_rows: int32 `[rows]`: each row's index into the block table.
        lengths: int32 `[rows]`: each row's tokens, the new one included; 0: an empty row.
        key_row_stride: in numbers, as all strides here.
        key_head_stride: of `new_keys`.
        value_row_stride: of `new_values`.
        value_head_stride: of `new_values`.
        BLOCK_SIZE: tokens of a block.
        NUM_KEY_HEADS: of keys and values.
        KEY_SIZE: numbers of a head's key.
        VALUE_SIZE: numbers of a head's value.
        KEY_TYPE: of the pages of keys.
        VALUE_TYPE: of the pages of values.
        WIDTH: a power of two, no less than the numbers of a token's keys or values.
    """
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


@triton.jit
def stretch_of(num_keys, num_stretches, least, interval):
    """Return the number of keys in a stretch: a multiple of `interval`, at least `least`."""
    stretch = (num_keys + num_stretches - 1) // num_stretches
    stretch = tl.maximum(stretch, least)
    return (stretch + interval - 1) // interval * interval


@triton.jit
def list_items(items, num_items, counts, units, WIDTH: tl.constexpr):
    """Write `counts` items for each unit, and -1 after the last.

    Args:
        items: int32 `[num_items]`, to write.
        num_items: its size.
        counts: a block of int32: stretches of each unit.
        units: a block of int32: rows or tiles.
        WIDTH: a power of two, no less than `num_items`.
    """
    total = tl.sum(counts, 0)
    places = tl.arange(0, WIDTH)
    none = tl.full([WIDTH], -1, tl.int32)
    tl.store(items + places, none, mask=(places >= total) & (places < num_items))
    starts = tl.cumsum(counts, 0) - counts
    for split in range(tl.max(counts, 0)):
        item = units * MAX_SPLITS + split
        tl.store(items + starts + split, item, mask=split < counts)


@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_tiles", "num_own_items", "num_shared_items"),
        *("num_stretches", "least", "interval", "window"),
    ]
)
def cut_kernel(
    lengths, shared, first_rows, row_counts,
    sizes, own_items, shared_items, first_parts, own_counts,
    num_rows, num_tiles, num_own_items, num_shared_items,
    num_stretches, least, interval, window,
    ROWS_WIDTH: tl.constexpr, TILES_WIDTH: tl.constexpr, OWN_WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
):  # fmt: skip
    """Cut all keys of a step: one program.

    Args:
        lengths: int32 `[num_rows]`: each row's tokens; 0: an empty row.
        shared: int32 `[num_rows]`: leading tokens that a tile reads; None: no tiles.
        first_rows: int32 `[num_tiles]`: first row of each tile.
        row_counts: int32 `[num_tiles]`: rows of each tile; 0: an empty tile.
        sizes: int32 `[2]`, to write: keys of a stretch of own keys, and of shared prompts.
        own_items: int32 `[num_own_items]`, to write: items of rows.
        shared_items: int32 `[num_shared_items]`, to write: items of tiles.
        first_parts: int32 `[num_rows + 1]`, to write: each row's first part, and the last's end.
        own_counts: int32 `[num_rows]`, to write: parts of each row's own keys.
        num_rows: rows.
        num_tiles: tiles.
        num_own_items: most stretches of own keys.
        num_shared_items: most stretches of shared prompts.
        num_stretches: stretches that all keys are cut into, besides one for each row or tile.
        least: fewest keys of a stretch that is not the last.
        interval: keys of a stretch are a multiple of this.
        window: newest tokens that are seen; None: all.
        ROWS_WIDTH: a power of two, no less than `num_rows`.
        TILES_WIDTH: likewise for `num_tiles`.
        OWN_WIDTH: likewise for `num_own_items`.
        SHARED_WIDTH: likewise for `num_shared_items`.
    """
    rows = tl.arange(0, ROWS_WIDTH)
    is_row = rows < num_rows
    own = tl.load(lengths + rows, mask=is_row, other=0)
    if shared is not None:
        prompts = tl.load(shared + rows, mask=is_row, other=0)
        # A row that ended since reads nothing.
        prompts = tl.where(own > 0, prompts, 0)
        own = tl.maximum(own - prompts, 0)
    if window is not None:
        own = tl.minimum(own, window)
    own_stretch = stretch_of(tl.sum(own, 0), num_stretches, least, interval)
    counts = (own + own_stretch - 1) // own_stretch
    tl.store(sizes, own_stretch)
    tl.store(own_counts + rows, counts, mask=is_row)
    list_items(own_items, num_own_items, counts, rows, OWN_WIDTH)
    if shared is not None:
        tiles = tl.arange(0, TILES_WIDTH)
        tile_rows = tl.load(row_counts + tiles, mask=tiles < num_tiles, other=0)
        firsts = tl.load(first_rows + tiles, mask=tile_rows > 0, other=0)
        tile_keys = tl.load(shared + firsts, mask=tile_rows > 0, other=0)
        if window is not None:
            # Rows are longer than the prompt that they share, so they see at most a window of it.
            tile_keys = tl.minimum(tile_keys, window)
            prompts = tl.minimum(prompts, window)
        shared_stretch = stretch_of(tl.sum(tile_keys, 0), num_stretches, least, interval)
        tl.store(sizes + 1, shared_stretch)
        tile_counts = (tile_keys + shared_stretch - 1) // shared_stretch
        list_items(shared_items, num_shared_items, tile_counts, tiles, SHARED_WIDTH)
        counts += (prompts + shared_stretch - 1) // shared_stretch
    ends = tl.cumsum(counts, 0)
    tl.store(first_parts + rows, ends - counts, mask=is_row)
    tl.store(first_parts + num_rows, tl.sum(counts, 0))


@triton.jit
def item_of(items, IS_WHOLE: tl.constexpr):
    """Return the program's row or tile, its stretch's number, and whether it has a stretch."""
    unit = tl.program_id(0)
    split = 0
    is_item = unit >= 0
    if not IS_WHOLE:
        item = tl.load(items + unit)
        is_item = item >= 0
        unit = tl.maximum(item, 0) // MAX_SPLITS
        split = tl.maximum(item, 0) % MAX_SPLITS
    return unit, split, is_item


@triton.jit
def stretch_at(begin, end, split, is_item, sizes, IS_WHOLE: tl.constexpr, IS_SHARED: tl.constexpr):
    """Return the first key of a stretch, and the key after its last.

    Args:
        begin: first key of the row or tile.
        end: the key after its last.
        split: the stretch's number in it.
        is_item: whether there is such a stretch.
        sizes: int32 `[2]`: length of a stretch in a row's own keys, and in shared prompts.
        IS_WHOLE: whether nothing is cut.
        IS_SHARED: whether it is a stretch of a shared prompt.
    """
    start = begin
    stop = end
    if not IS_WHOLE:
        stretch = tl.load(sizes)
        if IS_SHARED:
            stretch = tl.load(sizes + 1)
        start = begin + split * stretch
        stop = tl.where(is_item, tl.minimum(start + stretch, end), start)
    return start, stop


@triton.jit(do_not_specialize=["window"])
def attend_kernel(
    queries, outputs, partials, sums,
    header, layer_addresses, table_rows, lengths,
    shared, first_rows, row_counts, sinks,
    query_row_stride, query_head_stride,
    items, sizes, first_parts, own_counts,
    scale, softcap, window,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr, IS_SHARED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Attend over one stretch of one key head's keys; without `items`, over all keys of a row.

    Args:
        queries: `[rows, heads, KEY_SIZE]`, of these strides; the last one is 1.
        outputs: `[rows, heads, VALUE_SIZE]`, to write where nothing is cut.
        partials: float32 `[parts, heads, VALUE_SIZE]`, to write: outputs of stretches.
        sums: float32 `[parts, heads]`, to write: their log-sum-exp, base 2.
        header: int64; see the module's docstring, also for `layer_addresses`.
        layer_addresses: int64.
        table_rows: int32 `[rows]`: each row's index into the block table.
        lengths: int32 `[rows]`: each row's tokens.
        shared: as in `cut_kernel`, like `first_rows` and `row_counts`.
        first_rows: int32.
        row_counts: int32.
        sinks: `[heads]`: scores that give no value; None: none.
        query_row_stride: in numbers.
        query_head_stride: in numbers.
        items: int32: the stretches, as `cut_kernel` lists them; None: nothing is cut.
        sizes: as in `cut_kernel`, like `first_parts` and `own_counts`.
        first_parts: int32.
        own_counts: int32.
        scale: multiplies the scores.
        softcap: bounds the scores; None: nothing does.
        window: newest tokens that are seen; None: all.
        BLOCK_SIZE: tokens of a block.
        NUM_HEADS: of queries.
        NUM_KEY_HEADS: of keys and values.
        KEY_SIZE: numbers of a head's key.
        VALUE_SIZE: numbers of a head's value.
        KEY_TYPE: of the pages of keys.
        VALUE_TYPE: of the pages of values.
        IS_INTERPRETED: whether Triton's interpreter runs it.
        IS_SHARED: whether the items are of tiles.
        TILE_ROWS: queries of a program.
        TILE_KEYS: keys read at a time.
        KEY_WIDTH: a power of two, no less than `KEY_SIZE`.
        VALUE_WIDTH: likewise for `VALUE_SIZE`.
    """
    HEADS_PER_KEY: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    IS_WHOLE: tl.constexpr = items is None
    # Triton 3.9's interpreter multiplies the bits of bfloat16 as integers.
    KEY_DOT: tl.constexpr = tl.float32 if IS_INTERPRETED else KEY_TYPE
    VALUE_DOT: tl.constexpr = tl.float32 if IS_INTERPRETED else VALUE_TYPE
    unit, split, is_item = item_of(items, IS_WHOLE)
    key_head = tl.program_id(1)
    tile = tl.arange(0, TILE_ROWS)
    if IS_SHARED:
        first_row = tl.load(first_rows + unit)
        num_rows = tl.where(is_item, tl.load(row_counts + unit), 0)
        begin = 0
        end = tl.load(shared + first_row, mask=num_rows > 0, other=0)
    else:
        first_row = unit
        num_rows = is_item.to(tl.int32)
        begin = 0
        if shared is not None:
            begin = tl.load(shared + unit)
        end = tl.load(lengths + unit)
    member = tile // HEADS_PER_KEY
    is_query = member < num_rows
    rows = (first_row + member).to(tl.int64)
    heads = key_head * HEADS_PER_KEY + tile % HEADS_PER_KEY
    row_lengths = tl.load(lengths + rows, mask=is_query, other=1)
    # A row that has ended since keeps its place in a tile. With its length of 0, the window would
    # begin with the prompt, and the stretches would end before what the other rows see.
    is_query = is_query & ((row_lengths > 0) | (not IS_SHARED))
    earliest = tl.zeros([TILE_ROWS], tl.int32)
    if window is not None:
        earliest = tl.where(is_query, tl.maximum(row_lengths - window, 0), 2147483647)
        begin = tl.minimum(tl.maximum(begin, tl.min(earliest, 0)), end)
    start, stop = stretch_at(begin, end, split, is_item, sizes, IS_WHOLE, IS_SHARED)

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
        if softcap is not None:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        is_seen = is_key[None, :] & is_query[:, None]
        if window is not None:
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
        if sinks is not None:
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
        part = tl.load(first_parts + rows, mask=is_query, other=0) + split
        # The parts of a shared prompt stand behind the row's own.
        part += tl.load(own_counts + rows, mask=is_query & IS_SHARED, other=0)
        part = part.to(tl.int64) * NUM_HEADS + heads
        targets = part[:, None] * VALUE_SIZE + value_offsets[None, :]
        if start < stop:
            tl.store(partials + targets, output, mask=is_output)
        # A stretch without keys has no share of the softmax.
        known = tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(sums + part, largest + known, mask=is_query)


@triton.jit
def join_kernel(
    outputs, partials, sums, first_parts, sinks,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr,
    PARTS: tl.constexpr, HEADS_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Join the partial outputs of one row and key head, weighted by their shares of the softmax.

    Args:
        outputs: `[rows, heads, VALUE_SIZE]`, to write.
        partials: as in `attend_kernel`, like `sums`, `first_parts` and `sinks`.
        sums: float32.
        first_parts: int32.
        sinks: a score for each head; None: none.
        NUM_HEADS: of queries.
        NUM_KEY_HEADS: of keys.
        VALUE_SIZE: numbers of a head's value.
        PARTS: parts read at a time.
        HEADS_WIDTH: a power of two, no less than the heads of a key head.
        VALUE_WIDTH: a power of two, no less than `VALUE_SIZE`.
    """
    HEADS_PER_KEY: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    row = tl.program_id(0)
    begin = tl.load(first_parts + row)
    end = tl.load(first_parts + row + 1)
    head_offsets = tl.arange(0, HEADS_WIDTH)
    is_head = head_offsets < HEADS_PER_KEY
    heads = tl.program_id(1) * HEADS_PER_KEY + head_offsets
    value_offsets = tl.arange(0, VALUE_WIDTH)
    is_value = value_offsets < VALUE_SIZE
    largest = tl.full([HEADS_WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([HEADS_WIDTH], tl.float32)
    output = tl.zeros([HEADS_WIDTH, VALUE_WIDTH], tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    for at in range(begin, end, PARTS):
        parts = at + tl.arange(0, PARTS)
        places = parts.to(tl.int64)[:, None] * NUM_HEADS + heads[None, :]
        is_part = (parts < end)[:, None] & is_head[None, :]
        part_sums = tl.load(sums + places, mask=is_part, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(part_sums, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shares = tl.exp2(part_sums - base[None, :])
        shrink = tl.exp2(largest - base)
        # Stretches without a share were never written.
        is_part = is_part & (part_sums > float("-inf"))
        partial = tl.load(
            partials + places[:, :, None] * VALUE_SIZE + value_offsets[None, None, :],
            mask=is_part[:, :, None] & is_value[None, None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(shares, 0)
        output = output * shrink[:, None] + tl.sum(partial * shares[:, :, None], 0)
        largest = new_largest
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    targets = (row.to(tl.int64) * NUM_HEADS + heads)[:, None] * VALUE_SIZE + value_offsets[None, :]
    tl.store(outputs + targets, output, mask=is_head[:, None] & is_value[None, :])


@triton.jit
def grouped_product_kernel(
    rows, weights, ends, outputs,
    num_groups, size, num_columns,
    row_stride, group_stride, size_stride, column_stride,
    IS_INTERPRETED: tl.constexpr, PRECISION: tl.constexpr, GROUPS_WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_SIZE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one group's rows; programs after the last tile do nothing.

    Args:
        rows: `[rows, size]`; the rows of a group are neighbours.
        weights: `[groups, size, columns]`.
        ends: int32 `[groups]`: the row after each group's last.
        outputs: `[rows, columns]`, to write.
        num_groups: groups.
        size: numbers of a row.
        num_columns: numbers of a result.
        row_stride: of `rows`, in numbers.
        group_stride: of `weights`, as are `size_stride` and `column_stride`.
        size_stride: in numbers.
        column_stride: in numbers.
        IS_INTERPRETED: whether Triton's interpreter runs it.
        PRECISION: "tf32" or "ieee".
        GROUPS_WIDTH: a power of two, no less than `num_groups`.
        TILE_ROWS: rows of a program.
        TILE_SIZE: numbers of a row that are read at a time.
        TILE_COLUMNS: columns of a program.
    """
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


@triton.jit
def move_states_kernel(
    rows, table_address, table_rows, lengths, size,
    TYPE: tl.constexpr, CHUNK: tl.constexpr, IS_LOADED: tl.constexpr,
):  # fmt: skip
    """Copy a chunk of a row's state from the table or into it; an empty row gets zeros.

    Args:
        rows: `[rows, size]`: to write if `IS_LOADED`, else to read.
        table_address: int64: where the table of this state lies.
        table_rows: int32 `[rows]`: each row's index into the table.
        lengths: int32 `[rows]`: each row's tokens; 0: an empty row.
        size: numbers of a state.
        TYPE: whole numbers of as many bytes as the state's numbers.
        CHUNK: numbers that a program copies.
        IS_LOADED: whether states are copied out of the table.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    own = rows + row * size + places
    table_row = tl.load(table_rows + row).to(tl.int64)
    table = tl.load(table_address).to(tl.pointer_type(TYPE)) + table_row * size + places
    is_there = places < tl.where(tl.load(lengths + row) > 0, size, 0)
    if IS_LOADED:
        tl.store(own, tl.load(table, mask=is_there, other=0), mask=places < size)
    else:
        tl.store(table, tl.load(own, mask=is_there), mask=is_there)
