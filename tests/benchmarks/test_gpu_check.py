"""`scripts/gpu_check.sh` with a Python that only says what it was asked to run."""

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu_check.sh"

# In order; what they run, and their budgets in seconds.
PARTS = {
    "gpu_tests": ("tests/gpu", 100),
    "decode_0.6B": ("--parts decode lifecycle --shapes 0.6B", 55),
    "grpo": ("--parts grpo", 85),
    "kernels": ("test_triton_kernels.py", 40),
    "decode_8B": ("--parts decode lifecycle --shapes 8B", 90),
    "peers": ("--parts peers", 150),
    "stages": ("--parts stages --shapes 8B", 50),
}

# Has every package and a device, unless told otherwise. Parts named in `SLOW` never end, and leave
# a process of another group that holds their output.
STUB = """#!{python}
import json, os, subprocess, sys, time
if sys.argv[1:2] == ["-"]:
    print(os.environ.get("LACKS", ""), end="")
    sys.exit(0)
if sys.argv[1] == "-c":
    sys.exit(1)
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
asked = " ".join(sys.argv[1:])
if any(part in asked for part in os.environ.get("SLOW", "").split()):
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    with open(os.environ["CALLS"] + ".pids", "a") as file:
        file.write(f"{{child.pid}}\\n")
    time.sleep(100)
sys.exit(3 * any(part in asked for part in os.environ.get("FAILS", "").split()))
"""


