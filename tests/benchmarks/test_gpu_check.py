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
    "preflight": ("preflight.py", 20),
    "shapes": ("tests/gpu/test_real_shapes_on_gpu.py", 35),
    "gpu_tests": ("tests/gpu --ignore", 75),
    "decode_0.6B": ("--parts decode lifecycle --shapes 0.6B", 50),
    "grpo": ("--parts grpo", 60),
    "kernels": ("--durations=5", 40),
    "sanitizer": ("memcheck", 40),
    "decode_8B": ("--parts decode lifecycle --shapes 8B", 80),
    "peers": ("--parts peers", 120),
    "stages": ("--parts stages --shapes 8B", 50),
}

# Begun at the start, side by side; each ends before the part that needs what it compiled.
BACKGROUND = {
    "compile_0.6B": "decode_0.6B",
    "compile_grpo": "grpo",
    "compile_8B": "decode_8B",
}
NUM_CALLS = len(PARTS) + len(BACKGROUND)

# Has every package and a device, unless told otherwise. Parts named in `SLOW` never end, and leave
# a process of another group that holds their output. The sanitizer is the same program.
STUB = """#!{python}
import json, os, subprocess, sys, time
if sys.argv[1:2] == ["-"]:
    lacks = os.environ.get("LACKS", "")
    print("\\n".join(one for one in lacks.splitlines() if one.split()[0] in sys.argv), end="")
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


def checked(tmp_path):
    """Yield a function that runs the script and returns its status, its output and what ran."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STUB.format(python=sys.executable))
    python.chmod(0o755)

    def run(first=tmp_path / "results", *rest, script_python=python, **variables):
        calls.write_text("")
        told = {
            "PYTHON": str(script_python),
            "CALLS": str(calls),
            "CB_ROLLOUT_VLLM_PYTHON": "",
            "COMPUTE_SANITIZER": str(python),
        }
        done = subprocess.run(
            ["bash", SCRIPT, first, *rest],
            env=os.environ | told | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        ran = [" ".join(json.loads(line)) for line in calls.read_text().splitlines()]
        return done.returncode, done.stdout, ran

    yield run
    if (pids := Path(f"{calls}.pids")).exists():
        for pid in pids.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def check(tmp_path):
    yield from checked(tmp_path)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """A run in which every part passes, and the folder that has its results."""
    folder = tmp_path_factory.mktemp("plain")
    for run in checked(folder):
        yield *run(), folder


def outcomes(printed):
    """The exit status of each part, by the JSON that is printed last."""
    return {name: part["exit"] for name, part in json.loads(printed.splitlines()[-1]).items()}


def in_foreground(calls):
    """The calls of the parts that run one after the other."""
    return [call for call in calls if "--parts compile" not in call]


def test_what_tells_most_runs_first_and_every_part_has_a_budget(plain_run):
    status, printed, ran, folder = plain_run
    assert status == 0
    for (asked, _), call in zip(PARTS.values(), in_foreground(ran), strict=True):
        assert asked in call
    records = json.loads(printed.splitlines()[-1])
    assert records == json.loads((folder / "results/parts.json").read_text())
    assert {name: records[name]["budget"] for name in PARTS} == {
        name: budget for name, (_, budget) in PARTS.items()
    }
    assert {record["exit"] for record in records.values()} == {0}
    assert all(record["seconds"] <= record["budget"] for record in records.values())
    assert all(f"{name}: passed" in printed.splitlines() for name in PARTS)


def test_whole_models_are_compiled_from_the_start_and_before_the_parts_that_need_them(plain_run):
    _, printed, ran, _ = plain_run
    begun = [call for call in ran if "--parts compile" in call]
    assert len(begun) == len(BACKGROUND)
    asked = {"--parts compile --shapes 0.6B", "--parts compile_grpo", "--parts compile --shapes 8B"}
    assert {call[call.index("--parts") :] for call in begun} == asked
    ended = list(json.loads(printed.splitlines()[-1]))
    for compiled, needed_by in BACKGROUND.items():
        assert ended.index(compiled) < ended.index(needed_by)


def test_the_budgets_fill_one_call_and_the_first_four_minutes_hold_a_grpo_step():
    budgets = [budget for _, budget in PARTS.values()]
    assert sum(budgets) == 570
    assert "total=570" in SCRIPT.read_text()
    assert sum(budgets[:5]) <= 240


def test_vllm_is_compared_last_where_it_is_named(check):
    _, printed, ran = check(CB_ROLLOUT_VLLM_PYTHON="/some/python")
    assert "--parts vllm" in ran[-1]
    records = json.loads(printed.splitlines()[-1])
    assert sum(records[name]["budget"] for name in [*PARTS, "vllm"]) == 700


def test_what_nothing_runs_without_is_named_with_how_to_get_it(check):
    status, printed, ran = check(LACKS="peft (ModuleNotFoundError: No module named 'peft')")
    assert (status, ran) == (2, [])
    assert "No module named 'peft'" in printed
    assert "--wheels" in printed
    status, printed, ran = check(script_python="/no/python")
    assert (status, ran) == (2, [])
    assert "PYTHON=/no/python" in printed


def test_what_a_part_needs_is_named_where_it_is_missing_and_the_parts_run_all_the_same(check):
    lacks = [f"{name} (ModuleNotFoundError: no {name})" for name in ("hypothesis", "trl")]
    status, printed, ran = check(LACKS="\n".join(lacks), COMPUTE_SANITIZER="")
    assert status == 0
    assert all(line in printed for line in lacks)
    assert "--wheels" in printed
    assert "sanitizer: left out, there is no compute-sanitizer" in printed
    assert len(ran) == NUM_CALLS - 1
    assert not any("memcheck" in call for call in ran)


def test_a_test_that_hangs_shows_where_and_a_file_that_fails_to_import_stops_none(
    plain_run,
):
    _, _, ran, _ = plain_run
    tests = [call for call in ran if "-m pytest" in call]
    assert len(tests) == 4
    for call in tests:
        assert "-o faulthandler_timeout=40" in call
        assert "--continue-on-collection-errors" in call


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_this_machine_lacks_a_device_and_nothing_else(check):
    status, printed, _ = check(script_python=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert status == 2
    assert printed.splitlines()[1:2] == ["a CUDA device: torch sees none"]


def test_a_part_that_fails_stops_no_other(check):
    status, printed, ran = check(FAILS="preflight memcheck compile_grpo")
    assert (status, len(ran)) == (1, NUM_CALLS)
    assert "sanitizer: FAILED, see " in printed
    failed = dict.fromkeys(("preflight", "sanitizer", "compile_grpo"), 3)
    assert outcomes(printed) == dict.fromkeys([*PARTS, *BACKGROUND], 0) | failed


@pytest.mark.slow
def test_a_part_is_killed_at_its_budget_whatever_it_started_and_stops_no_other(check):
    status, printed, ran = check(SLOW="--ignore", GPU_CHECK_SECONDS="30")
    assert (status, len(ran)) == (1, NUM_CALLS)
    assert "gpu_tests: ran out of time, see " in printed
    assert outcomes(printed) == dict.fromkeys([*PARTS, *BACKGROUND], 0) | {"gpu_tests": 124}


@pytest.mark.slow
def test_the_script_ends_in_time_and_names_what_it_did_not_reach(check):
    status, printed, ran = check(SLOW="gpu", GPU_CHECK_SECONDS="3")
    assert status == 1
    assert outcomes(printed).keys() == PARTS.keys() | BACKGROUND.keys()
    assert set(outcomes(printed).values()) == {124, None}
    assert printed.count(": not reached") == NUM_CALLS - len(ran) > 0


def test_the_archive_holds_the_results_of_all_parts_and_no_wheels(check, tmp_path):
    results = tmp_path / "results"
    archive = results / "out.tar.gz"
    (results / "site").mkdir(parents=True)
    (results / "site" / "carried.py").write_text("")
    check(results, archive)
    with tarfile.open(archive) as held:
        names = {name.removeprefix("./") for name in held.getnames()} - {"."}
        parts = json.load(held.extractfile("./parts.json"))
    assert names == {"parts.json", *(f"{name}.txt" for name in [*PARTS, *BACKGROUND])}
    assert parts.keys() == PARTS.keys() | BACKGROUND.keys()


def test_an_archive_lies_beside_the_results_unless_another_is_named(plain_run):
    _, printed, _, folder = plain_run
    archive = folder / "results.tar.gz"
    assert f"all results: {archive}" in printed
    with tarfile.open(archive) as held:
        assert "./preflight.txt" in held.getnames()


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
    # One line of each part that runs a file, in the foreground.
    assert printed.count(f"{site}\n") == 6
    assert importlib.util.find_spec("carried") is None
