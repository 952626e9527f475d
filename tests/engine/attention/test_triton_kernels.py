"""The decode kernels against a plain softmax, over random shapes; interpreted where no GPU is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import softmax_attention

pytest.importorskip("triton")

from cb_rollout.engine.attention.backend import AttentionMetadata, AttentionSpec
from cb_rollout.engine.attention.triton.launch import TYPES, attend, shared_rows, write

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

FLOAT32 = 1e-5 if torch.cuda.is_available() else 2e-6
# A device approximates powers and logarithms of two to about 2e-6.

TOLERANCES = {torch.float32: FLOAT32, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Rounding of outputs of order one; float32 products are not rounded to tf32.


class Pages:
    """Random pages of some rows, groups of which share their leading blocks."""

    def __init__(self, lengths, groups, *, key_heads, sizes, block_size, dtype):
        self.lengths, self.groups, self.block_size, self.dtype = lengths, groups, block_size, dtype
        self.key_heads, (self.D, self.E) = key_heads, sizes
        width = max(lengths) // block_size + 1
        blocks = torch.randperm(len(lengths) * width) + 1
        self.table = blocks.view(len(lengths), width).to(DEVICE)
        for first, count, num_shared in groups:
            self.table[first : first + count, : num_shared // block_size] = self.table[
                first, : num_shared // block_size
            ]
        num_slots = (len(blocks) + 1) * block_size
        self.keys, self.values = (
            torch.randn(num_slots, key_heads * size, device=DEVICE).to(dtype) for size in sizes
        )
        self.types = TYPES[dtype], TYPES[dtype]

    def metadata(self, num_splits, least_stretch, heads_per_key, has_tiles):
        tensors = (self.table, self.keys, self.values)
        addresses = [tensors[0].data_ptr(), self.table.shape[1]]
        addresses += [tensor.data_ptr() for tensor in tensors[1:]]
        rows_per_tile = shared_rows(heads_per_key, max(self.D, self.E), self.types)
        shared, tiles = [0] * len(self.lengths), []
        for first, count, num_shared in self.groups:
            shared[first : first + count] = [num_shared] * count
            for row in range(first, first + count, rows_per_tile):
                tiles.append((row, min(rows_per_tile, first + count - row)))
        tiles.append((0, 0))  # as in a graph with room for more tiles

        def integers(values):
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        return AttentionMetadata(
            torch.tensor(addresses, device=DEVICE),
            self.block_size,
            integers(range(len(self.lengths))),
            integers(self.lengths),
            num_splits,
            least_stretch,
            integers(shared) if has_tiles else None,
            integers([first for first, _ in tiles]) if has_tiles else None,
            integers([count for _, count in tiles]) if has_tiles else None,
            rows_per_tile,
        )

    def row(self, row):
        """Keys and values of one row, in order."""
        offsets = torch.arange(self.block_size, device=DEVICE)
        slots = (self.table[row, :, None] * self.block_size + offsets).view(-1)
        slots = slots[: self.lengths[row]]
        return (
            self.keys[slots].view(-1, self.key_heads, self.D),
            self.values[slots].view(-1, self.key_heads, self.E),
        )


def check(pages, spec, *, heads_per_key, num_splits=1, least_stretch=16, has_tiles=False):
    metadata = pages.metadata(num_splits, least_stretch, heads_per_key, has_tiles)
    B, K, dtype = len(pages.lengths), pages.key_heads, pages.dtype
    new_keys, new_values = (
        torch.randn(B, K, size, device=DEVICE).to(dtype) for size in (pages.D, pages.E)
    )
    before = pages.keys.clone()
    write(new_keys, new_values, metadata, 0, pages.types)
    query = torch.randn(B, K * heads_per_key, pages.D, device=DEVICE).to(dtype)
    output = attend(query, K, pages.E, metadata, 0, pages.types, spec)
    num_written = (pages.keys != before).any(1).sum().item()
    assert num_written == sum(length > 0 for length in pages.lengths)
    for row, length in enumerate(pages.lengths):
        if not length:
            assert not output[row].any()
            continue
        keys, values = pages.row(row)
        assert torch.equal(keys[-1], new_keys[row])
        assert torch.equal(values[-1], new_values[row])
        expected = softmax_attention(query[row], keys, values, spec)
        torch.testing.assert_close(
            output[row].double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
        )


def sinks(count):
    return torch.randn(count, device=DEVICE)


@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 10_000))
def test_every_row_attends_over_its_own_keys(data, seed):
    torch.manual_seed(seed)
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=3).filter(any))
    key_heads, heads_per_key = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 5), (2, 3)]))
    pages = Pages(
        lengths,
        [],
        key_heads=key_heads,
        sizes=data.draw(st.sampled_from([(16, 16), (24, 40), (64, 8)])),
        block_size=data.draw(st.sampled_from([1, 4, 7, 32])),
        dtype=data.draw(st.sampled_from(list(TOLERANCES))),
    )
    spec = AttentionSpec(
        0.3,
        window=data.draw(st.sampled_from([None, 1, 9, 64])),
        softcap=data.draw(st.sampled_from([None, 4.0])),
        sinks_H=data.draw(st.sampled_from([None, sinks(key_heads * heads_per_key)])),
    )
    check(pages, spec, heads_per_key=heads_per_key, num_splits=data.draw(st.integers(1, 4)))


@pytest.mark.parametrize(
    "spec", [AttentionSpec(0.3), AttentionSpec(0.2, 29, 4.0, sinks(6))], ids=["plain", "all"]
)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_rows_that_share_a_prompt_read_it_as_if_it_were_their_own(spec, num_splits):
    torch.manual_seed(num_splits)
    groups = [(0, 3, 21), (4, 2, 14)]
    pages = Pages(
        [25, 31, 63, 5, 15, 30],
        groups,
        key_heads=2,
        sizes=(24, 40),
        block_size=7,
        dtype=torch.float32,
    )
    check(pages, spec, heads_per_key=3, num_splits=num_splits, has_tiles=True)


def test_a_group_larger_than_a_tile_gets_several():
    torch.manual_seed(0)
    pages = Pages(
        [9 + row for row in range(7)],
        [(0, 7, 8)],
        key_heads=1,
        sizes=(16, 16),
        block_size=4,
        dtype=torch.float32,
    )
    assert shared_rows(10, 16, pages.types) == 3
    check(pages, AttentionSpec(0.3), heads_per_key=10, has_tiles=True)


@pytest.mark.parametrize("size", [96, 256])
def test_large_heads_fit(size):
    torch.manual_seed(size)
    pages = Pages([40], [], key_heads=1, sizes=(size, size), block_size=16, dtype=torch.bfloat16)
    check(pages, AttentionSpec(size**-0.5), heads_per_key=4)


def test_queries_and_keys_may_be_slices_of_a_larger_tensor():
    torch.manual_seed(0)
    pages = Pages([5, 9], [], key_heads=2, sizes=(8, 8), block_size=4, dtype=torch.float32)
    metadata = pages.metadata(1, 16, 1, has_tiles=False)
    packed = torch.randn(2, 6, 8, 2, device=DEVICE).transpose(2, 3)[:, :, 0]
    query, keys, values = packed[:, :2], packed[:, 2:4], packed[:, 4:]
    write(keys, values, metadata, 0, pages.types)
    output = attend(query, 2, 8, metadata, 0, pages.types, AttentionSpec(0.3))
    for row in range(2):
        expected = softmax_attention(query[row], *pages.row(row), AttentionSpec(0.3))
        torch.testing.assert_close(output[row].double(), expected, atol=FLOAT32, rtol=FLOAT32)
