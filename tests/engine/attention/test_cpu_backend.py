"""The C++ kernel of decode steps against a plain softmax, over random shapes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import softmax_attention

from cb_rollout.engine.attention.cpu.backend import CpuPagedAttention
from cb_rollout.engine.attention.decode_cache import (
    AttentionSpec,
    DecodeLayer,
    UnsupportedAttentionError,
)
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.numerics.kernels import TYPES

CPU = torch.device("cpu")
# Rounding of outputs of order one.
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2**-8}

# Query heads, key heads, and sizes of keys and values: whole vectors, parts of one, and both.
SHAPES = [(4, 2, 32, 32), (6, 1, 20, 12), (3, 3, 5, 80)]


class Rows:
    """Rows whose histories are in pages, and their new tokens."""

    def __init__(self, lengths, shape, dtype, block_size, table_rows=None):
        self.num_heads, self.K, self.D, self.E = shape
        self.lengths_B, self.block_size = torch.tensor(lengths), block_size
        self.table_rows_B = torch.tensor(range(len(lengths)) if table_rows is None else table_rows)
        num_table_rows, width = max(self.table_rows_B) + 1, max(lengths) // block_size + 1
        self.table = BlockTable(num_table_rows, block_size, CPU)
        blocks = iter((torch.randperm(num_table_rows * width) + 1).tolist())
        entries = [
            (table_row, index) for table_row in range(num_table_rows) for index in range(width)
        ]
        self.table.write([(*entry, block) for entry, block in zip(entries, blocks, strict=True)])
        spec = LayerSpec(*(TensorSpec((self.K, size), dtype) for size in (self.D, self.E)))
        self.layer = DecodeLayer(0, spec, CPU)
        self.cache = PagedCache(
            CacheLayout((spec,)),
            num_blocks=num_table_rows * width + 1,
            block_size=block_size,
            num_table_rows=num_table_rows,
            device=CPU,
        )
        self.pages = self.cache.layers[0].pages
        for pages in self.pages:
            pages.copy_(torch.randn(pages.shape))
        B = len(lengths)
        self.query, self.key, self.value = (
            torch.randn(B, heads, 1, size).to(dtype)
            for heads, size in ((self.num_heads, self.D), (self.K, self.D), (self.K, self.E))
        )

    def attend(self, spec):
        attention = CpuPagedAttention(self.cache, self.table, self.table_rows_B, self.lengths_B)
        return attention.attend(self.layer, self.query, self.key, self.value, spec)

    def history(self, row):
        """Keys and values of one row as its pages have them now."""
        positions = torch.arange(self.lengths_B[row])[None]
        slots = self.table.slots(self.table_rows_B[row][None], positions)[0]
        shapes = (self.K, self.D), (self.K, self.E)
        return [
            pages[slots].view(-1, *shape) for pages, shape in zip(self.pages, shapes, strict=True)
        ]

    def check(self, spec):
        before = [pages.clone() for pages in self.pages]
        output = self.attend(spec)
        for old, new in zip(before, self.pages, strict=True):
            assert (old != new).any(1).sum() <= len(self.lengths_B)
        tolerance = TOLERANCES[self.query.dtype]
        for row in range(len(self.lengths_B)):
            keys, values = self.history(row)
            assert torch.equal(keys[-1], self.key[row, :, 0])
            assert torch.equal(values[-1], self.value[row, :, 0])
            expected = softmax_attention(self.query[row, :, 0], keys, values, spec)
            # Sums are in float32 and rounded once, so a small output is as exact as a large one.
            torch.testing.assert_close(
                output[row, 0].double(), expected, atol=min(tolerance, 1e-5), rtol=tolerance
            )


@pytest.mark.fast_cases("shape2-dtype0")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10_000))
def test_every_row_attends_over_its_own_keys(shape, dtype, data, seed):
    torch.manual_seed(seed)
    rows = Rows(
        data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=9)),
        shape,
        dtype,
        data.draw(st.sampled_from([1, 4, 7, 32])),
    )
    sinks = torch.randn(shape[0]).to(torch.bfloat16)
    rows.check(
        AttentionSpec(
            0.3,
            window=data.draw(st.sampled_from([None, 1, 9, 64])),
            softcap=data.draw(st.sampled_from([None, 4.0])),
            sinks_H=data.draw(st.sampled_from([None, sinks])),
        )
    )


def test_rows_of_one_table_row_see_the_tokens_before_their_own():
    torch.manual_seed(0)
    rows = Rows([9, 10, 11, 12, 5], SHAPES[0], torch.float32, 4, table_rows=[0, 0, 0, 0, 1])
    rows.check(AttentionSpec(0.3))


AFTER_A_FORK = """
import os, signal, torch
from test_cpu_backend import SHAPES, Rows
from cb_rollout.engine.attention.decode_cache import AttentionSpec

