"""The grouped product against torch's own, over random groups; interpreted where no GPU is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from cb_rollout.engine.attention.triton.launch import grouped_product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any),
    size=st.sampled_from([8, 48, 100]),
    num_columns=st.sampled_from([16, 65]),
    dtype=st.sampled_from(list(TOLERANCES)),
    is_transposed=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_each_row_is_multiplied_by_its_groups_weight(
    counts, size, num_columns, dtype, is_transposed, seed
):
    """Groups may be empty, and weights stored by column, as transformers stores them."""
    drawn = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(counts), size, generator=drawn).to(DEVICE, dtype)
    shape = (num_columns, size) if is_transposed else (size, num_columns)
    weights = torch.randn(len(counts), *shape, generator=drawn).to(DEVICE, dtype) / size**0.5
    weights = weights.transpose(1, 2) if is_transposed else weights
    ends = torch.tensor(counts, device=DEVICE).cumsum(0, dtype=torch.int32)
    found = grouped_product(rows, weights, ends)
    parts = zip(rows.split(counts), weights, strict=True)
    expected = torch.cat([part.double() @ weight.double() for part, weight in parts])
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCES[dtype], rtol=0.01)
