"""`scripts/gpu_check.sh` with a Python that only says what it was asked to run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

# Has every package and a device, unless told otherwise; parts named in `SLOW` never end.
STUB = """#!{python}
import json, os, sys, time
if sys.argv[1:2] == ["-"]:
    print(os.environ.get("LACKS", ""), end="")
    sys.exit(0)
if sys.argv[1] == "-c":
    sys.exit(1)
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
asked = " ".join(sys.argv[1:])
if any(part in asked for part in os.environ.get("SLOW", "").split()):
    time.sleep(600)
sys.exit(any(part in asked for part in os.environ.get("FAILS", "").split()))
"""


@pytest.fixture
def check(tmp_path):
    """Run the script; return its exit status, what it printed, and what it ran."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STUB.format(python=sys.executable))
    python.chmod(0o755)

    def run(script_python=python, **variables):
        calls.write_text("")
        told = {"PYTHON": str(script_python), "CALLS": str(calls), "CB_ROLLOUT_VLLM_PYTHON": ""}
        done = subprocess.run(
            ["bash", ROOT / "scripts/gpu_check.sh", tmp_path / "results"],
            env=os.environ | told | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        ran = [json.loads(line) for line in calls.read_text().splitlines()]
        return done.returncode, done.stdout, [" ".join(call) for call in ran]

    return run


def test_the_comparison_with_peers_runs_first_and_vllm_where_it_is_named(check):
    status, printed, ran = check()
    assert status == 0
    assert ["--parts peers" in ran[0], "test_triton_kernels" in ran[1], "tests/gpu" in ran[2]]
    assert "--parts stages" in ran[3]
    assert len(ran) == 5
    assert printed.splitlines()[-5:] == [
        f"{name}: passed" for name in ("peers", "kernels", "gpu_tests", "stages", "decode")
    ]
    _, _, ran = check(CB_ROLLOUT_VLLM_PYTHON="/some/python")
    assert ["--parts peers" in ran[0], "--parts vllm" in ran[1]] == [True, True]


def test_what_is_missing_is_named_with_how_to_get_it_before_anything_runs(check):
    status, printed, ran = check(LACKS="peft (ModuleNotFoundError: No module named 'peft')")
    assert (status, ran) == (2, [])
    assert "No module named 'peft'" in printed
    assert "pip install" in printed
    status, printed, ran = check(script_python="/no/python")
    assert (status, ran) == (2, [])
    assert "PYTHON=/no/python" in printed


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_this_machine_lacks_a_device_and_nothing_else(check):
    status, printed, _ = check(script_python=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert status == 2
    assert printed.splitlines()[1:2] == ["a CUDA device: torch sees none"]


def test_a_part_that_fails_stops_no_other(check):
    status, printed, ran = check(FAILS="test_triton_kernels")
    assert (status, len(ran)) == (1, 5)
    assert "kernels: FAILED, see " in printed
    assert "decode: passed" in printed


def test_the_script_ends_in_time_and_names_what_it_did_not_reach(check):
    status, printed, ran = check(SLOW="peers", GPU_CHECK_SECONDS="3")
    assert (status, len(ran)) == (1, 1)
    assert printed.splitlines()[-5].startswith("peers: ran out of time")
    assert printed.splitlines()[-4:] == [
        f"{name}: not reached" for name in ("kernels", "gpu_tests", "stages", "decode")
    ]