torch.set_num_threads(2)
Rows([900] * 8, SHAPES[0], torch.float32, 16).attend(AttentionSpec(0.3))
few = Rows([5, 9], SHAPES[0], torch.float32, 4)
child = os.fork()
signal.alarm(30)
assert few.attend(AttentionSpec(0.3)).isfinite().all()
if child:
    assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


@pytest.mark.slow
def test_a_forked_process_attends_where_work_is_small():
    done = subprocess.run(
        [sys.executable, "-c", AFTER_A_FORK],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(num_threads):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for lengths in ([70], [900], [3, 400], [50] * 13):
            Rows(lengths, SHAPES[0], torch.float32, 4).check(AttentionSpec(0.3))
    finally:
        torch.set_num_threads(before)


def test_states_may_be_columns_or_slices_of_a_larger_tensor():
    torch.manual_seed(0)
    rows = Rows([9, 5], SHAPES[0], torch.float32, 4)
    rows.query = rows.query.transpose(0, 3).contiguous().transpose(0, 3)
    rows.value = torch.stack([rows.value, rows.value * 0], -1)[..., 0]
    assert rows.query.stride(3) != 1 != rows.value.stride(3)
    rows.check(AttentionSpec(0.3))


def test_scores_of_any_size_are_attended():
    torch.manual_seed(0)
    for scale in (1e-30, 1e3):
        rows = Rows([70, 33], SHAPES[0], torch.float32, 4)
        rows.check(AttentionSpec(scale))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_own_row(number):
    torch.manual_seed(0)
    rows = Rows([70, 33], SHAPES[0], torch.float32, 4)
    rows.key[0] = number
    output = rows.attend(AttentionSpec(0.3))
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def attend_in(key_dtype, value_dtype, *states):
    specs = [LayerSpec(TensorSpec((2, 8), key_dtype), TensorSpec((2, 8), value_dtype))]
    cache = PagedCache(
        CacheLayout(tuple(specs)), num_blocks=4, block_size=4, num_table_rows=1, device=CPU
    )
    row = torch.tensor([0]), torch.tensor([1])
    attention = CpuPagedAttention(cache, BlockTable(1, 4, CPU), *row)
    return attention.attend(DecodeLayer(0, specs[0], CPU), *states, AttentionSpec(0.3))


def test_states_of_two_types_are_refused():
    state = torch.zeros(1, 2, 1, 8)
    for dtypes, states, reason in (
        ((torch.float32, torch.float32), (state, state, state.bfloat16()), "values torch.bfloat16"),
        ((torch.float32, torch.float32), (state.double(),) * 3, "torch.float64, and its pages"),
        ((torch.bfloat16, torch.float32), (state, state, state), "pages torch.bfloat16 and"),
    ):
        with pytest.raises(UnsupportedAttentionError, match=reason):
            attend_in(*dtypes, *states)


def test_autocast_states_are_rounded_as_pages_keep_them():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 1, 8).unbind()
    dtypes = torch.bfloat16, torch.bfloat16
    rounded = attend_in(*dtypes, query.bfloat16(), key.bfloat16(), value.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(attend_in(*dtypes, query, key, value.bfloat16()), rounded)
