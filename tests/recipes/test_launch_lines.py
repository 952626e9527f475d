"""What the documents launch in several processes starts several, and says how many."""

import re

import pytest
from launching import RECIPES

ROOT = RECIPES.parent
SUFFIXES = {".py", ".md", ".yaml", ".sh", ".ipynb", ".txt"}
PLACES = ("cb_rollout", "docs", "recipes", "scripts", "README.md", "CONTRIBUTING.md", "llms.txt")
# A launch in a text ends with its line, or with the quotes around it.
LAUNCH = re.compile(r"accelerate launch((?:[^`\n\\]|\\\n)*)")
LAUNCHED = [
    path
    for path in sorted(RECIPES.glob("*.py"))
    if re.search(r"^(Launch:)? +(accelerate launch|torchrun) ", path.read_text(), re.MULTILINE)
]


def drops_its_number(options: str) -> bool:
    """Whether accelerate starts one process of the number that these options ask for."""
    names = {name.replace("_", "-") for name in re.findall(r"--[\w-]+", options)}
    return "--num-processes" in names and (
        "--cpu" in names or not names & {"--multi-gpu", "--config-file"}
    )


@pytest.mark.parametrize(
    ("options", "drops"),
    [
        (" --cpu --num_processes 2 a.py", True),
        (" --num-processes=2 a.py", True),
        (" --cpu --multi_gpu --num_processes 2 a.py", True),
        (" --multi_gpu --num_processes 2 a.py", False),
        (" --config_file fsdp2.yaml --num_processes 2 a.py", False),
        (" --cpu a.py", False),
    ],
)
def test_a_launch_that_drops_its_number_is_told(options, drops):
    assert drops_its_number(options) == drops


def texts():
    for place in PLACES:
        path = ROOT / place
        files = path.rglob("*") if path.is_dir() else [path]
        for file in files:
            if file.suffix in SUFFIXES:
                yield file, file.read_text()


def test_no_text_launches_one_process_of_several():
    launches = []
    for file, text in texts():
        launches += [(file, found[1]) for found in LAUNCH.finditer(text)]
    assert len(launches) > 20
    dropping = [f"{file}:{options}" for file, options in launches if drops_its_number(options)]
    assert not dropping


@pytest.mark.parametrize("path", LAUNCHED, ids=lambda path: path.stem)
def test_a_recipe_of_several_processes_prints_their_number(path):
    assert 'accelerator.print(f"processes: {' in path.read_text()


def test_all_recipes_of_several_processes_are_found():
    assert len(LAUNCHED) == 10
