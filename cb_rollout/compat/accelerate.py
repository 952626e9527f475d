"""Use private APIs of accelerate 1.15: its forward wrapper, plugins and launcher."""

import os
import weakref
from copy import copy
from typing import Any, TypeVar

import torch
from accelerate.utils.operations import ConvertOutputsToFp32

from cb_rollout.errors import ConfigurationError

# Any of these tells a process of accelerate 1.15 how many processes there are.
_SIZE_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

Module = TypeVar("Module", bound=torch.nn.Module)


def below_accelerate(module: Module) -> Module:
    """Return the module without the autocast and float32 outputs of accelerate 1.15's `prepare`.

    A wrapped module is not changed, because a trainer may run it: a shallow copy is returned.
    """
    forward = _wrapped_forward(module)
    if forward is None:
        return module
    module = copy(module)
    module.forward = forward
    return module


def _wrapped_forward(module: Any) -> Any:
    """Return the forward that accelerate 1.15 wrapped; None if it wrapped none.

    Also None for a module with hooks, because they would be called with its shallow copy.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    return getattr(module, "_original_forward", None) if has_autocast(module) else None


def has_autocast(module: Any) -> bool:
    """Return whether accelerate 1.15 has put a module's forward under autocast."""
    wrapper = getattr(vars(module).get("forward"), "__wrapped__", None)
    return isinstance(wrapper, ConvertOutputsToFp32)


def forward_of(module: Any) -> object:
    """Return the function that `below_accelerate` runs, by a weak reference if it allows one."""
    forward = _wrapped_forward(module) or vars(module).get("forward", type(module).forward)
    function = getattr(forward, "__func__", forward)
    try:
        return weakref.ref(function)
    except TypeError:
        return function


def shards_models(accelerator: Any) -> bool:
    """Return whether accelerate 1.15 shards the models that it prepares, with FSDP or ZeRO-3."""
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return True
    return zero_stage(accelerator) == 3


def zero_stage(accelerator: Any) -> int | None:
    """Return the ZeRO stage of accelerate 1.15's DeepSpeed plugin; None without the plugin."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.zero_stage


def require_launched_together(num_processes: int) -> None:
    """Refuse a launch of several processes that would each train alone.

    In accelerate 1.15 two launches go wrong silently. With `--cpu`, or with fewer than two GPUs,
    its launcher starts one process whatever `--num_processes` says; that process gets
    ACCELERATE_USE_CPU, MASTER_ADDR and MASTER_PORT, but no world size. Under torchrun or
    `--multi_gpu` on a machine without a GPU, each process believes that it is alone, unless it was
    told to use the CPU.

    Args:
        num_processes: the processes that accelerate counts, `accelerator.num_processes`.

    Raises:
        ConfigurationError: the launcher was asked for more processes than accelerate counts.
    """
    if num_processes > 1:
        return
    num_started = int(os.environ.get("WORLD_SIZE") or 1)
    if num_started > 1:
        raise ConfigurationError(
            f"the launcher started {num_started} processes (WORLD_SIZE={num_started}), but "
            "accelerate sees only 1, so each would train alone. To train on CPUs, set "
            "Accelerator(cpu=True), use_cpu=True in a trainer's config, or ACCELERATE_USE_CPU=true "
            "in the environment. On GPUs, launch with torchrun, which also sets LOCAL_RANK."
        )
    given = os.environ.keys()
    is_of_simple_launcher = {"ACCELERATE_USE_CPU", "MASTER_ADDR", "MASTER_PORT"} <= given
    if is_of_simple_launcher and not given & set(_SIZE_VARIABLES):
        raise ConfigurationError(
            "accelerate launch was asked for several processes but started only this one: with "
            "--cpu, or with fewer than two GPUs, it ignores --num_processes. To start 2, launch "
            "with `torchrun --nproc-per-node 2 SCRIPT`. To train in one process, remove "
            "--num_processes (or the num_processes of accelerate's config file) and unset "
            "MASTER_ADDR."
        )
