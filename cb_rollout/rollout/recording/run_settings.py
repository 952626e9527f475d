"""Describe the settings of a run: the model, the settings of the rollout, the machine.

Called once per run, from the thread that trains, by the process that records.
"""

from typing import Any

import psutil
import torch

from cb_rollout.compat.transformers import unwrap
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.metrics.run_settings import changed_settings, versions

GIB = 1 << 30


def engine_sections(model: torch.nn.Module, config: RolloutConfig) -> dict[str, dict[str, Any]]:
    """Return the sections of a run whose trainer is not known."""
    return {
        "Model": _model_settings(model),
        "Rollout": changed_settings(config),
        "Versions": versions(),
        "Machine": _machine(model),
    }


def _model_settings(model: torch.nn.Module) -> dict[str, Any]:
    inner = unwrap(model)
    parameters = list(model.parameters())
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    return {
        "name": getattr(getattr(inner, "config", None), "_name_or_path", "") or "no name",
        "class": type(inner).__name__,
        "parameters": f"{sum(p.numel() for p in parameters):,}",
        "trained": f"{num_trained:,}",
        "dtype": ", ".join(dtypes),
    }


def _machine(model: torch.nn.Module) -> dict[str, Any]:
    parameter = next(iter(model.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    machine: dict[str, Any] = {"device": device.type}
    if device.type == "cuda":
        machine["device"] = torch.cuda.get_device_name(device)
    machine["processes"] = 1
    if torch.distributed.is_initialized():
        machine["processes"] = torch.distributed.get_world_size()
    machine["threads of torch"] = torch.get_num_threads()
    machine["cores"] = psutil.cpu_count()
    return machine


def memory_gib() -> float:
    """Return this process's memory: the peak of tensors on a GPU, else the resident memory now."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / GIB
    return psutil.Process().memory_info().rss / GIB
