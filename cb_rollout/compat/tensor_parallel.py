"""Use private APIs of transformers 5.23's tensor parallelism and torch 2.13's DTensors."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedConfig, PreTrainedModel

from cb_rollout.errors import ConfigurationError

# The dimension of transformers' meshes along which layers are split.
MESH_DIMENSION = "tp"


@dataclass(frozen=True, eq=False)
class Split:
    """Division of a tensor along one dimension over the processes of a tensor-parallel group."""

    dim: int
    """Dimension that is divided, from 0."""
    indices: tuple[torch.Tensor, ...]
    """Indices along `dim` that each process of the group holds: int64, ascending, on the CPU."""
    rank: int
    """This process's rank in the group."""

    def part(self, whole: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Return this process's part of a whole tensor.

        `dim`: the dimension to divide, if it is not the tensor's own, as for an adapter's factor.
        """
        indices_here = self.indices[self.rank].to(whole.device)
        return whole.index_select(self.dim if dim is None else dim, indices_here)


def distributed_config(config: PreTrainedConfig, size: int) -> Any:
    """Return the transformers setting that splits a model with this config over `size` processes.

    Raises `ConfigurationError` if transformers is too old, or if the heads cannot be divided.
    """
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import get_kv_heads_per_rank
    except ImportError as error:
        raise ConfigurationError(
            f"tensor_parallel_size={size} needs transformers 5.23 or later; set 1, or upgrade it."
        ) from error
    config = config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or size
    if get_kv_heads_per_rank(config.base_model_tp_plan or {}, num_heads, size) is None:
        raise ConfigurationError(
            f"tensor_parallel_size={size} does not divide the model's {num_heads} key and value "
            f"heads; set a divisor of {num_heads}."
        )
    return DistributedConfig(tp_size=size)


def split_over_processes(model: PreTrainedModel, size: int) -> None:
    """Split a model's empty layers over groups of `size` neighbouring processes; collective.

    Parameters that its `tp_plan` names become DTensors.
    """
    split = distributed_config(model.config, size)
    world_size = num_processes()
    if world_size % size:
        raise ConfigurationError(
            f"tensor_parallel_size={size} does not divide the {world_size} processes of "
            f"torch.distributed's process group; launch a multiple of {size} processes, or set 1."
        )
    from transformers.distributed.utils import initialize_distributed_mesh

    _, meshes = initialize_distributed_mesh(
        dataclasses.replace(split, fsdp_size=world_size // size)
    )
    try:
        model.maybe_distribute_model(model, split, meshes)
    except ValueError as error:
        raise ConfigurationError(
            f"transformers cannot split a {type(model).__name__} over tensor_parallel_size={size} "
            f"processes ({error}); set 1."
        ) from error


def num_processes() -> int:
    """Return the size of torch.distributed's process group, 1 without one."""
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_initialized else 1


def with_storage(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is split like `tensor`, with `local` as this process's part."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def split_of(tensor: torch.Tensor) -> Split | None:
    """Return how a tensor is split over its one-dimensional mesh; None if it is not split."""
    if not isinstance(tensor, DTensor):
        return None
    placement: Any = tensor.placements[0]
    factor = getattr(placement, "split_factor", None)
    if factor is None and not isinstance(placement, Shard):
        return None
    kind = type(placement)
    # The placement of indices, which have one dimension.
    along = kind(0) if factor is None else kind(0, split_factor=factor)
    dim = placement.dim % tensor.ndim
    mesh = tensor.device_mesh
    indices, _ = along._split_tensor(
        torch.arange(tensor.shape[dim]), mesh.size(), with_padding=False, contiguous=False
    )
    return Split(dim=dim, indices=tuple(indices), rank=mesh.get_local_rank())


def unsharded_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Gather this process's part of a tensor-parallel model's tensor that FSDP2 shards; collective.

    Returns None if tensor parallelism does not split it.
    """
    if not isinstance(tensor, DTensor):
        return None
    names = tensor.device_mesh.mesh_dim_names or ()
    if MESH_DIMENSION not in names:
        return None
    placements = []
    for name, placement in zip(names, tensor.placements, strict=True):
        placements.append(placement if name == MESH_DIMENSION else Replicate())
    return tensor.redistribute(placements=placements).to_local()
