"""Print the speed of rollouts on a CPU beside busy processes, of this package and of its peers.

    python scripts/measure/busy_machine.py
    python scripts/measure/busy_machine.py --models real --contenders cb_rollout generate

Each figure is tokens a second in a new process, which runs a workload twice and times the second
run. A busy process computes without end. Nothing else may run. vLLM takes part if
CB_ROLLOUT_VLLM_PYTHON names a Python that has it. `--settings` compares settings of OpenMP too.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.chats import load
from benchmarks.harness.contenders import Contender, generate, ours, transformers_batching
from benchmarks.peers.vllm_process import PYTHON_VARIABLE, vllm_contenders
from cb_rollout.engine.service.thread_share import ThreadShare
from cb_rollout.tools.bench import SMALL_SHAPE, Workload, create_model, long_tailed, timed

VLLM = "vLLM"

# Environment variables of the measured process, by what they are called in the table.
SETTINGS: dict[str, dict[str, str]] = {
    "defaults": {},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and how much of it is sampled."""

    create: Callable[[], Any]
    num_prompts: int
    """Prompts, each with eight completions."""
    longest: int
    """Tokens of the longest completion."""

    def workload(self, vocab_size: int) -> Workload:
        """Return completions of long-tailed lengths."""
        return long_tailed(
            vocab_size,
            num_prompts=self.num_prompts,
            prompt_tokens=(20, 60),
            log_mean=3.2,
            longest=self.longest,
        )


SUBJECTS = {
    "small": Subject(create=lambda: create_model(SMALL_SHAPE, "cpu"), num_prompts=16, longest=192),
    "real": Subject(create=lambda: load("cpu")[1], num_prompts=2, longest=64),
}


def all_threads() -> Any:
    """Return a context in which steps use all threads, whoever else uses the cores."""
    return patch.object(ThreadShare, "adjust", lambda _: None)


CONTENDERS: dict[str, tuple[Callable[[int], Contender], Callable[[], Any]]] = {
    "cb_rollout": (lambda _: ours(), nullcontext),
    "cb_rollout, all threads": (lambda _: ours(), all_threads),
    "generate": (generate, nullcontext),
    "transformers CB": (lambda _: transformers_batching(), nullcontext),
}
CONTENDER_NAMES = list(CONTENDERS)
if os.environ.get(PYTHON_VARIABLE):
    CONTENDER_NAMES.append(VLLM)


def measure(subject: Subject, contender_name: str) -> float:
    """Return the tokens a second of a contender, in this process."""
    model = subject.create()
    workload = subject.workload(model.config.vocab_size)
    if contender_name == VLLM:
        with vllm_contenders(model, [workload]) as contenders:
            (contender,) = contenders.values()
            return speed(contender, model, workload)
    create, context = CONTENDERS[contender_name]
    with context():
        return speed(create(len(workload.prompts)), model, workload)


def speed(contender: Contender, model: Any, workload: Workload) -> float:
    """Return the tokens a second of a workload's second run."""
    with contender.create(model, workload) as run:
        run(workload)
        return workload.num_tokens / timed(partial(run, workload))


def measure_apart(model_name: str, contender_name: str, setting: str) -> float:
    """Return what `measure` does, from a new process with these variables."""
    command = [sys.executable, __file__, "--here", model_name, contender_name]
    environment = os.environ | SETTINGS[setting]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(ran.stdout.split()[-1])


def print_row(
    model_name: str, contender_name: str, setting: str, options: argparse.Namespace
) -> None:
    """Print the median figure of a contender beside each number of busy processes."""
    figures: list[str] = []
    for count in options.busy:
        with busy_processes(count):
            turns: list[float] = []
            for _ in range(options.turns):
                turns.append(measure_apart(model_name, contender_name, setting))
        figures.append(f"{median(turns):.0f}")
    print(f"{model_name}, {contender_name}, {setting}: {', '.join(figures)}", flush=True)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep as many cores busy as there are processes."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Print a row for each model and contender, or one measurement of this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDER_NAMES, default=CONTENDER_NAMES)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["defaults"])
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 3], help="busy processes")
    parser.add_argument("--turns", type=int, default=1, help="of each figure, which is the median")
    parser.add_argument("--here", nargs=2, metavar=("MODEL", "CONTENDER"), help="measure one here")
    options = parser.parse_args()
    if options.here:
        model_name, contender_name = options.here
        print(measure(SUBJECTS[model_name], contender_name))
        return
    headings = ", ".join(f"{count} busy" for count in options.busy)
    print(f"model, contender, setting: tokens/s beside {headings}")
    for model_name in options.models:
        for contender_name in options.contenders:
            for setting in options.settings:
                print_row(model_name, contender_name, setting, options)


if __name__ == "__main__":
    main()
