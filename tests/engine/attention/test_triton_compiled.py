"""The Triton kernels compile for the GPUs they are for, on a machine that has none of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from cb_rollout.engine.attention.shared_prefix import STRETCHES_PER_PROCESSOR

QWEN3 = "Qwen3-8B"
SCRIPT = Path(__file__).parents[2] / "compiled_kernels.py"
# Bytes that one block may take on any card of compute capability 8.0 or more.
LEAST_SHARED_MEMORY = 99 << 10
# Of one processor of an H100: registers of 4 bytes, and bytes of shared memory, 1 KiB of each
# program's reserved.
REGISTERS, SHARED_MEMORY = 1 << 16, 228 << 10
THREADS = 128


def programs_per_processor(kernel):
    """Return how many programs of `THREADS` an H100's processor holds at once."""
    registers = -(-kernel["registers"] // 8) * 8 * THREADS
    return min(REGISTERS // registers, SHARED_MEMORY // (kernel["shared"] + 1024))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_compile_for_a_gpu(capability, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(done.stdout.splitlines()[-1])
    kernels = {"write_kernel", "cut_kernel", "attend_kernel", "join_kernel"}
    kernels |= {"grouped_product_kernel", "move_states_kernel"}
    kernels |= {"measure_kernel", "truncate_kernel", "draw_kernel"}
    assert {one["kernel"] for one in made} == kernels
    assert all(one["bytes"] for one in made)
    assert max(one["shared"] for one in made) <= LEAST_SHARED_MEMORY
    # What does not fit the registers goes through memory, in every step of the loop over keys.
    assert {(one["form"], one["kernel"]): one["stack"] for one in made if one["stack"]} == {}
    for one in made:
        if one["kernel"] in ("attend_kernel", "grouped_product_kernel"):
            # Memory is read 16 bytes at a time, ahead of the tensor cores that take it.
            assert one["wide copies"]
            assert one["products"] or one["form"].endswith("float32")
    split = [one for one in made if one["kernel"] == "attend_kernel" and one["splits own keys"]]
    assert {(one["rows"], one["stages"]) for one in split} == {(4, 3), (32, 2)}
    if capability == 90:
        held = {one["rows"]: programs_per_processor(one) for one in split if one["form"] == QWEN3}
        # Few rows launch no more than these; many rows fill the processor.
        assert held[4] == STRETCHES_PER_PROCESSOR < held[32]
