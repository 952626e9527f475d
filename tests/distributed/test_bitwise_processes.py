"""Two processes that train one model with numerics="bitwise"."""

import pytest
from processes import run_processes

pytestmark = pytest.mark.slow


def test_data_parallel_processes_sample_what_they_train_on_in_every_bit():
    for found in run_processes("distributed/trl_bitwise.py"):
        for loss_forward in ("trainer", "packed"):
            run = found[loss_forward]
            assert run["figures"] == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
            assert run["is_repeated"]
            assert run["num_weights"] > 0
