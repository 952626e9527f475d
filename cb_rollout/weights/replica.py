"""Create an engine-owned module with empty tensors like those of the training module.

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

# If a weight's rows are a multiple of this, the next weight is aligned, in any dtype.
ALIGNED_OUTPUTS = 16


def held_dtype(precision: Precision, owner: torch.nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a replica holds a parameter of `owner` trained in `dtype`.

    Under autocast, only parameters that autocast would cast at every use are stored cast, including
    a head that is tied to an embedding (autocast does not cast the embedding). The forward is then
    bitwise equal to that of the uncast weights under autocast.
    """
    if not dtype.is_floating_point:
        return dtype
    if precision.copy_dtype is not None:
        return precision.copy_dtype
    if precision.autocast_dtype is None:
        return dtype
    if not isinstance(owner, MULTIPLIED_BY) or dtype == torch.float64:
        return dtype
    return precision.autocast_dtype


def casts_weights(model: PreTrainedModel, precision: Precision) -> bool:
    """Return True if a replica of `model` would hold any parameter in another dtype."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if held_dtype(precision, module, parameter.dtype) != parameter.dtype:
                return True
    return False


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
    constructors compute with them.

    Args:
        trained: the training module, without wrappers.
        weights: its weights.
        shapes: the whole shape of each.
        precision: decides the dtypes of the replica's tensors.
        device: of the replica's tensors.
        tensor_parallel_size: above 1, the layers are split over that many neighbouring processes,
            which must all call this.

    Raises:
        WeightSyncError: the tensors of the model's config differ from `weights`.
    """
    model_class = torch_compat.plain_class(trained)
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        replica = model_class(copy.deepcopy(trained.config))
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
    """Give a replica an empty tensor for each of the weights, with the same ties.

    Weights of a module's linear layers with the same number of inputs, such as query, key and
    value, are adjacent in memory, so that their products can be computed as one.
    """
    groups: dict[Any, list[Weight]] = {}
    for weight in weights:
        key = _neighbourhood(replica, weight) or weight
        groups.setdefault(key, []).append(weight)
    for neighbours in groups.values():
        _place_group(replica, neighbours, _dtype_in(replica, neighbours[0], precision), device)


def _place_group(
    replica: PreTrainedModel,
    neighbours: Sequence[Weight],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give a replica an empty tensor for each weight of a group, all in one storage."""
    present = [replica.get_parameter_or_buffer(weight.names[0]) for weight in neighbours]
    shapes = [fsdp_compat.local_part(tensor).shape for tensor in present]
    sizes = [shape.numel() for shape in shapes]
    storage = torch.empty(sum(sizes), dtype=dtype, device=device)
    start = 0
    for weight, tensor, shape in zip(neighbours, present, shapes, strict=True):
        end = start + shape.numel()
        target = with_storage(tensor, storage[start:end].view(shape))
        start = end
        if not weight.is_buffer:
            target = torch.nn.Parameter(target, requires_grad=False)
        for name in weight.names:
            layer_path, _, attribute = name.rpartition(".")
            setattr(replica.get_submodule(layer_path), attribute, target)


def _neighbourhood(replica: PreTrainedModel, weight: Weight) -> tuple[object, ...] | None:
    """Return a key that is equal for adjacent weights; None: the weight has no neighbours."""
    if len(weight.names) != 1 or weight.is_buffer:
        return None
    layer_path, _, attribute = weight.names[0].rpartition(".")
    parent_path, _, _ = layer_path.rpartition(".")
    layer = replica.get_submodule(layer_path)
    # Products of other sizes are slow, or copy a weight that is not aligned.
    if type(layer) is not torch.nn.Linear or layer.out_features % ALIGNED_OUTPUTS:
        return None
    return parent_path, attribute, layer.in_features, weight.base.dtype


def misplaced(
    replica: PreTrainedModel, weights: Sequence[Weight], precision: Precision
) -> list[Weight]:
    """List the weights whose ties or dtype in a replica no longer match."""
    tensors = tensors_by_name(replica)
    names_of: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), set()).add(name)
    others: list[Weight] = []
    for weight in weights:
        tensor = tensors[weight.names[0]]
        is_tied_alike = names_of[id(tensor)] == set(weight.names)
        if not is_tied_alike or tensor.dtype != _dtype_in(replica, weight, precision):
            others.append(weight)
    return others


def _dtype_in(replica: PreTrainedModel, weight: Weight, precision: Precision) -> torch.dtype:
    """Return the dtype in which a replica holds a weight."""
    if weight.is_buffer:
        return weight.base.dtype
    layer_path, _, _ = weight.names[0].rpartition(".")
    return held_dtype(precision, replica.get_submodule(layer_path), weight.base.dtype)


def tensors_by_name(replica: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Map names to the replica's parameters and buffers, tied ones under each name."""
    parameters = replica.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(replica.named_buffers(remove_duplicate=False))


def require_match(
    replica: PreTrainedModel, weights: Sequence[Weight], shapes: Mapping[Weight, torch.Size]
) -> None:
    """Raise one `WeightSyncError` that lists every tensor without a counterpart of its shape."""
    copied = {name: tensor.shape for name, tensor in tensors_by_name(replica).items()}
    trained: dict[str, torch.Size] = {}
    for weight in weights:
        for name in weight.names:
            trained[name] = shapes[weight]
    faults = mismatches(
        trained,
        copied,
        missing="not in the training module",
        unknown="in the training module only",
        unequal="{} in the training module, {} here",
    )
    if faults:
        raise WeightSyncError(
            f"{len(faults)} tensors of the training module do not match its copy, which is made "
            "from the model's config; nothing was copied. If the model was changed after this "
            "generator was made, make a new one; otherwise use weight_sync='shared':\n  "
            + "\n  ".join(faults)
        )


def mismatches(
    given: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
    missing: str,
    unknown: str,
    unequal: str,
) -> list[str]:
    """List the names whose shapes differ between two models, each with a text.

    Args:
        given: shapes by name.
        expected: the shapes that `given` should have.
        missing: text of a name that `given` lacks.
        unknown: text of a name that `expected` lacks.
        unequal: text of a different shape; a format string for the given and the expected shape.
    """
    faults: list[str] = []
    for name in given.keys() | expected.keys():
        if name not in given:
            faults.append(f"{name}: {missing}")
        elif name not in expected:
            faults.append(f"{name}: {unknown}")
        elif tuple(given[name]) != tuple(expected[name]):
            text = unequal.format(tuple(given[name]), tuple(expected[name]))
            faults.append(f"{name}: {text}")
    return sorted(faults)
