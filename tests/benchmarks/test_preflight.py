"""`scripts/gpu/preflight.py` where the device is the CPU, and its kernel is interpreted."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fast_path import Playback
from plain_attention import varlen_attn_of_grouped_heads

from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.cuda_graphs import graphs
from gpu import preflight

SCRIPT = Path(preflight.__file__)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="scripts/gpu_check.sh runs it")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(preflight, "DEVICE", "cpu")
    monkeypatch.setattr(graphs, "CudaCapture", Playback)
    monkeypatch.setattr(torch_compat, "varlen_attn", varlen_attn_of_grouped_heads)


@pytest.mark.parametrize(
    "name", ["versions", "triton_kernel", "capture", "varlen", "varlen_prefix"]
)
def test_a_check_passes_and_says_what_it_found(name):
    pytest.importorskip("triton")
    assert preflight.CHECKS[name]()


@pytest.mark.slow
def test_a_graph_is_compiled_as_the_engine_compiles_its_steps():
    assert preflight.inductor() == "two sizes as expected"


def test_a_kernel_that_sees_keys_of_the_future_is_refused(monkeypatch):
    def unmasked(query, key, value, *ends, enable_gqa, **named):
        later = torch.cat([key[1:], key[:1]])
        return varlen_attn_of_grouped_heads(
            query, later, value, *ends, enable_gqa=enable_gqa, **named
        )

    monkeypatch.setattr(torch_compat, "varlen_attn", unmasked)
    with pytest.raises(AssertionError, match="off sdpa by"):
        preflight.varlen_prefix()


def test_a_capture_that_keeps_its_numbers_is_refused(monkeypatch):
    class Frozen(Playback):
        def __call__(self, step):
            kept = step()
            return lambda: kept

    monkeypatch.setattr(graphs, "CudaCapture", Frozen)
    with pytest.raises(AssertionError):
        preflight.capture()


CHECK = """
import os, sys, time
name = sys.argv[2]
if name == "dies":
    os._exit(9)
if name == "hangs":
    time.sleep(100)
if name == "raises":
    raise RuntimeError("no such card")
print("fine")
"""


def test_each_check_has_a_line_whatever_the_others_do(tmp_path, monkeypatch, capsys):
    program = tmp_path / "checks.py"
    program.write_text(CHECK)
    monkeypatch.setattr(preflight, "__file__", str(program))
    assert not preflight.run_all(["dies", "passes", "raises", "hangs"], limit=5.0)
    printed = capsys.readouterr().out.splitlines()
    for name, said in {
        "dies": "ended with 9",
        "passes": "fine",
        "raises": "RuntimeError: no such card",
        "hangs": "did not end in",
    }.items():
        (line,) = [line for line in printed if line.startswith(f"{name}: ")]
        assert said in line
        assert ("ok" in line) is (name == "passes")


def test_checks_that_pass_are_a_success(tmp_path, monkeypatch):
    program = tmp_path / "checks.py"
    program.write_text(CHECK)
    monkeypatch.setattr(preflight, "__file__", str(program))
    assert preflight.run_all(["passes"])


def test_a_check_of_another_name_is_refused():
    command = [sys.executable, str(SCRIPT), "pasta"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no such check: pasta" in done.stderr
