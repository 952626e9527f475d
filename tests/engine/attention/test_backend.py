import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from tiny import tiny_model
from torch._inductor import config as inductor_config

from cb_rollout.engine.attention.backend import DecodePath, select_backend
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerStates, StateShape
from cb_rollout.engine.model.runner import ModelRunner

CUDA = torch.device("cuda")


def layout_of(size=128, dtype=torch.bfloat16, **more):
    states = StateShape((8, size), dtype)
    return CacheLayout((LayerStates(states, states, **more),))


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("ampere")
def test_an_ordinary_model_on_a_gpu_is_read_by_the_kernels():
    assert select_backend(CUDA).path is DecodePath.TRITON
    choice = select_backend(CUDA, layout_of(window=512))
    assert choice.path is DecodePath.TRITON
    assert str(choice) == "decode attention: triton (kernels read the pages, with no gather)"


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (layout_of(size=320), "heads of 320 are larger than 256"),
        (layout_of(dtype=torch.float64), "keys are torch.float64"),
        (layout_of(index=StateShape((1, 64), torch.bfloat16)), "more than keys and values"),
        (layout_of(conv=(StateShape((4,), torch.float32),)), "more than keys and values"),
        (CacheLayout((LayerStates(),)), "no layer keeps keys"),
    ],
)
def test_what_the_kernels_do_not_read_is_gathered_and_the_reason_is_told(layout, reason):
    choice = select_backend(CUDA, layout)
    assert choice.path is DecodePath.GATHERED
    assert reason in choice.reason


@pytest.mark.usefixtures("ampere")
def test_rows_that_cannot_stand_together_are_gathered():
    choice = select_backend(CUDA, layout_of(), is_padded=False)
    assert choice.reason == "the model takes only rows of one length together"


def test_a_device_that_cannot_says_so(monkeypatch):
    assert "on mps" in select_backend(torch.device("mps")).reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert select_backend(CUDA).reason == "triton is not installed; pip install triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    expected = "the kernels need compute capability 8.0, and the device has 7.5"
    assert select_backend(CUDA).reason == expected


def test_windows_are_those_that_transformers_own_cache_keeps():
    layout = ModelRunner(tiny_model("gpt_oss"), None).probe()
    assert [layer.window for layer in layout.layers] == [32, None]
    layout = ModelRunner(tiny_model("qwen3"), None).probe()
    assert [layer.window for layer in layout.layers] == [None, None]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from tiny import tiny_model
from torch._inductor import config as inductor_config
from cb_rollout import RolloutGenerator, SamplingParams
with RolloutGenerator(tiny_model()) as generator:
    outputs = generator.generate_batch([[5, 6]], sampling_params=SamplingParams(max_new_tokens=2))
print(len(outputs), [name for name in sys.modules if name.startswith("triton.")])
"""


def test_without_triton_the_package_runs():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "[]"]


@pytest.mark.parametrize(
    ("layout", "path", "reason"),
    [
        (layout_of(dtype=torch.float32), DecodePath.CPP, "a kernel reads the pages"),
        (layout_of(size=320, dtype=torch.float64), DecodePath.CPP, "a kernel reads the pages"),
        (layout_of(dtype=torch.bfloat16), DecodePath.GATHERED, "keys are torch.bfloat16"),
        (CacheLayout((LayerStates(),)), DecodePath.GATHERED, "no layer keeps keys"),
    ],
)
def test_a_cpu_has_a_kernel_for_what_is_not_rounded(layout, path, reason):
    choice = select_backend(torch.device("cpu"), layout)
    assert choice.path is path
    assert reason in choice.reason


def test_a_cpu_without_a_compiler_is_told_what_to_install():
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        choice = select_backend(torch.device("cpu"), layout_of(dtype=torch.float32))
    assert choice.path is DecodePath.GATHERED
    assert "needs a C++ compiler, g++ or the one that CXX names" in choice.reason
