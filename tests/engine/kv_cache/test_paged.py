import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.engine.kv_cache.paged import (
    PADDING_SLOT,
    BlockTable,
    PagedCache,
    SlotMapping,
)

CPU = torch.device("cpu")
HEADS, KEY_SIZE, VALUE_SIZE = 2, 3, 5


def layout_of(num_layers=1, key_dtype=torch.float32, value_dtype=torch.float32, **states):
    keys = TensorSpec((HEADS, KEY_SIZE), key_dtype)
    values = TensorSpec((HEADS, VALUE_SIZE), value_dtype)
    return CacheLayout(tuple(LayerSpec(keys, values, **states) for _ in range(num_layers)))


def cache_of(layout, num_blocks, block_size=2, num_table_rows=4):
    return PagedCache(
        layout,
        num_blocks=num_blocks,
        block_size=block_size,
        num_table_rows=num_table_rows,
        device=CPU,
    )


def table_of(blocks_of_rows, block_size=2):
    table = BlockTable(len(blocks_of_rows), block_size, CPU)
    for table_row, blocks in enumerate(blocks_of_rows):
        table.write([(table_row, index, block) for index, block in enumerate(blocks)])
    return table


def mapping_of(blocks_of_rows, block_size, lengths, num_new):
    """The slots of each row's tokens, in plain arithmetic; rows are the table rows 0, 1, ..."""
    Q, is_fresh = max(num_new), lengths == num_new
    S = Q if is_fresh else max(lengths)

    def slot(row, position):
        return blocks_of_rows[row][position // block_size] * block_size + position % block_size

    writes = [
        (row * Q + Q - length + position, slot(row, position))
        for row, (length, new) in enumerate(zip(lengths, num_new, strict=True))
        for position in range(length - new, length)
    ]
    reads = [
        [PADDING_SLOT] * (S - length) + [slot(row, position) for position in range(length)]
        for row, length in enumerate(lengths)
    ]
    return SlotMapping(
        num_cached=S - Q,
        table_rows_B=torch.arange(len(lengths)),
        write_tokens=None if min(num_new) == Q else torch.tensor([token for token, _ in writes]),
        write_slots=torch.tensor([at for _, at in writes]),
        read_slots_BS=None if is_fresh else torch.tensor(reads),
        positions_BS=torch.tensor([[max(0, n - S + i) for i in range(S)] for n in lengths]),
    )


def right_aligned(states_of_rows, width):
    """`[H, length, D]` of each row as `[B, H, width, D]`, zeros in front."""
    padded = [
        torch.nn.functional.pad(states, (0, 0, width - states.shape[1], 0))
        for states in states_of_rows
    ]
    return torch.stack(padded)


@st.composite
def histories(draw):
    """A block size, each row's blocks, and for some forwards how many tokens each row adds."""
    block_size = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 3))
    forwards = draw(
        st.lists(st.lists(st.integers(1, 5), min_size=rows, max_size=rows), min_size=1, max_size=4)
    )
    needed = [-(-sum(added) // block_size) for added in zip(*forwards, strict=True)]
    order = iter(draw(st.permutations(range(1, sum(needed) + 1))))
    return block_size, [[next(order) for _ in range(count)] for count in needed], forwards


@settings(max_examples=60)
@given(history=histories(), seed=st.integers(0, 1000))
def test_every_row_reads_back_its_whole_history_right_aligned(history, seed):
    block_size, blocks, forwards = history
    generator = torch.Generator().manual_seed(seed)
    cache = cache_of(layout_of(), sum(map(len, blocks)), block_size)
    lengths = [0] * len(blocks)
    dense = [[torch.zeros(HEADS, 0, size) for _ in blocks] for size in (KEY_SIZE, VALUE_SIZE)]
    for num_new in forwards:
        lengths = [length + new for length, new in zip(lengths, num_new, strict=True)]
        mapping = mapping_of(blocks, block_size, lengths, num_new)
        new = [
            torch.randn(len(blocks), HEADS, max(num_new), size, generator=generator)
            for size in (KEY_SIZE, VALUE_SIZE)
        ]
        cache.begin(mapping)
        assert cache.get_seq_length() == mapping.num_cached
        assert cache.get_mask_sizes(max(num_new), 0) == (mapping.num_cached + max(num_new), 0)
        got = cache.update(*new, layer_idx=0)
        cache.end(mapping)
        for rows, states, back in zip(dense, new, got, strict=True):
            for row, count in enumerate(num_new):
                rows[row] = torch.cat([rows[row], states[row, :, -count:]], 1)
            if lengths == num_new:
                assert torch.equal(back, states)
            else:
                assert torch.equal(back, right_aligned(rows, max(lengths)))


@given(
    block_size=st.integers(1, 5),
    blocks=st.lists(st.integers(1, 99), min_size=1, max_size=20),
    data=st.data(),
)
def test_a_positions_slot_is_in_its_block_at_its_offset(block_size, blocks, data):
    table = table_of([[77], blocks], block_size)
    last = len(blocks) * block_size - 1
    positions = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=6))
    expected = [blocks[p // block_size] * block_size + p % block_size for p in positions]
    table_rows = torch.ones(len(positions), dtype=torch.int64)
    assert table.slots(table_rows, torch.tensor(positions)).tolist() == expected
    assert table.slots(table_rows[:1], torch.tensor([positions])).tolist() == [expected]


def test_writing_nothing_to_the_table_changes_nothing():
    table = table_of([[5]])
    table.write([])
    assert table.slots(torch.tensor([0]), torch.tensor([1])).tolist() == [11]


def test_the_table_widens_and_keeps_what_it_holds():
    table = table_of([[5, 6], [7]])
    table.write([(1, 40, 9)])
    assert table.slots(torch.tensor([0, 1]), torch.tensor([3, 81])).tolist() == [13, 19]


def test_a_copied_block_is_equal_in_every_layer_and_the_source_stays():
    cache = cache_of(layout_of(num_layers=2), num_blocks=4)
    for number, pages in enumerate(p for layer in cache.layers for p in layer.pages):
        pages.copy_(torch.arange(pages.numel()).view_as(pages) + number)
    before = [p.clone() for layer in cache.layers for p in layer.pages]
    cache.copy_blocks([1, 3], [2, 4])
    for old, new in zip(before, (p for layer in cache.layers for p in layer.pages), strict=True):
        assert torch.equal(new[4:6], old[2:4])
        assert torch.equal(new[8:10], old[6:8])
        assert torch.equal(new[:4], old[:4])
        assert torch.equal(new[6:8], old[6:8])
    cache.copy_blocks([], [])


def test_growing_keeps_the_contents_of_every_block():
    cache = cache_of(layout_of(num_layers=2), num_blocks=2)
    for pages in (p for layer in cache.layers for p in layer.pages):
        pages.normal_()
    before = [p.clone() for layer in cache.layers for p in layer.pages]
    small = cache.num_bytes
    cache.grow(5)
    assert cache.num_bytes == small * 6 // 3
    for old, new in zip(before, (p for layer in cache.layers for p in layer.pages), strict=True):
        assert new.shape[0] == 6 * 2
        assert torch.equal(new[: len(old)], old)


@pytest.mark.parametrize(
    ("key_dtype", "value_dtype"),
    [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_keys_and_values_keep_their_own_size_and_dtype(key_dtype, value_dtype):
    layout = layout_of(1, key_dtype, value_dtype)
    cache = cache_of(layout, num_blocks=3)
    assert cache.num_bytes == 4 * 2 * layout.bytes_per_token
    keys = torch.randn(1, HEADS, 3, KEY_SIZE).to(key_dtype)
    values = torch.randn(1, HEADS, 3, VALUE_SIZE).to(value_dtype)
    cache.begin(mapping_of([[3, 1]], 2, [2], [2]))
    cache.update(keys[:, :, :2], values[:, :, :2], 0)
    cache.begin(mapping_of([[3, 1]], 2, [3], [1]))
    got_keys, got_values = cache.update(keys[:, :, 2:], values[:, :, 2:], 0)
    torch.testing.assert_close(got_keys, keys, rtol=0, atol=0)
    torch.testing.assert_close(got_values, values, rtol=0, atol=0)


def test_bytes_count_all_blocks_the_null_block_and_all_table_rows():
    state = TensorSpec((2, 6), torch.float32)
    layout = layout_of(num_layers=3, conv=(state,), recurrent=(None,))
    cache = cache_of(layout, num_blocks=7, block_size=4, num_table_rows=5)
    assert cache.num_bytes == 8 * 4 * layout.bytes_per_token + 5 * layout.bytes_per_sequence
    assert layout.bytes_per_sequence == 3 * 2 * 6 * 4


def test_padding_reads_zeros():
    cache = cache_of(layout_of(), num_blocks=1)
    assert all(not pages[PADDING_SLOT].any() for pages in cache.layers[0].pages)


def test_states_are_loaded_from_the_table_rows_they_were_saved_to():
    state = TensorSpec((2, 3), torch.float32)
    cache = cache_of(CacheLayout((LayerSpec(recurrent=(state,), conv=(None,)),)), num_blocks=0)
    (layer,) = cache.layers
    mapping = SlotMapping(0, torch.tensor([2, 0]), None, torch.tensor([]), None, torch.tensor([]))
    states = torch.randn(2, 2, 3)
    cache.begin(mapping)
    assert not layer.has_previous_state[0]
    layer.update_recurrent_state(states)
    cache.end(mapping)
    cache.copy_states([2], [3])
    nothing = torch.tensor([])
    cache.begin(SlotMapping(0, torch.tensor([3, 2, 0]), None, nothing, nothing, nothing))
    assert layer.has_previous_state[0]
    assert torch.equal(layer.recurrent_states[0], states[[0, 0, 1]])


def test_the_index_of_a_sparse_attention_is_read_with_each_rows_positions():
    index = TensorSpec((1, 4), torch.float32)
    cache = cache_of(layout_of(index=index, num_index_positions=3), num_blocks=4)
    (layer,) = cache.layers
    blocks = [[1, 2], [3]]
    first, second = torch.randn(2, 3, 4), torch.randn(2, 1, 4)
    cache.begin(mapping_of(blocks, 2, [3, 1], [3, 1]))
    assert layer.indexer_position_ids is None
    assert torch.equal(layer.update_indexer(first), first)
    cache.begin(mapping_of(blocks, 2, [4, 2], [1, 1]))
    assert layer.indexer_position_ids.tolist() == [[[0, 1, 2], [0, 0, 0]]] * 3
    expected = [torch.cat([first[0], second[0]]), torch.cat([first[1, 2:], second[1]])]
    got = cache.update_indexer(second, 0)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1, 2:], expected[1])
    assert not got[1, :2].any()


def test_histories_have_the_memory_layout_of_transformers_cache():
    cache = cache_of(layout_of(), num_blocks=4)
    new = (torch.randn(2, HEADS, 2, KEY_SIZE), torch.randn(2, HEADS, 2, VALUE_SIZE))
    blocks = [[1, 2], [3, 4]]
    cache.begin(mapping_of(blocks, 2, [2, 2], [2, 2]))
    cache.update(*new, layer_idx=0)
    cache.begin(mapping_of(blocks, 2, [4, 4], [2, 2]))
    keys, values = cache.update(*new, layer_idx=0)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert torch.equal(keys, torch.cat([new[0], new[0]], 2))


def test_a_cache_of_only_recurrent_layers_reports_the_length_of_its_rows():
    state = TensorSpec((2, 3), torch.float32)
    cache = cache_of(CacheLayout((LayerSpec(recurrent=(state,), conv=(None,)),)), num_blocks=0)
    nothing = torch.tensor([])
    cache.begin(SlotMapping(5, torch.tensor([0]), None, nothing, nothing, nothing))
    assert cache.get_seq_length() == 5
    assert cache.get_mask_sizes(1, 0) == (6, 0)


def test_a_layer_without_states_takes_no_memory():
    cache = cache_of(CacheLayout((LayerSpec(),)), num_blocks=100)
    assert isinstance(cache.layers[0], hf_compat.DummyLayer)
    assert not cache.layers[0].is_initialized
    assert cache.num_bytes == 0


def test_the_cache_cannot_be_used_outside_a_step():
    cache = cache_of(layout_of(), num_blocks=1)
    with pytest.raises(AssertionError, match="outside a step"):
        cache.update(torch.zeros(1, HEADS, 1, KEY_SIZE), torch.zeros(1, HEADS, 1, VALUE_SIZE), 0)
