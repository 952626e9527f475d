"""Read a model's weights for the workers of a pool, and write them over a worker's copy.

Sends nothing. Reading is called on the trainer's thread, the rest in a worker.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.combinations import refused
from cb_rollout.engine.memory import device as devices
from cb_rollout.errors import WeightSyncError, abbreviated
from cb_rollout.weights.replica import mismatches, tensors_by_name
from cb_rollout.weights.source import create_source
from cb_rollout.weights.tensor import weights_of


@dataclass(frozen=True, slots=True)
class WorkerTensor:
    """A tensor of a worker's model, without its bytes."""

    names: tuple[str, ...]
    """Its names; several where it is tied."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool
    """True: no parameter; a state dict may lack it."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """All weights of one policy version, without their bytes."""

    version: int
    tensors: Sequence[WorkerTensor] = ()
    """None: the weights are those of the checkpoint."""
    references: Sequence[Any] = ()
    """Of each tensor's bytes in the object store, which are kept while this record is."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def worker_tensors(model: torch.nn.Module) -> tuple[WorkerTensor, ...]:
    """List the tensors of a whole, plain model, in its order."""
    return tuple(
        WorkerTensor(weight.names, tuple(weight.base.shape), weight.base.dtype, weight.is_buffer)
        for weight in weights_of(model, lambda tensor: tensor)
    )


def new_values(
    source: torch.nn.Module | Mapping[str, torch.Tensor], expected: Sequence[WorkerTensor]
) -> Iterator[tuple[WorkerTensor, np.ndarray]]:
    """Yield the expected tensors with the bytes of their new values.

    Args:
        source: a training module, wrapped or not, whose adapters are added out of place; or a
            state dict of the plain model, of which buffers and tied names may be missing.
        expected: the tensors of the workers.

    Raises:
        ConfigurationError: the module is sharded over processes, or an adapter cannot be merged.
        WeightSyncError: the tensors do not match; all differences are named.
    """
    is_module = isinstance(source, torch.nn.Module)
    read: Any = _values_of_module if is_module else _values_of_state_dict
    with torch.no_grad(), devices.plain_modes():
        for tensor, value in read(source, expected):
            # A copy: the source may free the value.
            stored = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(value)
            yield tensor, stored.reshape(-1).view(torch.uint8).numpy()


def _values_of_module(
    model: torch.nn.Module, expected: Sequence[WorkerTensor]
) -> Iterator[tuple[WorkerTensor, torch.Tensor]]:
    plain, source = hf_compat.unwrap(model), create_source(model)
    if source.is_collective and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise refused("pool, sharded module")
    weights = weights_of(plain, source.stored)
    by_name = {name: weight for weight in weights for name in weight.names}
    _require_match(expected, {name: tuple(source.shape(w.base)) for name, w in by_name.items()})
    for tensor in expected:
        weight = by_name[tensor.names[0]]
        if untied := [name for name in tensor.names if by_name[name] is not weight]:
            raise WeightSyncError(
                f"{tensor.names[0]} and {', '.join(untied)} are one tensor in the workers' model "
                "and several in the training module; save the module as it is now, and make a "
                "new pool of that checkpoint."
            )
        with source.read(weight.tensors) as whole:
            yield tensor, weight.value(whole)


def _values_of_state_dict(
    state: Mapping[str, torch.Tensor], expected: Sequence[WorkerTensor]
) -> Iterator[tuple[WorkerTensor, torch.Tensor]]:
    if not isinstance(state, Mapping):
        raise WeightSyncError(
            f"weights are a {type(state).__name__}; pass the training module or its state dict."
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for tensor in expected:
        if tensor.is_buffer or any(name in shapes for name in tensor.names):
            shapes = dict.fromkeys(tensor.names, tensor.shape) | shapes
    _require_match(expected, shapes)
    for tensor in expected:
        sent = [state[name] for name in tensor.names if name in state]
        if not sent:
            continue
        first, *others = sent
        if any(other is not first and not torch.equal(other, first) for other in others):
            raise WeightSyncError(
                f"{' and '.join(tensor.names)} are one tensor in the workers' model and differ in "
                "the state dict; make a new pool of a checkpoint in which they are not tied."
            )
        yield tensor, first


def _require_match(expected: Sequence[WorkerTensor], given: Mapping[str, tuple[int, ...]]) -> None:
    shapes = {name: tensor.shape for tensor in expected for name in tensor.names}
    texts = ("not given", "not in the workers' model", "{} given, {} in the workers' model")
    if faults := mismatches(given, shapes, *texts):
        raise WeightSyncError(
            f"{len(faults)} tensors do not match the workers' model; nothing was sent. Make the "
            "pool of the trainer's own checkpoint, and pass the plain model's names:\n  "
            + abbreviated(faults, "\n  ")
        )


def counterparts(update: WeightUpdate, model: PreTrainedModel) -> list[torch.Tensor]:
    """Return a model's tensor for each sent one; refuse weights of another model."""
    held = tensors_by_name(model)
    found = [held.get(tensor.names[0]) for tensor in update.tensors]
    pairs = zip(update.tensors, found, strict=True)
    faults = [sent.names[0] for sent, own in pairs if own is None or own.shape != sent.shape]
    if faults:
        raise WeightSyncError(
            f"weights of version {update.version} are of another model: this worker has no "
            f"tensor of the same shape for {abbreviated(faults)}. Nothing was written; "
            "make the pool of one checkpoint that does not change."
        )
    return [own for own in found if own is not None]


def write_weights(
    update: WeightUpdate, arrays: Sequence[np.ndarray], tensors: Sequence[torch.Tensor]
) -> None:
    """Copy sent weights over their `counterparts`, in place."""
    with torch.no_grad(), devices.plain_modes(), warnings.catch_warnings():
        # An object store's memory is read-only, and it is only read here.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for sent, array, own in zip(update.tensors, arrays, tensors, strict=True):
            own.copy_(torch.from_numpy(array).view(sent.dtype).reshape(sent.shape))
