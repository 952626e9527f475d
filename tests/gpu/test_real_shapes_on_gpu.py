"""Shapes of models that people train, on a card; `scripts/gpu_check.sh` runs them first."""

import pytest
import torch
from device_laws import REAL_SHAPES, SHAPE_PATHS, assert_real_shape

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", SHAPE_PATHS)
@pytest.mark.parametrize("shape", REAL_SHAPES)
def test_a_real_shape_gives_the_plain_forwards_log_probabilities(shape, path):
    assert_real_shape(shape, path, torch.device("cuda", 0))
