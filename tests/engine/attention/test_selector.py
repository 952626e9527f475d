import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from documented import block, run
from tiny import tiny_model
from torch._inductor import config as inductor_config

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.attention import selector
from cb_rollout.engine.attention.cpu.backend import CpuBackend
from cb_rollout.engine.attention.selector import select_backend
from cb_rollout.engine.attention.triton.backend import TritonBackend
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.engine.model.runner import ModelRunner

CUDA = torch.device("cuda")


def layout_of(size=128, dtype=torch.bfloat16, **more):
    states = TensorSpec((8, size), dtype)
    return CacheLayout((LayerSpec(states, states, **more),))


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("ampere")
def test_an_ordinary_model_on_a_gpu_gets_the_triton_backend():
    assert select_backend(CUDA).backend is TritonBackend
    choice = select_backend(CUDA, layout_of(window=512))
    assert choice.backend is TritonBackend
    assert str(choice) == "decode attention: triton (kernels read the pages, with no gather)"


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (layout_of(size=320), "heads of 320 are larger than 256"),
        (layout_of(dtype=torch.float64), "keys are torch.float64"),
        (layout_of(index=TensorSpec((1, 64), torch.bfloat16)), "more than keys and values"),
        (layout_of(conv=(TensorSpec((4,), torch.float32),)), "more than keys and values"),
        (CacheLayout((LayerSpec(),)), "no layer keeps keys"),
    ],
)
def test_states_that_the_kernels_do_not_read_are_gathered_with_the_reason(layout, reason):
    choice = select_backend(CUDA, layout)
    assert choice.backend is None
    assert reason in choice.reason


@pytest.mark.usefixtures("ampere")
def test_a_model_that_is_recurrent_alone_has_kernels_on_a_gpu():
    layout = CacheLayout((LayerSpec(conv=(TensorSpec((4,), torch.float32),)),))
    assert select_backend(CUDA, layout).backend is TritonBackend
    assert select_backend(torch.device("cpu"), layout).reason == "no layer keeps keys"


@pytest.mark.usefixtures("ampere")
def test_a_model_without_padded_rows_is_gathered():
    choice = select_backend(CUDA, layout_of(), is_padded=False)
    assert choice.reason == "the model takes only rows of one length together"


def test_a_device_without_a_backend_is_named(monkeypatch):
    assert "on mps" in select_backend(torch.device("mps")).reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert select_backend(CUDA).reason == "triton is not installed; pip install triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    expected = "the kernels need compute capability 8.0, and the device has 7.5"
    assert select_backend(CUDA).reason == expected


def test_a_layouts_windows_are_those_of_transformers_own_cache():
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


@pytest.mark.slow
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
    ("layout", "backend", "reason"),
    [
        (layout_of(dtype=torch.float32), CpuBackend, "kernels read the pages"),
        (layout_of(size=320, dtype=torch.float64), CpuBackend, "kernels read the pages"),
        (layout_of(), CpuBackend, "kernels read the pages"),
        (layout_of(dtype=torch.float16), None, "keys are torch.float16"),
        (CacheLayout((LayerSpec(),)), None, "no layer keeps keys"),
    ],
)
def test_a_cpu_has_a_kernel_for_all_but_float16(layout, backend, reason):
    choice = select_backend(torch.device("cpu"), layout)
    assert choice.backend is backend
    assert reason in choice.reason


def test_a_cpu_without_a_compiler_is_told_what_to_install():
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        choice = select_backend(torch.device("cpu"), layout_of(dtype=torch.float32))
    assert choice.backend is None
    assert "needs a C++ compiler, g++ or the one that CXX names" in choice.reason


class CountedBackend(run(block("Add an attention backend"))["TorchBackend"]):
    num_steps = 0

    def prepare(self, *args):
        type(self).num_steps += 1
        return super().prepare(*args)


def test_a_backend_of_ones_own_is_selected_and_runs_the_decode_steps(monkeypatch):
    model, prompts = tiny_model(), [[5, 6, 7], [8, 9]]
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    outputs = []
    for backends in (selector.BACKENDS, [CountedBackend, *selector.BACKENDS]):
        monkeypatch.setattr(selector, "BACKENDS", backends)
        with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
            runner = generator.manager.engine.runner
            assert (
                runner.backend_selection.backend
                is backends[-1 if backends[0] is TritonBackend else 0]
            )
            num_before = CountedBackend.num_steps
            outputs.append(generator.generate_batch(prompts, sampling_params=params).values())
    assert str(runner.backend_selection).startswith("decode attention: torch (")
    assert CountedBackend.num_steps - num_before == 3
    for own, usual in zip(*outputs, strict=True):
        assert own.generated_tokens == usual.generated_tokens
        assert own.logprobs == pytest.approx(usual.logprobs, abs=1e-5)
