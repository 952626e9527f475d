"""vLLM as a contender, with a stub of vLLM on this Python's path."""

import contextlib
import json
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks import rollout
from benchmarks.harness.contenders import Contender
from benchmarks.harness.timing import interleaved
from benchmarks.peers.vllm_process import PYTHON_VARIABLE, vllm_contenders
from benchmarks.sizes import TINY, Setup
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.tools.bench import Workload, create_model

# Logs where vLLM does. A first prompt of 13 fails, and one of 14 ends a token too early.
STUB = """
import json, os, pathlib
from types import SimpleNamespace

__version__ = "1.2.3"
print("vLLM says hello")

def record(name, value):
    with open(os.environ["STUB_CALLS"], "a") as calls:
        calls.write(json.dumps([name, value]) + "\\n")

class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings

class LLM:
    def __init__(self, **arguments):
        assert pathlib.Path(arguments.pop("model"), "model.safetensors").exists()
        record("LLM", arguments)

    def reset_prefix_cache(self):
        record("reset", None)
        return True

    def generate(self, prompts, params, use_tqdm):
        record("generate", [[p["prompt_token_ids"], s.settings] for p, s in zip(prompts, params)])
        (first, *_) = prompts[0]["prompt_token_ids"]
        if first == 13:
            raise ValueError("thirteen is no prompt")
        lengths = [s.settings["max_tokens"] - (first == 14) for s in params]
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * n, logprobs=[{0: 0.0}] * n)])
            for n in lengths
        ]
"""

WORKLOAD = Workload([[2, 3], [4, 5, 6]], [3, 1])


@pytest.fixture(scope="module")
def model():
    return create_model(TINY.shape, "cpu", num_hidden_layers=1)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Put the stub where the worker finds it, and return what reads its calls."""
    (tmp_path / "vllm.py").write_text(STUB)
    log = tmp_path / "calls"
    monkeypatch.setenv("STUB_CALLS", str(log))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_one_process_answers_every_turn_with_its_prefix_cache_emptied(model, calls):
    shorter = Workload([[7, 8, 9, 10]], [1])
    with vllm_contenders(model, [WORKLOAD, shorter]) as found:
        (vllm,) = found.values()
        process = psutil.Process(vllm.pid)
        names = []
        here = Contender(lambda *_: contextlib.nullcontext(lambda _: names.append("here")), "here")
        turns = interleaved({"vLLM": vllm, "here": here}, model, WORKLOAD, repetitions=2)
    assert list(found) == ["vLLM 1.2.3"]
    assert not process.is_running()
    assert len(turns["vLLM"]) == 2
    # A process of its own, without torch.
    assert turns["vLLM"][0].peak_resident_bytes < turns["here"][0].peak_resident_bytes / 2
    (_, arguments), *rest = calls()
    assert arguments["dtype"] == "float32"
    assert (arguments["max_num_seqs"], arguments["max_model_len"]) == (2, 5)
    assert [name for name, _ in rest] == ["reset", "generate"] * 4
    for _, given in rest[1::2]:
        assert [prompt for prompt, _ in given] == WORKLOAD.prompts
        assert [params["max_tokens"] for _, params in given] == WORKLOAD.lengths
        assert all(params["ignore_eos"] and params["logprobs"] == 0 for _, params in given)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_rollout_has_vllm_as_a_contender(calls, monkeypatch):
    idle = Contender(lambda *_: contextlib.nullcontext(lambda _: None), "does nothing")
    monkeypatch.setattr(rollout, "transformers_batching", lambda: idle)
    monkeypatch.setattr(rollout, "generate", lambda _: idle)
    monkeypatch.setattr(rollout, "matmul_flops", lambda *_: 1.0)
    monkeypatch.setattr(rollout, "products_seconds", lambda *_: 1.0)
    results = rollout.bench_rollout(Setup(device="cpu", repetitions=1, sizes=TINY))
    for contenders in results.values():
        assert list(contenders)[:2] == ["cb_rollout", "vLLM 1.2.3"]
        figures = contenders["vLLM 1.2.3"]
        assert figures["matmul_share"] > 0
        assert "forwards_matmul_share" not in figures
    # Started once, a warm-up and a turn for each of two workloads, and nothing counted.
    assert [name for name, _ in calls()] == ["LLM"] + ["reset", "generate"] * 4


def test_without_the_variable_there_is_no_vllm(model, monkeypatch):
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    with vllm_contenders(model, [WORKLOAD]) as found:
        assert found == {}


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/no/python", "'/no/python' cannot be started: No such file.*Set CB_ROLLOUT_VLLM_PYTHON"),
        (sys.executable, "exit code 1: ModuleNotFoundError.*vllm.*Set CB_ROLLOUT_VLLM_PYTHON"),
    ],
)
def test_a_python_without_vllm_is_an_error_that_says_what_to_set(
    python, message, model, monkeypatch
):
    monkeypatch.setenv(PYTHON_VARIABLE, python)
    with pytest.raises(ConfigurationError, match=message), vllm_contenders(model, [WORKLOAD]):
        pass


def test_on_a_gpu_vllm_leaves_memory_to_this_process_and_takes_the_models_dtype(calls):
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    model.save_pretrained = lambda folder: (folder.mkdir(), (folder / "model.safetensors").touch())
    with vllm_contenders(model, [WORKLOAD]):
        pass
    ((_, arguments),) = calls()
    assert (arguments["dtype"], arguments["gpu_memory_utilization"]) == ("bfloat16", 0.4)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(13, "exit code 1: ValueError: thirteen"), (14, "gave 2 tokens and 2 log.* where 3")],
)
def test_a_run_that_fails_or_ends_early_is_an_error(prompt, message, model, calls, capfd):
    workload = Workload([[prompt]], [3])
    with vllm_contenders(model, [workload]) as found:
        (vllm,) = found.values()
        with vllm.create(model, workload) as run, pytest.raises(RolloutError, match=message):
            run(workload)
    assert ("Traceback" in capfd.readouterr().err) == (prompt == 13)
