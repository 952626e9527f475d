"""`cb-rollout env`: the versions and the machine of a bug report.

Loads none of the packages that it lists. Prints no names of users or hosts and no paths, and no
environment variables except `VARIABLES`.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from cb_rollout import __version__
from cb_rollout.tools.cli.command import Answer, add_json

PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "peft", "datasets", "tokenizers", "numpy",
    "wandb", "triton", "deepspeed", "bitsandbytes", "flash-attn", "kernels", "xgrammar", "ray",
    "fastapi", "uvicorn", "vllm",
)  # fmt: skip

VARIABLES = (
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "WORLD_SIZE", "LOCAL_RANK",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS", "TORCHDYNAMO_DISABLE",
)  # fmt: skip

GPU_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def add_env(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "env",
        help="print versions and the machine, for a bug report",
        description="Print the versions of the packages that a rollout may use, the machine, and "
        "the variables that change how torch runs. `doctor` says whether they fit together.",
    )
    add_json(parser)
    parser.set_run(_run)


def environment() -> dict[str, Any]:
    """Return the versions and the machine; a package that is missing is None."""
    return {
        "cb_rollout": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "compiler": _compiler(),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _compiler() -> str | None:
    """Return the C++ compiler that builds the CPU kernels; None if there is none."""
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return name
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """Return name, memory and driver of each NVIDIA GPU, as the driver's own tool names them."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *GPU_QUERY], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _run(_: argparse.Namespace) -> Answer:
    machine = environment()
    rows: list[str] = []
    for name, value in machine.items():
        if isinstance(value, Mapping):
            for key, text in value.items():
                rows.append(_row(key, text))
        elif isinstance(value, list):
            for text in value or [None]:
                rows.append(_row(name, text))
        else:
            rows.append(_row(name, value))
    return Answer("\n".join(rows), machine)


def _row(name: str, value: Any) -> str:
    return f"{name:<26} {value or 'none'}"
