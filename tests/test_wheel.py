"""The contents of the wheel, and its commands without a checkout."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_the_commands_of_a_wheel_need_no_checkout(unpacked, tmp_path):
    tiniest = ("--tiny", "--repetitions", "1", "--device", "cpu", "--output-dir", "bench")
    assert "written to bench" in run_unpacked(unpacked, tmp_path, "bench", "rollout", *tiniest)
    few = ("--warmup-steps", "1", "--steps", "1", "--num-held-out", "8", "--output-dir", "run")
    assert "held-out accuracy" in run_unpacked(unpacked, tmp_path, "demo", *few)
