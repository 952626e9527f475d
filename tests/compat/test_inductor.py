"""Compiled code is read from a folder that no other user can write to."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cb_rollout.compat import inductor
from cb_rollout.compat.inductor import cache_folder
from cb_rollout.errors import ConfigurationError

SOURCE = 'extern "C" int answer() { return 42; }'
OTHER_USER = 65534


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "of torch"))
    return tmp_path / "cb_rollout"


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_library_is_compiled_once_into_a_folder_of_the_user_alone(folder):
    library = inductor.compile_library(SOURCE)
    assert library.answer() == 42
    path = Path(library._name)
    assert path.is_relative_to(folder)
    assert [mode_of(one) for one in (folder, path.parent, path)] == [0o700] * 3
    compiled = path.stat().st_mtime_ns
    assert inductor.compile_library(SOURCE)._name == str(path)
    assert path.stat().st_mtime_ns == compiled
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).name == "of torch"
    assert not Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).exists()


@pytest.mark.slow
def test_a_graph_is_compiled_into_a_folder_of_the_user_alone(folder):
    module, _ = inductor.trace_graph(lambda values: (values * 3).sin(), torch.ones(5, 7))
    compiled = inductor.compile_graph(module.graph)
    torch.testing.assert_close(compiled(torch.ones(4, 7)), torch.full((4, 7), 3.0).sin())
    assert list(folder.rglob("*.py"))
    assert not list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).glob("*"))


@pytest.mark.slow
def test_a_users_umask_does_not_open_a_library_to_the_group(folder):
    script = f"""
import os
os.umask(0o002)
from cb_rollout.compat import inductor
assert inductor.compile_library({SOURCE!r}).answer() == 42
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
    (library,) = folder.glob("*/*.so")
    assert mode_of(library) == 0o700


def test_machines_that_share_a_home_do_not_share_kernels(folder, monkeypatch):
    first = Path(inductor.compile_library(SOURCE)._name)
    monkeypatch.setattr(inductor, "machine_hash", lambda: "another")
    assert Path(inductor.compile_library(SOURCE)._name) != first


def test_a_library_that_others_can_write_is_not_loaded(folder):
    path = Path(inductor.compile_library(SOURCE)._name)
    path.chmod(0o702)
    with pytest.raises(ConfigurationError, match="mode 702, so another user may have written"):
        inductor.compile_library(SOURCE)


def open_to_others(folder):
    folder.mkdir()
    folder.chmod(0o777)


def with_a_folder_open_to_others(folder):
    (folder / f"compiled-{inductor.machine_hash()}").mkdir(parents=True)
    (folder / f"compiled-{inductor.machine_hash()}").chmod(0o770)


def of_another_user(folder):
    if os.geteuid():
        folder.symlink_to("/usr")
    else:
        folder.mkdir()
        os.chown(folder, OTHER_USER, OTHER_USER)


def in_place_of_a_folder(folder):
    folder.write_text("a file")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (open_to_others, "mode 777"),
        (with_a_folder_open_to_others, "mode 770"),
        (of_another_user, "belongs to user"),
        (in_place_of_a_folder, "File exists"),
    ],
)
def test_a_folder_that_is_not_the_users_alone_is_not_used(folder, make, words):
    make(folder)
    inductor._temporary_folder.cache_clear()
    with pytest.warns(UserWarning, match=words):
        library = inductor.compile_library(SOURCE)
    path = Path(library._name)
    assert library.answer() == 42
    assert not path.is_relative_to(folder)
    assert mode_of(path.parent) == 0o700
    # Once a process.
    assert inductor.compile_library(SOURCE)._name == str(path)


def test_a_folder_that_others_can_read_is_closed(folder):
    folder.mkdir(mode=0o755)
    assert cache_folder() == folder
    assert mode_of(folder) == 0o700
