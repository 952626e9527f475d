"""What a sync gathers from other processes, under FSDP2."""

import pytest
from processes import run_processes

pytestmark = pytest.mark.slow


def test_shards_are_cast_before_they_are_gathered():
    for rank in run_processes("distributed/gathered_bytes.py"):
        single, half = rank["float32"], rank["bfloat16"]
        for one in (single, half):
            # Each of two processes sends its half, as the copy holds it.
            assert one["num_bytes"] * 2 == one["num_held_bytes"] > 0
            assert one["is_equal"]
            assert one["differing"] == []
        assert half["num_bytes"] < 0.6 * single["num_bytes"]
