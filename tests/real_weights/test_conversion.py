"""The real model is converted once, and a missing package is named."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smollm2 import COMMAND, smollm2_folder

SCRIPT = Path(__file__).parents[2] / "scripts" / "smollm2.py"


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError, match=re.escape(COMMAND)):
        smollm2_folder()
    # The folder of caches is made, and holds no model.
    assert not list(tmp_path.glob("cb_rollout/*"))


@pytest.mark.slow
def test_two_processes_convert_the_model_once(tmp_path, smollm2):
    partial = tmp_path / "cb_rollout" / "smollm2-135m-instruct.partial"
    # As an interrupted conversion leaves it.
    partial.mkdir(parents=True)
    (partial / "half").touch()
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, SCRIPT], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    printed = {process.communicate()[0].decode().strip() for process in processes}
    folder = partial.with_suffix("")
    assert [process.returncode for process in processes] == [0, 0]
    assert printed == {str(folder)}
    assert not partial.exists()
    assert {path.name for path in folder.iterdir()} == {path.name for path in smollm2.iterdir()}
    own, cached = (load_file(place / "model.safetensors") for place in (folder, smollm2))
    assert own.keys() == cached.keys()
    assert all(torch.equal(own[name], cached[name]) for name in own)
