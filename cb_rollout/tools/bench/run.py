"""Time a rollout by each contender in turns, so that a slow spell of the machine meets all."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import cb_rollout
from cb_rollout.rollout.checkpoint import torch_device
from cb_rollout.tools.bench.contenders import Contender, generate, ours, transformers_batching
from cb_rollout.tools.bench.workload import (
    DEFAULT_MODELS,
    MODELS,
    TINY,
    Sizes,
    Workload,
    create_model,
    equal_lengths,
    long_tailed,
)

# Packages whose versions affect the figures.
PACKAGES = ("torch", "transformers", "trl", "triton", "flash_attn")

# The best for `generate` on the CPU model: a larger batch waits longer for its longest sequence.
BATCH_OF_TAILS = 64


def run_rollout(options: Any, folder: Path) -> Path:
    """Time a rollout, and return its record's path; `ConfigurationError`: no such device."""
    device = torch_device(options.device).type
    name = options.model or DEFAULT_MODELS[device]
    sizes = TINY if options.tiny else MODELS[name]
    model, results = create_model(sizes.shape, device), {}
    for group, (workload, contenders) in races(sizes, options.batch_size).items():
        print(f"{group}: {len(workload.prompts)} sequences, {workload.num_tokens} tokens")
        rates: dict[str, list[float]] = {row: [] for row in contenders}
        for repetition in range(options.repetitions):
            for row, contender in contenders.items():
                # Made for each turn: transformers' manager changes the model's attention.
                with contender.create(model, workload) as run:
                    run(workload)
                    seconds = timed(lambda run=run, workload=workload: run(workload))
                rates[row].append(workload.num_tokens / seconds)
                turn = f"{repetition + 1}/{options.repetitions}"
                print(f"  {turn} {row:<28}{seconds:8.2f} s", flush=True)
        results[group] = {
            row: summary(values, "tokens_per_second", contenders[row].settings)
            for row, values in rates.items()
        }
    _print_speeds(results)
    return write_record("rollout", name, results, device, options.repetitions, folder)


def races(
    sizes: Sizes, batch_size: int | None = None
) -> dict[str, tuple[Workload, dict[str, Contender]]]:
    """Return the workloads by name, with contenders; `batch_size`: of `generate`, or the best."""

    def contenders(best: int) -> dict[str, Contender]:
        return {
            "cb_rollout": ours(),
            "transformers CB": transformers_batching(),
            "model.generate": generate(batch_size or best),
        }

    return {
        "long_tailed_groups": (long_tailed(sizes), contenders(BATCH_OF_TAILS)),
        "equal_lengths": (equal_lengths(sizes), contenders(sizes.num_sequences)),
    }


def synchronize() -> None:
    """Wait until the GPU, if any, has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes, the GPU's work included."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def summary(values: list[float], unit: str, settings: str | None = None) -> dict[str, Any]:
    """Return median, minimum and maximum, with the unit and the contender's settings."""
    figures: dict[str, Any] = {"median": statistics.median(values), "unit": unit}
    figures |= {"min": min(values), "max": max(values)}
    return figures if settings is None else figures | {"settings": settings}


def _print_speeds(results: dict[str, Any]) -> None:
    for group, rows in results.items():
        print(f"\n{group}")
        for row, x in rows.items():
            times = next(iter(rows.values()))["median"] / x["median"]
            spread = f"({x['min']:,.0f} to {x['max']:,.0f})"
            print(f"  {row:<22}{x['median']:>8,.0f} tokens/s  {spread}  cb_rollout is {times:.2f}x")


def write_record(
    bench: str,
    model: str,
    results: dict[str, Any],
    device: str,
    repetitions: int,
    folder: Path,
    note: str | None = None,
) -> Path:
    """Write results as JSON into a folder, with a `note` on all figures, and return the path."""
    if model != DEFAULT_MODELS[device]:
        # Each model has a record and tables of its own.
        bench = f"{bench}_{model}"
        results = {f"{group}_{model}": rows for group, rows in results.items()}
    record = {
        "bench": bench,
        **({"note": note} if note else {}),
        **describe_machine(device),
        "repetitions": repetitions,
        "results": results,
    }
    return save_record(record, folder, device)


def save_record(record: Mapping[str, Any], folder: Path, device: str) -> Path:
    """Write a record under the name of its `bench` into a folder, and return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['bench']}_{device}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def describe_machine(device: str) -> dict[str, Any]:
    """Return date, device, threads and package versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if "cuda" in device else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES if find_spec(package)}
        | {"cb_rollout": cb_rollout.__version__},
    }
