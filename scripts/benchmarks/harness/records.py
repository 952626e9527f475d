"""Records of workloads: what was measured, on which machine, by which versions."""

import json
import platform
import statistics
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import cb_rollout
from benchmarks.harness.workload import DEFAULT_MODELS

# Packages whose versions affect the figures.
PACKAGES = ("torch", "transformers", "trl", "triton", "flash_attn")

# Flags of /proc/cpuinfo, the fastest for matrix products first.
INSTRUCTIONS = {
    "amx_tile": "AMX",
    "avx512_bf16": "AVX-512 with bfloat16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}


def summary(values: list[float], unit: str, settings: str | None = None) -> dict[str, Any]:
    """Return median, minimum and maximum, with the unit and the contender's settings."""
    figures: dict[str, Any] = {"median": statistics.median(values), "unit": unit}
    figures |= {"min": min(values), "max": max(values)}
    return figures if settings is None else figures | {"settings": settings}


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


def processor() -> str:
    """Return the processor's name and its widest instructions, as in "AMD EPYC (AVX2)"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = facts.get("flags", "").split()
    name = facts.get("model name", platform.machine())
    widest = [said for flag, said in INSTRUCTIONS.items() if flag in flags]
    return f"{name} ({widest[0]})" if widest else name


def describe_machine(device: str) -> dict[str, Any]:
    """Return date, device, threads and package versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if "cuda" in device else processor(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES if find_spec(package)}
        | {"cb_rollout": cb_rollout.__version__},
    }
