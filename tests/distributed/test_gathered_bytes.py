"""What a sync gathers from other processes, under FSDP2."""

import re

import pytest
from processes import run_processes

pytestmark = pytest.mark.slow


def test_shards_are_cast_before_they_are_gathered():
    for rank in run_processes("distributed/gathered_bytes.py", "gloo"):
        single, half = rank["float32"], rank["bfloat16"]
        for one in (single, half):
            # Each of two processes sends its half, as the copy holds it.
            assert one["num_bytes"] * 2 == one["num_held_bytes"] > 0
            assert one["is_equal"]
            assert one["differing"] == []
        assert half["num_bytes"] < 0.6 * single["num_bytes"]


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "its default"])
def test_over_gloo_each_gather_ends_before_the_next_begins(backend):
    for rank in run_processes("distributed/gathered_bytes.py", backend):
        for one in rank.values():
            assert one["order"].count("g") > 20
            assert "gg" not in one["order"]


def test_the_next_tensor_is_gathered_while_one_is_copied():
    for rank in run_processes("distributed/gathered_bytes.py", "one_thread"):
        for one in rank.values():
            assert one["order"].count("g") > 20
            # Two gathers begin before the first copy, and the next one before each other copy.
            assert re.fullmatch("gg(c+g)+c+", one["order"].replace("w", ""))
