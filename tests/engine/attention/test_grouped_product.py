"""The grouped product against torch's own, over random groups; interpreted where no GPU is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_faults import with_fault

pytest.importorskip("triton")

from cb_rollout.engine.attention.triton import kernels, launch
from cb_rollout.engine.attention.triton.launch import grouped_product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.slow
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
    compare(counts, size, num_columns, dtype, is_transposed, seed)


def compare(counts, size, num_columns, dtype, is_transposed, seed):
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


FAULTS = {
    "every group has the first weight": ("group * group_stride", "group * 0"),
    "a group begins at the first row": (
        "start = tl.sum(tl.where(is_own, starts, 0), 0)",
        "start = tl.sum(starts * 0, 0)",
    ),
    "the last inputs are left out": (
        "for at in range(0, size, TILE_SIZE):",
        "for at in range(0, size - 4, TILE_SIZE):",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="faults are interpreted")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_a_fault_is_refused(fault, tmp_path, monkeypatch):
    given = [3, 0, 5], 130, 16, torch.float32, False, 1
    compare(*given)
    faulty = with_fault(kernels, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(launch, "grouped_product_kernel", faulty.grouped_product_kernel)
    with pytest.raises(AssertionError):
        compare(*given)
