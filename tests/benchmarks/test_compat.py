"""`scripts/compat.sh oldest` installs the lower bounds of `pyproject.toml`."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/compat.sh"


def test_the_oldest_versions_are_the_lower_bounds_and_what_torch_requires_there():
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", SCRIPT, "--pins"], env=environment, capture_output=True, text=True, check=True
    )
    pins = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    names = [re.match(r"[\w.-]+", pin)[0].lower() for pin in pins]
    assert len(set(names)) == len(names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounded = [one for one in project["dependencies"] if ">=" in one]
    assert len(bounded) == 3
    for one in bounded:
        name, lowest = re.match(r"(\w+)>=([\d.]+)", one).groups()
        assert f"{name}=={lowest}.*" in pins
    assert {"torch==2.11.*", "triton==3.6.*", "numpy<2.4"} <= set(pins)
    # Their own requirements are free.
    assert not {"tokenizers", "huggingface_hub", "safetensors"} & set(names)
    assert "pytest" in names


def test_the_tests_that_run_by_default_are_there():
    listed = re.search(r"^tests=\(\n(.*?)\n\)", SCRIPT.read_text(), re.M | re.S)[1].split()
    assert listed
    for path in listed:
        assert (ROOT / path).exists(), path
