"""The wheel and the source archive, the commands of a wheel without a checkout, and the image."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from tiny import tiny_model

from cb_rollout import __version__
from cb_rollout.tools.cli.demo import RECIPE, recipe_path

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Build a wheel of this checkout and unpack it as an installer does."""
    pytest.importorskip("hatchling", reason="wheels are built by hatchling, from the extra dev")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def package_files(root):
    """Return the paths of the package's files below a folder."""
    return {
        path.relative_to(root)
        for path in (root / "cb_rollout").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def run_unpacked(unpacked, folder, *arguments):
    """Run a command of the wheel in a folder without a checkout."""
    code = f"import sys; sys.path.insert(0, {str(unpacked)!r}); from cb_rollout.tools import cli; "
    code += f"assert cli.__file__.startswith({str(unpacked)!r}); sys.exit(cli.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_demo_is_found_where_a_wheel_puts_it_and_in_a_checkout():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    forced = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert forced == {str(RECIPE): str("cb_rollout" / RECIPE)}
    assert recipe_path() == ROOT / RECIPE


def test_a_wheel_has_every_file_of_the_package_and_the_demo(unpacked):
    assert package_files(unpacked) == package_files(ROOT) | {"cb_rollout" / RECIPE}
    assert (unpacked / "cb_rollout" / RECIPE).read_bytes() == (ROOT / RECIPE).read_bytes()


def test_a_source_archive_has_what_makes_the_wheel_and_runs_its_tests(tmp_path):
    pytest.importorskip("hatchling", reason="archives are built by hatchling, from the extra dev")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    top = f"cb_rollout-{__version__}"
    with tarfile.open(tmp_path / f"{top}.tar.gz") as archive:
        names = set(archive.getnames())
    wanted = {"PKG-INFO", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", str(RECIPE)}
    wanted |= {"CHANGELOG.md", "scripts/test.sh", "scripts/_venv.sh", "tests/test_wheel.py"}
    wanted |= {str(path) for path in package_files(ROOT)}
    assert {f"{top}/{name}" for name in wanted} <= names
    assert not [name for name in names if "/.venv" in name or "/runs/" in name]


def test_what_the_wheel_requires_is_what_a_trainer_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    trainer = {"torch", "transformers", "trl", "accelerate", "peft"}
    assert names == trainer | {"wandb", "psutil"}


def test_the_changelog_has_a_section_of_the_version():
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in sections if name != "Unreleased") == __version__


def test_the_image_is_made_of_files_that_there_are():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert {"cb_rollout", "recipes", "pyproject.toml"} <= set(sources)
    assert all((ROOT / source).exists() for source in sources), sources
    arguments = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    assert (
        arguments == set(re.findall(r"\$\{(\w+)", text)) == {"BASE", "TORCH_INDEX", "REQUIREMENTS"}
    )


def test_a_tag_publishes_what_was_checked_on_every_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "package.yml").read_text())
    # YAML takes a bare `on` for true.
    assert workflow[True]["push"]["tags"] == ["v*"]
    wheel, publish = workflow["jobs"]["wheel"], workflow["jobs"]["publish"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if ":: 3." in line]
    assert wheel["strategy"]["matrix"]["python"] == named
    assert "bash scripts/check_wheel.sh python" in [step.get("run") for step in wheel["steps"]]
    assert publish["needs"] == "wheel"
    assert publish["permissions"] == {"id-token": "write"}
    assert "refs/tags/" in publish["if"]
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert not {"with", "env"} & set(publish["steps"][-1])


TRAINED = """
import importlib.abc, runpy, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "wandb":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

if "without" in sys.argv:
    sys.meta_path.insert(0, Missing())
    # What transformers looks for.
    import importlib.util
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == "wandb" else found(name, *a)
runpy.run_path(sys.argv[1], run_name="__main__")
if "without" in sys.argv:
    assert "wandb" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("wandb", ["with", "without"])
def test_a_trainer_is_attached_and_nothing_loads_wandb_for_it(wandb, tmp_path):
    script = str(ROOT / "tests" / "attach_once.py")
    done = subprocess.run(
        [sys.executable, "-c", TRAINED, script, wandb],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens a step" in done.stdout


@pytest.mark.slow
def test_the_commands_of_a_wheel_need_no_checkout(unpacked, tmp_path):
    tiny_model().save_pretrained(tmp_path / "tiny")
    few = ("tiny", "--repetitions", "1", "--device", "cpu")
    assert "tokens/s" in run_unpacked(unpacked, tmp_path, "bench", *few)
    few = ("--warmup-steps", "1", "--steps", "1", "--num-held-out", "8", "--output-dir", "run")
    assert "held-out accuracy" in run_unpacked(unpacked, tmp_path, "demo", *few)
