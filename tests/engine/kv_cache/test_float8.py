import torch
from hypothesis import given
from hypothesis import strategies as st

from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerStates, StateShape
from cb_rollout.engine.kv_cache.paged import (
    FLOAT8,
    LARGEST,
    PADDING_SLOT,
    PagedCache,
    Step,
    in_float8,
    packed,
    page_dtype,
    unpacked,
)

CPU = torch.device("cpu")


@given(values=st.lists(st.floats(-400, 400, width=32), min_size=1, max_size=20))
def test_a_packed_state_is_its_nearest_float8(values):
    states = torch.tensor(values)
    read = unpacked(packed(states), torch.float32)
    # Three bits of mantissa: half a step of 1/8; below 2**-6 the steps are 2**-9.
    assert ((read - states).abs() <= (states.abs() / 16).clamp(min=2**-10)).all()
    assert torch.equal(unpacked(packed(read), torch.float32), read), "packing twice changes nothing"


def test_what_is_too_large_for_float8_is_its_largest_and_never_nan():
    states = torch.tensor([1e4, -1e4, torch.inf, 448.0, 0.0], dtype=torch.bfloat16)
    read = unpacked(packed(states), torch.bfloat16)
    assert read.dtype == torch.bfloat16
    assert read.tolist() == [LARGEST, -LARGEST, LARGEST, 448.0, 0.0]
    assert unpacked(packed(torch.tensor([torch.nan])), torch.float32).isnan().all()


def test_only_keys_and_values_become_float8():
    keys, index = StateShape((2, 4), torch.float32), StateShape((1, 8), torch.float32)
    state = StateShape((3, 3), torch.float32)
    layout = CacheLayout(
        (LayerStates(keys, keys, index, recurrent=(state,)), LayerStates(conv=(state, None)))
    )
    narrow = in_float8(layout)
    assert narrow.layers[0].keys == StateShape((2, 4), FLOAT8)
    assert narrow.bytes_per_token == 8 + 8 + 8 * 4
    assert narrow.bytes_per_sequence == layout.bytes_per_sequence
    assert narrow.layers[1] == layout.layers[1]
    assert page_dtype(torch.bfloat16) == torch.bfloat16


def test_pages_hand_back_what_was_written_rounded_and_grow_and_copy_it():
    shape = StateShape((2, 3), torch.float32)
    layout = in_float8(CacheLayout((LayerStates(shape, shape),)))
    cache = PagedCache(layout, num_blocks=2, block_size=2, num_table_rows=1, device=CPU)
    assert cache.num_bytes == 2 * 3 * 2 * 6, "one byte an element"
    keys = torch.linspace(-3, 3, 2 * 3).view(1, 2, 1, 3)
    first = Step(0, torch.tensor([0]), None, torch.tensor([2]), None, torch.tensor([[0]]))
    cache.begin(first, is_fresh=True)
    cache.update(keys, 2 * keys, 0)
    cache.grow(5)
    cache.copy_blocks([1], [4])
    second = Step(
        2,
        torch.tensor([0]),
        None,
        torch.tensor([3]),
        torch.tensor([[PADDING_SLOT, 8, 3]]),
        torch.tensor([[0, 0, 1]]),
    )
    cache.begin(second, is_fresh=False)
    read_keys, read_values = cache.update(10 * keys, 20 * keys, 0)
    assert read_keys.dtype == torch.float32
    for read, written in ((read_keys, keys), (read_values, 2 * keys)):
        rounded = unpacked(packed(torch.cat([0 * written, written, 10 * written], 2)), read.dtype)
        assert torch.equal(read, rounded)
