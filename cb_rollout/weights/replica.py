"""Create an engine-owned module with the tensors of the training module, left empty.

Owns the dtype of each tensor.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat.tensor_parallel import split_over_processes, with_storage
from cb_rollout.engine.model.precision import Precision
from cb_rollout.errors import WeightSyncError
from cb_rollout.weights.tensor import Weight

# Autocast casts every parameter of these layers.
MULTIPLIED_BY = (torch.nn.Linear, Conv1D)

# Rows of a weight after which the next one is aligned, in any dtype.
ALIGNED_OUTPUTS = 16


def held_dtype(precision: Precision, owner: torch.nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a replica holds a parameter of `owner` trained in `dtype`.

    Under autocast, only parameters that it would cast at every use are stored cast: those of a head
    that is tied to an embedding too, which autocast does not cast. The forward is then bitwise that
    of the uncast weights under autocast.
    """
    if not dtype.is_floating_point:
        return dtype
    if precision.copy_dtype is not None:
        return precision.copy_dtype
    is_cast = isinstance(owner, MULTIPLIED_BY) and dtype != torch.float64
    if precision.autocast_dtype is None or not is_cast:
        return dtype
    return precision.autocast_dtype


def casts_weights(model: PreTrainedModel, precision: Precision) -> bool:
    """Return True if a replica of `model` would hold any parameter in another dtype."""
    return any(
        held_dtype(precision, module, parameter.dtype) != parameter.dtype
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )


def create_replica(
    trained: PreTrainedModel,
    weights: Sequence[Weight],
    shapes: Mapping[Weight, torch.Size],
    precision: Precision,
    device: torch.device,
    tensor_parallel_size: int = 1,
) -> PreTrainedModel:
    """Create a module of the model's class with empty tensors, tied as the weights are.

    Parameters take no memory while the module is built from the config. Buffers are real, since
    constructors compute with them. With a `tensor_parallel_size` above 1 the layers are split over
    so many neighbouring processes, all of which call this.
    """
    make = torch_compat.plain_class(trained)
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        replica = make(copy.deepcopy(trained.config))
    if tensor_parallel_size > 1:
        split_over_processes(replica, tensor_parallel_size)
    require_match(replica, weights, shapes)
    place(replica, weights, precision, device)
    replica.generation_config = trained.generation_config
    return replica.eval()


def place(
    replica: PreTrainedModel,
    weights: Sequence[Weight],
    precision: Precision,
    device: torch.device,
) -> None:
    """Give a replica an empty tensor for each of the weights, tied as these are.

    Weights of one module's linear layers that take equally many inputs lie one after the other, as
    those of query, key and value do: products of the same rows can then be computed as one.
    """
    groups: dict[Any, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(_neighbourhood(replica, weight) or weight, []).append(weight)
    for neighbours in groups.values():
        dtype = _held_dtype(replica, neighbours[0], precision)
        placed = [replica.get_parameter_or_buffer(weight.names[0]) for weight in neighbours]
        local = [fsdp_compat.local_part(tensor).shape for tensor in placed]
        sizes = [shape.numel() for shape in local]
        storage = torch.empty(sum(sizes), dtype=dtype, device=device)
        for weight, tensor, shape, part in zip(
            neighbours, placed, local, storage.split(sizes), strict=True
        ):
            target = with_storage(tensor, part.view(shape))
            if not weight.is_buffer:
                target = torch.nn.Parameter(target, requires_grad=False)
            for name in weight.names:
                owner, _, attribute = name.rpartition(".")
                setattr(replica.get_submodule(owner), attribute, target)


def _neighbourhood(replica: PreTrainedModel, weight: Weight) -> tuple[object, ...] | None:
    """Return a key equal for weights that lie one after the other; None: it has no neighbours."""
    if len(weight.names) != 1 or weight.is_buffer:
        return None
    owner, _, attribute = weight.names[0].rpartition(".")
    layer, parent = replica.get_submodule(owner), owner.rpartition(".")[0]
    # Products of other sizes are slow, or copy a weight that is not aligned.
    if type(layer) is not torch.nn.Linear or layer.out_features % ALIGNED_OUTPUTS:
        return None
    return parent, attribute, layer.in_features, weight.base.dtype


def misplaced(
    replica: PreTrainedModel, weights: Sequence[Weight], precision: Precision
) -> list[Weight]:
    """List the weights that are tied otherwise in a replica, or held there in another dtype."""
    held = tensors_by_name(replica)
    names_of: dict[int, set[str]] = {}
    for name, tensor in held.items():
        names_of.setdefault(id(tensor), set()).add(name)
    return [
        weight
        for weight in weights
        if names_of[id(held[weight.names[0]])] != set(weight.names)
        or held[weight.names[0]].dtype != _held_dtype(replica, weight, precision)
    ]


def _held_dtype(replica: PreTrainedModel, weight: Weight, precision: Precision) -> torch.dtype:
    if weight.is_buffer:
        return weight.base.dtype
    owner = replica.get_submodule(weight.names[0].rpartition(".")[0])
    return held_dtype(precision, owner, weight.base.dtype)


def tensors_by_name(replica: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Map names to the replica's parameters and buffers, tied ones under each name."""
    parameters = replica.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(replica.named_buffers(remove_duplicate=False))


def require_match(
    replica: PreTrainedModel, weights: Sequence[Weight], shapes: Mapping[Weight, torch.Size]
) -> None:
    """Raise one `WeightSyncError` that lists every tensor without a counterpart of its shape."""
    copied = {name: tensor.shape for name, tensor in tensors_by_name(replica).items()}
    trained = {name: shapes[weight] for weight in weights for name in weight.names}
    texts = ("not in the training module", "in the training module only")
    if faults := mismatches(trained, copied, *texts, "{} in the training module, {} here"):
        raise WeightSyncError(
            f"{len(faults)} tensors of the training module and of its copy, which is made from "
            "the model's config, do not match; nothing was copied. Make a new generator if the "
            "model was changed after this one, or use weight_sync='shared':\n  "
            + "\n  ".join(faults)
        )


def mismatches(
    given: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
    missing: str,
    unknown: str,
    unequal: str,
) -> list[str]:
    """List each name of two models' shapes that is missing, unknown or unequal, with that text."""
    faults = [f"{name}: {missing}" for name in expected.keys() - given.keys()]
    faults += [f"{name}: {unknown}" for name in given.keys() - expected.keys()]
    faults += [
        f"{name}: {unequal.format(tuple(given[name]), tuple(expected[name]))}"
        for name in expected.keys() & given.keys()
        if tuple(given[name]) != tuple(expected[name])
    ]
    return sorted(faults)
