"""Start vLLM from another environment, as a contender that lives as long as the bench.

Own its process, the saved model that it loads, its settings, and the errors of an environment that
has no vLLM. It starts once, since that takes minutes, and waits while others take their turns.
"""

import ctypes.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.harness.contenders import Contender
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.tools.bench import SEED, Run, Workload

PYTHON_VARIABLE = "CB_ROLLOUT_VLLM_PYTHON"

INSTALLATION = (
    f"Set {PYTHON_VARIABLE} to the Python of an environment with vLLM (docs/benchmarks/README.md "
    "has the commands that make one), or unset it to run without vLLM."
)

# vLLM's default on a CPU is 128, longer than a prompt: no two completions would share its keys. Its
# kernels want multiples of 32.
BLOCK_SIZE = 32

# Enough for all sequences at once, on a CPU.
CACHE_GIB = 2

# On a GPU, beside the model of this process.
GPU_MEMORY_UTILIZATION = 0.4

SETTINGS = (
    "in a process of its own that stays warm; in the model's dtype, compiled, prefix caching with "
    f"blocks of {BLOCK_SIZE} so that groups share prompts, emptied before each run; with "
    "log-probabilities; no weight sync"
)

WORKER = Path(__file__).with_name("vllm_worker.py")

# Relative to the working directory: vLLM finds what it compiled before by this name.
MODEL = "model"

# Lines of the log that are printed after a failure.
NUM_LOG_LINES = 20


class VllmProcess:
    """vLLM in the Python of another environment; a context manager that ends it."""

    def __init__(
        self, python: str, arguments: dict[str, Any], variables: dict[str, str], folder: Path
    ) -> None:
        """Start vLLM and wait until it is ready.

        Args:
            python: path of a Python that has vLLM.
            arguments: arguments of `vllm.LLM`.
            variables: added to the environment.
            folder: directory for the log, and the working directory.

        Raises:
            ConfigurationError: `python` is no program, or vLLM does not start there.
        """
        self._python = python
        self._log = folder / "vllm.log"
        environment = os.environ | variables
        try:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [python, str(WORKER)], cwd=folder, env=environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                )  # fmt: skip
        except OSError as error:
            raise ConfigurationError(
                f"{PYTHON_VARIABLE}={python!r} cannot be started: {error.strerror}. {INSTALLATION}"
            ) from error
        self.pid = self._process.pid
        try:
            self.version: str = self.ask(arguments)["version"]
        except RolloutError as error:
            raise ConfigurationError(f"{error} {INSTALLATION}") from error

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
            RolloutError: the process ended.
        """
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(f"{json.dumps(request)}\n")
            requests.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self.close()
        lines = self._log.read_text(errors="replace").splitlines()
        sys.stderr.write("".join(f"{text}\n" for text in lines[-NUM_LOG_LINES:]))
        raise RolloutError(
            f"vLLM of {PYTHON_VARIABLE}={self._python!r} ended with exit code "
            f"{self._process.returncode}: {lines[-1] if lines else 'it wrote no log'}."
        )

    def close(self) -> None:
        """End the process and wait for it."""
        # The worker ends with its input. `communicate` closes the pipes, broken ones too.
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def vllm_contenders(model: Any, workloads: Sequence[Workload]) -> Iterator[dict[str, Contender]]:
    """Start vLLM on a copy of a model, if the environment names its Python.

    Args:
        model: model that it runs.
        workloads: every workload that it will run.

    Yields:
        Its contender by name and version; empty without `CB_ROLLOUT_VLLM_PYTHON`.

    Raises:
        ConfigurationError: vLLM does not start.
    """
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / MODEL)
        print("vLLM starts, which takes minutes the first time", flush=True)
        arguments = vllm_arguments(model, workloads)
        variables = vllm_environment(Path(python), model.device.type)
        with VllmProcess(python, arguments, variables, Path(folder)) as process:
            yield {f"vLLM {process.version}": _contender(process)}


def _contender(process: VllmProcess) -> Contender:
    def run(part: Workload) -> None:
        answer = process.ask({"prompts": part.prompts, "lengths": part.lengths})
        if not answer["num_tokens"] == answer["num_logprobs"] == part.lengths:
            raise RolloutError(
                f"vLLM {process.version} gave {sum(answer['num_tokens'])} tokens and "
                f"{sum(answer['num_logprobs'])} log-probabilities where {part.num_tokens} were "
                "asked for, each completion with its own length."
            )

    @contextmanager
    def create(model: Any, workload: Workload) -> Iterator[Run]:
        del model, workload
        yield run

    return Contender(create, SETTINGS, pid=process.pid)


def vllm_arguments(model: Any, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a saved model and its workloads."""
    share = {} if model.device.type == "cpu" else {"gpu_memory_utilization": GPU_MEMORY_UTILIZATION}
    return share | {
        "model": MODEL,
        "skip_tokenizer_init": True,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": SEED,
        "max_num_seqs": max(len(workload.prompts) for workload in workloads),
        "max_model_len": max(
            len(prompt) + length
            for workload in workloads
            for prompt, length in zip(workload.prompts, workload.lengths, strict=True)
        ),
        "enable_prefix_caching": True,
        "block_size": BLOCK_SIZE,
    }


def vllm_environment(python: Path, device: str) -> dict[str, str]:
    """Return the variables that vLLM is started with."""
    # The engine's own process would poll while it is idle, and take a core from the others.
    everywhere = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    if device != "cpu":
        return everywhere
    # vLLM asks for both to be loaded first. Its Intel OpenMP is installed with it.
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    malloc = ctypes.util.find_library("tcmalloc_minimal")
    given = os.environ.get("LD_PRELOAD")
    preloaded = [str(openmp) if openmp.exists() else None, malloc, given]
    return everywhere | {
        # Without it, vLLM gives torch one thread.
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        # As vLLM sets them for its own processes.
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "LD_PRELOAD": ":".join(filter(None, preloaded)),
    }
