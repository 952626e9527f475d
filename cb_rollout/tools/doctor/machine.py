"""What the machine has: versions, kernels, device, memory, and which settings it is refused."""

import importlib.metadata
import importlib.util
import math
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
from packaging.requirements import Requirement

import cb_rollout
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.attention.backend import select_backend
from cb_rollout.engine.cuda_graphs.selection import graph_obstacle
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB
from cb_rollout.engine.memory.system import container_memory
from cb_rollout.errors import ConfigurationError
from cb_rollout.rollout.checkpoint import torch_device
from cb_rollout.tools.doctor.finding import Finding, Level

NEEDED = ("torch", "transformers")
# Nothing runs without these; the others serve training only.

SERVE_TRAINING = ("trl", "accelerate", "peft", "wandb")

KERNELS = (
    "flash_attn",
    "kernels",
    "triton",
    "torch_memory_saver",
    "torch.nn.attention.varlen",
)

EXTRAS = {
    "bench": ("fastapi", "httpx", "uvicorn"),
    "server": ("fastapi", "uvicorn"),
    "grammar": ("xgrammar",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
# What each extra of the package brings.

FASTER = {
    "compiled forwards": {"use_default_compile_configs": True},
    "rollout weights in a copy": {"weight_sync": "copy"},
}
# What a rollout may be asked to do beyond the plain way; the config says which it refuses.


def machine_findings(device: str = "auto") -> Iterator[Finding]:
    """Look at everything that no checkpoint is needed for."""
    yield Finding(Level.OK, "cb_rollout", cb_rollout.__version__)
    yield _python()
    for package in (*NEEDED, *SERVE_TRAINING):
        yield _version(package)
    for extra, modules in EXTRAS.items():
        yield _extra(extra, modules)
    for name in KERNELS:
        yield _kernel(name)
    for name, setting in FASTER.items():
        yield _may_be_asked(name, setting)
    try:
        target = torch_device(device)
    except ConfigurationError as error:
        yield Finding(Level.BAD, "device", str(error))
        return
    yield Finding(Level.OK, "attention", str(select_backend(target)))
    obstacle = graph_obstacle(target)
    said = f"not used: use_cuda_graph=True {obstacle}" if obstacle else "where the model allows"
    yield Finding(Level.OK, "CUDA graphs", said)
    yield from _device(target)


def _requirements() -> dict[str, Requirement]:
    """What this package says it was tested with; empty where it is not installed."""
    try:
        lines = importlib.metadata.requires("cb_rollout") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in lines]
    return {r.name: r for r in requirements if r.marker is None}


def _python() -> Finding:
    return Finding(Level.OK, "python", platform.python_version())


def _version(package: str) -> Finding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if package in NEEDED:
            return Finding(Level.BAD, package, f"is missing; pip install {package}")
        return Finding(Level.WARNING, package, "is missing; training with it needs it")
    requirement = _requirements().get(package)
    if requirement is None:
        return Finding(Level.OK, package, f"{version} (cb_rollout is not installed: not compared)")
    if not (tested := str(requirement.specifier)):
        return Finding(Level.OK, package, version)
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(Level.OK, package, f"{version} (tested: {tested})")
    return Finding(
        Level.WARNING,
        package,
        f"{version} is outside what is tested; pip install '{package}{tested}'",
    )


def _extra(extra: str, modules: Sequence[str]) -> Finding:
    missing = [name for name in modules if not _is_there(name)]
    text = f"lacks {', '.join(missing)}; pip install 'cb_rollout[{extra}]'" if missing else "found"
    return Finding(Level.OK, f"extra {extra!r}", text)


def _kernel(name: str) -> Finding:
    return Finding(Level.OK, name, "found" if _is_there(name) else "not found")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _may_be_asked(name: str, setting: dict[str, Any]) -> Finding:
    asked = ", ".join(f"{key}={value!r}" for key, value in setting.items())
    try:
        RolloutConfig(**setting)
    except ConfigurationError as error:
        return Finding(Level.OK, name, f"not used: {error}")
    return Finding(Level.OK, name, f"when asked for, by {asked}")


def _device(target: torch.device) -> Iterator[Finding]:
    if target.type == "cuda":
        properties = torch.cuda.get_device_properties(target)
        text = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        if (count := torch.cuda.device_count()) > 1:
            text += f", the first used of {count}; one process uses one"
    else:
        text = f"{target.type}, {torch.get_num_threads()} threads of {psutil.cpu_count()} cores"
        if not torch.cuda.is_available():
            text += f"; no GPU: torch {torch.__version__} sees none"
    yield Finding(Level.OK, "device", text)
    memory = devices.memory(target)
    free, total = memory.free_bytes / GIB, memory.total_bytes / GIB
    yield Finding(Level.OK, "memory free", f"{free:.1f} of {total:.1f} GiB on {target.type}")
    if target.type != "cuda":
        yield _container()


def _container() -> Finding:
    container = container_memory()
    if container.limit_bytes == math.inf:
        return Finding(Level.OK, "container limit", "none")
    left, limit = container.left_bytes / GIB, container.limit_bytes / GIB
    return Finding(
        Level.OK, "container limit", f"{left:.1f} GiB left of {limit:.1f}; counted above"
    )
