"""Use private APIs of FSDP1, FSDP2 (torch 2.11 to 2.13) and DeepSpeed ZeRO-3 (0.18)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import DeviceMesh, Store, distributed_c10d
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from cb_rollout.errors import ConfigurationError


def _fsdp_groups(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch 2.13 has a list of groups, torch 2.11 a single group or None.
            group = getattr(state, "_fsdp_param_group", None)
            yield from getattr(state, "_fsdp_param_groups", [group] if group else [])


def fsdp_shards(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Return the shard of each parameter that FSDP2 shows unsharded, by the parameter's id.

    A forward leaves some parameters unsharded until the next backward, cast to its compute dtype
    (torch 2.13).
    """
    shards = {}
    for group in _fsdp_groups(model):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                shards[id(parameter._unsharded_param)] = parameter.sharded_param
    return shards


@dataclass(frozen=True)
class Fsdp1Placement:
    """The FSDP1 unit of a parameter, and the parameter's whole shape."""

    unit: FullyShardedDataParallel
    unit_bytes: int
    shape: torch.Size


def fsdp1_units(model: torch.nn.Module) -> list[FullyShardedDataParallel]:
    """Return the units of FSDP1, the root first."""
    return [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]


def fsdp1_parameters(
    model: torch.nn.Module,
) -> tuple[dict[int, Fsdp1Placement], dict[int, torch.Tensor]]:
    """Find the parameters of an FSDP1 model (torch 2.13).

    Returns placements by parameter id, and parameters by the id of the tensor that a module holds.
    """
    placements: dict[int, Fsdp1Placement] = {}
    behind: dict[int, torch.Tensor] = {}
    units = fsdp1_units(model)
    if units[0]._is_root is None:
        # torch makes the first unit that gathers parameters the root, so the root gathers first.
        with FullyShardedDataParallel.summon_full_params(units[0], recurse=False, writeback=False):
            pass
    for unit in units:
        flat: Any = unit._handle.flat_param if unit._handle else None
        if flat is None:
            continue
        if not unit._use_orig_params:
            raise ConfigurationError(
                "FSDP1 with use_orig_params=False replaces the model's parameters by flat ones; "
                "set use_orig_params=True, or shard with FSDP2 (fsdp_version: 2 in accelerate)."
            )
        unit_bytes = sum(shape.numel() for shape in flat._shapes) * flat.element_size()
        parts = zip(flat._params, flat._param_infos, flat._shapes, strict=True)
        for parameter, info, shape in parts:
            placements[id(parameter)] = Fsdp1Placement(unit, unit_bytes, shape)
            shown = getattr(info.module, info.param_name)
            behind[id(shown)] = parameter
    return placements, behind


def fsdp_param_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype that FSDP casts parameters to in a forward (torch 2.13); None: no cast."""
    for unit in fsdp1_units(model):
        return unit.mixed_precision.param_dtype
    groups = list(_fsdp_groups(model))
    return groups[0].mp_policy.param_dtype if groups else None


def default_store() -> Store:
    """Return the store of the default process group's rendezvous (torch 2.13)."""
    return distributed_c10d._get_default_store()


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether processes hold different parts of any parameter.

    FSDP modules may show whole parameters after a forward, so their class decides (torch 2.13).
    """
    if has_fsdp2(model) or fsdp1_units(model):
        return True
    return any(isinstance(p, DTensor) or is_zero3(p) for p in model.parameters())


def has_fsdp2(model: torch.nn.Module) -> bool:
    """Return whether FSDP2 shards any module."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def may_overlap(mesh: DeviceMesh) -> bool:
    """Return whether collectives of a mesh may be in flight together (torch 2.11 to 2.13).

    Over gloo they must not: two of its threads free the same string, which corrupts the heap.
    """
    gloo = f"{mesh.device_type}:gloo"
    for group in mesh.get_all_groups():
        if gloo in distributed_c10d.get_backend_config(group).split(","):
            return False
    return True


def local_part(parameter: Any) -> torch.Tensor:
    """Return this process's part of a parameter."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return parameter.ds_tensor if is_zero3(parameter) else parameter


def is_zero3(tensor: Any) -> bool:
    """Return whether ZeRO-3 shards a parameter (DeepSpeed 0.18 marks it by `ds_id`)."""
    return hasattr(tensor, "ds_id")


def zero3_shape(tensor: Any) -> torch.Size:
    """Return the unsharded shape of a ZeRO-3 parameter; its `shape` is empty (DeepSpeed 0.18)."""
    return torch.Size(tensor.ds_shape)


def write_state(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's local part, and the number of writes that torch counted.

    torch does not count writes through `.data`, and counts writes to a DTensor's shard on the
    shard.
    """
    local = local_part(tensor)
    if local.is_inference():
        # Torch does not count writes to a tensor of inference mode.
        return local.data_ptr(), 0
    return local.data_ptr(), tensor._version + local._version
