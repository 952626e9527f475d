"""Run a workload, print its table and write its record."""

import argparse
import importlib
import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import cb_rollout
from cb_rollout.rollout.checkpoint import torch_device
from cb_rollout.tools.bench.table import print_table
from cb_rollout.tools.bench.workload import DEFAULT_MODELS

# Packages whose versions affect the figures.
PACKAGES = ("torch", "transformers", "trl", "triton", "flash_attn")


def run_workload(
    name: str, module: str, sizes: str, options: argparse.Namespace, folder: Path
) -> Path:
    """Run `bench_NAME` of a module, print its table, and return the path of its JSON in `folder`.

    `sizes` is the module of `MODELS`, `TINY` and `Setup`; `options` has the device, model,
    repetitions, batch_size and tiny of the command line.

    Raises:
        ConfigurationError: the device is missing.
    """
    kind = torch_device(options.device).type
    default = DEFAULT_MODELS[kind]
    model = options.model or default
    # Imported by name, since only some workloads need packages such as trl.
    implementation, known = map(importlib.import_module, (module, sizes))
    setup = known.Setup(
        device=kind,
        repetitions=options.repetitions,
        sizes=known.TINY if options.tiny else known.MODELS[model],
        batch_size=options.batch_size,
    )
    results = getattr(implementation, f"bench_{name}")(setup)
    # What a reader must know of all figures of the module.
    note = getattr(implementation, "NOTE", None)
    if model != default:
        # Each model has a record and tables of its own.
        name = f"{name}_{model}"
        results = {f"{group}_{model}": rows for group, rows in results.items()}
    if note:
        print(f"\n{note}")
    print_table(results)
    record = {
        "bench": name,
        **({"note": note} if note else {}),
        **describe_machine(kind),
        "repetitions": setup.repetitions,
        "results": results,
    }
    path = folder / f"{name}_{kind}.json"
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
