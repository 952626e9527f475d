"""Contenders take turns, so that a slow spell of the machine meets all of them."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cb_rollout.tools.bench.contenders import Contender
from cb_rollout.tools.bench.resident import ResidentPeak
from cb_rollout.tools.bench.workload import Workload


class Turn(NamedTuple):
    """One timed run."""

    seconds: float
    peak_resident_bytes: int
    """Most that the process held while the contender was there."""


def synchronize() -> None:
    """Wait for what was started on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes, what it started on the device included."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def take_turn(
    contender: Contender,
    model: Any,
    workload: Workload,
    warm_up: Workload | None = None,
    num_warm_ups: int = 1,
) -> Turn:
    """Make a contender, warm it up, and time it.

    It is made anew for each turn: transformers' manager changes the model's attention while it
    lives.

    Args:
        contender: whose turn it is.
        model: what it runs.
        workload: what is timed.
        warm_up: what is run before; None: the workload.
        num_warm_ups: how often.
    """
    with ResidentPeak() as peak, contender.create(model, workload) as run:
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
) -> dict[str, list[Turn]]:
    """Each contender's turns."""
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for repetition in range(repetitions):
        for name, contender in contenders.items():
            turn = take_turn(contender, model, workload, num_warm_ups=num_warm_ups)
            turns[name].append(turn)
            print(
                f"  {repetition + 1}/{repetitions} {name:<28}{turns[name][-1].seconds:8.2f} s",
                flush=True,
            )
    return turns


def summary(values: list[float], unit: str, settings: str | None = None) -> dict[str, Any]:
    """Median and spread, and what the contender was given."""
    figures = {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "unit": unit,
    }
    return figures if settings is None else figures | {"settings": settings}


def throughput(contender: Contender, turns: list[Turn], num_tokens: int) -> dict[str, Any]:
    """Tokens per second of a contender's turns, and the most memory of any."""
    rates = [num_tokens / turn.seconds for turn in turns]
    figures = summary(rates, "tokens_per_second", contender.settings)
    return figures | {"peak_resident_mib": max(t.peak_resident_bytes for t in turns) / 2**20}
