"""Compiled code is read from a folder that no other user can write to."""

import os
import stat
from pathlib import Path

import pytest

from cb_rollout.compat import inductor

SOURCE = 'extern "C" int answer() { return 42; }'
OTHER_USER = 65534


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "of torch"))
    forget_libraries()
    return tmp_path / "cb_rollout" / "compiled"


def forget_libraries():
    inductor._CheckedLibraries.cache.clear()


def test_a_library_is_compiled_into_a_folder_of_the_user_alone(folder):
    library = inductor.compile_library(SOURCE)
    assert library.answer() == 42
    assert Path(library._name).is_relative_to(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).name == "of torch"
    assert not Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).exists()


def test_a_library_that_others_can_write_is_not_loaded(folder):
    path = Path(inductor.compile_library(SOURCE)._name)
    for writable in (path, path.parent):
        mode = writable.stat().st_mode
        writable.chmod(mode | 0o002)
        forget_libraries()
        with pytest.raises(PermissionError, match="is open to other users"):
            inductor.compile_library(SOURCE)
        writable.chmod(mode)
    assert inductor.compile_library(SOURCE).answer() == 42


def open_to_others(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def of_another_user(folder):
    folder.parent.mkdir()
    if os.geteuid():
        folder.symlink_to("/usr")
    else:
        folder.mkdir()
        os.chown(folder, OTHER_USER, OTHER_USER)


def in_place_of_a_folder(folder):
    folder.parent.write_text("a file")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (open_to_others, "is open to other users"),
        (of_another_user, "is of user"),
        (in_place_of_a_folder, "cannot be used"),
    ],
)
def test_a_folder_that_is_not_the_users_alone_is_not_used(folder, make, words):
    make(folder)
    with pytest.warns(UserWarning, match=words):
        library = inductor.compile_library(SOURCE)
    used = inductor.compiled_folder()
    assert library.answer() == 42
    assert Path(library._name).is_relative_to(used)
    assert not used.is_relative_to(folder)
    assert stat.S_IMODE(used.stat().st_mode) == 0o700
    assert used == inductor.compiled_folder()