@pytest.fixture
def check(tmp_path):
    """Run the script; return its exit status, what it printed, and what it ran."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STUB.format(python=sys.executable))
    python.chmod(0o755)

    def run(first=tmp_path / "results", *rest, script_python=python, **variables):
        calls.write_text("")
        told = {"PYTHON": str(script_python), "CALLS": str(calls), "CB_ROLLOUT_VLLM_PYTHON": ""}
        done = subprocess.run(
            ["bash", SCRIPT, first, *rest],
            env=os.environ | told | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        ran = [json.loads(line) for line in calls.read_text().splitlines()]
        return done.returncode, done.stdout, [" ".join(call) for call in ran]

    yield run
    if (pids := Path(f"{calls}.pids")).exists():
        for pid in pids.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def outcomes(printed):
    """The exit status of each part, by the JSON that is printed last."""
    return {name: part["exit"] for name, part in json.loads(printed.splitlines()[-1]).items()}


def test_what_tells_most_runs_first_and_every_part_has_a_budget(check, tmp_path):
    status, printed, ran = check()
    assert status == 0
    assert [asked in call for (asked, _), call in zip(PARTS.values(), ran, strict=True)] == [
        True
    ] * len(PARTS)
    assert printed.splitlines()[-8:-1] == [f"{name}: passed" for name in PARTS]
    records = json.loads(printed.splitlines()[-1])
    assert records == json.loads((tmp_path / "results/parts.json").read_text())
    assert {name: record["budget"] for name, record in records.items()} == {
        name: budget for name, (_, budget) in PARTS.items()
    }
    assert {record["exit"] for record in records.values()} == {0}
    assert all(record["seconds"] <= record["budget"] for record in records.values())


def test_the_budgets_fill_one_call_and_the_first_four_minutes_hold_a_grpo_step():
    budgets = [budget for _, budget in PARTS.values()]
    assert sum(budgets) == 570
    assert "total=570" in SCRIPT.read_text()
    assert sum(budgets[:3]) <= 240


def test_vllm_is_compared_last_where_it_is_named(check):
    _, printed, ran = check(CB_ROLLOUT_VLLM_PYTHON="/some/python")
    assert len(ran) == 8
    assert "--parts vllm" in ran[-1]
    assert sum(part["budget"] for part in json.loads(printed.splitlines()[-1]).values()) == 700


def test_what_is_missing_is_named_with_how_to_get_it_before_anything_runs(check):
    status, printed, ran = check(LACKS="peft (ModuleNotFoundError: No module named 'peft')")
    assert (status, ran) == (2, [])
    assert "No module named 'peft'" in printed
    assert "--wheels" in printed
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
    assert (status, len(ran)) == (1, 7)
    assert "kernels: FAILED, see " in printed
    assert outcomes(printed) == dict.fromkeys(PARTS, 0) | {"kernels": 3}


@pytest.mark.slow
def test_a_part_is_killed_at_its_budget_whatever_it_started_and_stops_no_other(check):
    status, printed, ran = check(SLOW="tests/gpu", GPU_CHECK_SECONDS="30")
    assert (status, len(ran)) == (1, 7)
    assert "gpu_tests: ran out of time, see " in printed
    assert outcomes(printed) == dict.fromkeys(PARTS, 0) | {"gpu_tests": 124}


def test_the_script_ends_in_time_and_names_what_it_did_not_reach(check):
    status, printed, ran = check(SLOW="gpu", GPU_CHECK_SECONDS="3")
    assert status == 1
    assert outcomes(printed).keys() == PARTS.keys()
    assert set(outcomes(printed).values()) == {124, None}
    assert printed.count(": not reached") == 7 - len(ran) > 0


def test_the_archive_holds_the_results_of_all_parts_and_no_wheels(check, tmp_path):
    results = tmp_path / "results"
    archive = results / "out.tar.gz"
    (results / "site").mkdir(parents=True)
    (results / "site" / "carried.py").write_text("")
    check(results, archive)
    with tarfile.open(archive) as held:
        names = {name.removeprefix("./") for name in held.getnames()} - {"."}
        parts = json.load(held.extractfile("./parts.json"))
    assert names == {"parts.json", *(f"{name}.txt" for name in PARTS)}
    assert parts.keys() == PARTS.keys()


def wheels_of(tmp_path, *packages):
    """What `--wheels` prints for a Python that has only these packages."""
    site = tmp_path / "site"
    for package in packages:
        folder = site / f"{package.replace('-', '_')}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    python = tmp_path / "bare"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    command = ["bash", SCRIPT, "--wheels"]
    environment = os.environ | {"PYTHON": str(python)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def requirements(*names):
    """Canonical names of packages and of all that they require without extras."""
    found, queue = set(), list(names)
    while queue:
        name = re.sub("[-_.]+", "-", queue.pop()).lower()
        if name not in found:
            found.add(name)
            needed = importlib.metadata.requires(name) or []
            queue += [re.match(r"[\w.-]+", one)[0] for one in needed if ";" not in one]
    return found


def test_the_wheels_are_what_trl_and_datasets_need_beside_what_a_machine_has(tmp_path):
    has = requirements("transformers", "accelerate", "peft") | requirements("pytest", "hypothesis")
    has |= {"triton"}
    printed = wheels_of(tmp_path, *has)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(printed) <= set(pins)
    names = {re.sub("[-_.]+", "-", line.split("==")[0]) for line in printed}
    assert names == requirements("trl", "datasets") - has
    assert {"trl", "datasets", "dill"} <= names


def test_carried_wheels_are_importable_in_every_part_and_installed_nowhere_else(check, tmp_path):
    wheel = tmp_path / "wheels" / "carried-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carried.py", "")
        for file, text in {
            "METADATA": "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            archive.writestr(f"carried-1.0.dist-info/{file}", text)
    python = tmp_path / "real"
    python.write_text(
        f"""#!/bin/sh
case "$*" in "-m pip"*) exec {sys.executable} "$@";; -*) exec {tmp_path}/python "$@";; esac
exec {sys.executable} -c "import carried; print(carried.__file__)"
"""
    )
    python.chmod(0o755)
    status, printed, _ = check(script_python=python, GPU_CHECK_WHEELS=str(wheel.parent))
    assert status == 0
    site = tmp_path / "results/site/carried.py"
    assert printed.count(f"{site}\n") == 5
    assert importlib.util.find_spec("carried") is None
