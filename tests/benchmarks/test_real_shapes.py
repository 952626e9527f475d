"""The law of `tests/gpu/test_real_shapes_on_gpu.py`, where the kernels are interpreted."""

import pytest
import torch
from device_laws import REAL_SHAPES, SHAPE_PATHS, assert_real_shape
from fast_path import pretend_cuda

SMALL = {
    "dtype": torch.float32,
    "vocabulary": 500,
    "prompt_lengths": (40,),
    "num_completions": 2,
    "num_tokens": 3,
    "num_rows": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("path", SHAPE_PATHS)
@pytest.mark.parametrize("shape", REAL_SHAPES)
def test_a_real_shape_gives_the_plain_forwards_log_probabilities(shape, path, monkeypatch):
    pretend_cuda(monkeypatch)
    assert_real_shape(shape, path, torch.device("cpu"), **SMALL)
