"""Times of contenders that take turns, and the peak memory of each turn.

Turns are interleaved, so that a slow spell of the machine affects every contender alike.
"""

import threading
from typing import Any, NamedTuple, Self

import psutil

from benchmarks.harness.contenders import Contender
from benchmarks.harness.records import summary
from cb_rollout.tools.bench import Workload, timed

# Reading the resident size takes microseconds; a decode step takes about this long.
SAMPLE_SECONDS = 0.02


class Turn(NamedTuple):
    """A timed run of a contender."""

    seconds: float
    peak_resident_bytes: int
    """Peak resident size of the contender's process while the contender existed."""


class ResidentPeak:
    """Peak resident size of a process, or of this process, inside a `with` block.

    Sampled in a thread: the engine resets the kernel's own peak to measure training.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.num_bytes = 0
        self._process = psutil.Process(pid)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resident peak", daemon=True)

    def sample(self) -> None:
        self.num_bytes = max(self.num_bytes, self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.sample()

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.sample()


def take_turn(
    contender: Contender,
    model: Any,
    workload: Workload,
    warm_up: Workload | None = None,
    num_warm_ups: int = 1,
) -> Turn:
    """Create a contender, run `warm_up` or `workload` a few times, and time `workload`.

    Each turn creates its contender, since transformers' manager changes the model's attention
    implementation while it exists.
    """
    with ResidentPeak(contender.pid) as peak, contender.create(model, workload) as run:
        for _ in range(num_warm_ups):
            run(warm_up or workload)
        seconds = timed(lambda: run(workload))
    return Turn(seconds, peak.num_bytes)


def interleaved(
    contenders: dict[str, Contender],
    model: Any,
    workload: Workload,
    repetitions: int,
    num_warm_ups: int = 1,
    warm_up: Workload | None = None,
) -> dict[str, list[Turn]]:
    """Return `repetitions` turns of each contender."""
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for repetition in range(repetitions):
        for name, contender in contenders.items():
            turn = take_turn(contender, model, workload, warm_up, num_warm_ups)
            turns[name].append(turn)
            print(f"  {repetition + 1}/{repetitions} {name:<28}{turn.seconds:8.2f} s", flush=True)
    return turns


def throughput(contender: Contender, turns: list[Turn], num_tokens: int) -> dict[str, Any]:
    """Return tokens per second over a contender's turns, and its peak memory."""
    rates = [num_tokens / turn.seconds for turn in turns]
    figures = summary(rates, "tokens_per_second", contender.settings)
    return figures | {"peak_resident_mib": max(t.peak_resident_bytes for t in turns) / 2**20}


def throughputs(
    contenders: dict[str, Contender],
    model: Any,
    workload: Workload,
    repetitions: int,
    num_warm_ups: int = 1,
    warm_up: Workload | None = None,
) -> dict[str, Any]:
    """Return tokens per second of each contender, which take turns."""
    turns = interleaved(contenders, model, workload, repetitions, num_warm_ups, warm_up)
    return {
        name: throughput(contender, turns[name], workload.num_tokens)
        for name, contender in contenders.items()
    }
