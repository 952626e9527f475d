"""A test that ends the CUDA context takes no other test along."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sticky_errors

TESTS = Path(__file__).parents[1]

CONFTEST = """
import sticky_errors

def pytest_exception_interact(call):
    sticky_errors.end_process_after(call.excinfo.value)
"""

# As CUDA is: after one such error each call of the process fails.
FILE = """
import pytest

broken = []

@pytest.mark.parametrize("number", range(6))
def test_of_a_card(number):
    if number == 1:
        broken.append(number)
    if broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


def run(folder, *options):
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_card.py").write_text(FILE)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder)]
    command += ["-p", "no:cacheprovider", "-q", *options, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_worker_whose_context_ended_is_replaced_and_the_other_tests_pass(tmp_path):
    done = run(tmp_path, "-n", "1")
    # The failed test is reported with its error, and again as the one that ended its worker.
    assert "2 failed, 5 passed" in done.stdout
    assert "illegal memory access" in done.stdout


def test_without_workers_the_run_ends_with_the_error(tmp_path):
    done = run(tmp_path, "-p", "no:xdist")
    assert done.returncode == sticky_errors.EXIT_STATUS
    said = done.stdout + done.stderr
    assert "CUDA cannot be used in this process any more" in said
    assert "1 passed" in said


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: misaligned address"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("illegal memory access"), False),
    ],
)
def test_only_errors_of_cuda_that_end_its_context_are_sticky(error, expected):
    assert sticky_errors.is_sticky(error) is expected


def test_an_error_raised_from_a_sticky_one_is_sticky():
    error = ValueError("a rollout failed")
    error.__cause__ = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert sticky_errors.is_sticky(error)
