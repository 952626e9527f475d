"""Print the seconds of the first GRPO steps of SmolLM2, attached and on TRL's own path.

    python scripts/measure/first_step.py --size 16 --turns 3
    python scripts/measure/first_step.py --size 16 --profile

Each path runs in a process of its own, in turns, and ends after three steps. A run that was
planned for more steps (`--planned`) may prepare for them. The seconds of `attach` are a column of
their own. With `--cold` nothing that an earlier process compiled or tried is used. `--profile`
prints instead where our first step spends its time.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cb_rollout
from benchmarks.chats import PATHS, create_step_trainer
from benchmarks.sizes import MODELS, Setup

NUM_STEPS = 3
NUM_FUNCTIONS_SHOWN = 60


class StepTimes(TrainerCallback):
    """Note when each step ends; with a profiler, the first step alone is profiled."""

    def __init__(self, profiler: cProfile.Profile | None = None) -> None:
        self.seconds: list[float] = []
        self._profiler = profiler
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()
        if self._profiler is not None and not self.seconds:
            self._profiler.enable()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        if self._profiler is not None:
            self._profiler.disable()
        self.seconds.append(time.perf_counter() - self._started)


def measure(
    path_name: str, size: int, max_steps: int, profiler: cProfile.Profile | None
) -> dict[str, Any]:
    """Return the seconds of `attach` and of each of the first steps of a path."""
    path = PATHS[path_name]
    setup = Setup(device="cpu", repetitions=1, sizes=MODELS["135m"])
    times = StepTimes(profiler)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = create_step_trainer(setup, size, path, folder, NUM_STEPS, max_steps)
        started = time.perf_counter()
        if path.rollout is not None:
            cb_rollout.attach(trainer, cb_rollout.RolloutConfig(**path.rollout))
        attached = time.perf_counter() - started
        trainer.add_callback(times)
        trainer.train()
    return {"attach": attached, "steps": times.seconds}


def measure_apart(path_name: str, options: argparse.Namespace) -> list[float]:
    """Return the seconds of `attach` and of the steps, measured in a new process."""
    with tempfile.TemporaryDirectory() as caches:
        environment = dict(os.environ)
        if options.cold:
            environment |= {
                "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
                "XDG_CACHE_HOME": caches,
            }
        command = [sys.executable, __file__, "--here", path_name]
        command += ["--size", str(options.size), "--planned", str(options.planned)]
        ran = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    figures = json.loads(ran.stdout.splitlines()[-1])
    return [figures["attach"], *figures["steps"]]


def race(options: argparse.Namespace) -> None:
    """Print a row for each turn of each path, then the medians."""
    rows: dict[str, list[list[float]]] = {name: [] for name in PATHS}
    print("path, seconds of attach, of the first steps, and of all")
    for _ in range(options.turns):
        for name, turns in rows.items():
            turns.append(measure_apart(name, options))
            print_row(name, turns[-1])
    for name, turns in rows.items():
        print_row(
            f"{name}, median", [statistics.median(values) for values in zip(*turns, strict=True)]
        )


def print_row(name: str, seconds: list[float]) -> None:
    """Print seconds of one path."""
    figures = [*seconds, sum(seconds)]
    print(f"{name}: " + ", ".join(f"{value:.2f}" for value in figures), flush=True)


def main() -> None:
    """Race the paths, or measure one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=16, help="completions of a step")
    parser.add_argument("--planned", type=int, default=NUM_STEPS, help="steps of the whole run")
    parser.add_argument("--turns", type=int, default=3, help="of each path")
    parser.add_argument("--cold", action="store_true", help="with empty caches")
    parser.add_argument("--profile", action="store_true", help="print where our first step spends")
    parser.add_argument("--here", choices=PATHS, help="measure this path in this process")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.here, options.size, options.planned, None)))
    elif options.profile:
        profiler = cProfile.Profile()
        print(measure("cb_rollout", options.size, options.planned, profiler))
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(NUM_FUNCTIONS_SHOWN)
    else:
        race(options)


if __name__ == "__main__":
    main()
