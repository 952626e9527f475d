"""Pack a model's weights into buffers with checksums, and write them over a copy.

Owns the order of the tensors in the buffers, and the checks before the first tensor is written.
Sends nothing. Packing is called on the trainer's thread, the rest in a worker.
"""

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import distributed

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.combinations import refused
from cb_rollout.engine.memory import device as devices
from cb_rollout.errors import WeightSyncError, abbreviated
from cb_rollout.weights.replica import mismatches
from cb_rollout.weights.source import create_source
from cb_rollout.weights.tensor import weights_of

# Bytes of one buffer, unless a single tensor is larger.
BUFFER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class WorkerTensor:
    """A tensor of a worker's model, without its bytes."""

    names: tuple[str, ...]
    """Its names; several where it is tied."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool
    """True: no parameter; a state dict may lack it."""
    checksum: str = ""
    """xxh3-128 of the bytes that were sent, in hexadecimal; empty: none were."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# Bytes of tensors, in one object of the object store.
Buffer = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """All weights of one policy version, without the buffers that hold them."""

    version: int
    buffers: Sequence[tuple[WorkerTensor, ...]]
    """Tensors of each buffer, in its order; none: the weights are those of the checkpoint."""
    references: Sequence[Any] = ()
    """Of the buffers in the object store, which are kept while this record is."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[WorkerTensor]:
        return list(itertools.chain(*self.buffers))


def worker_tensors(model: torch.nn.Module) -> tuple[WorkerTensor, ...]:
    """List the tensors of a whole, plain model, in its order."""
    return tuple(
        WorkerTensor(weight.names, tuple(weight.base.shape), weight.base.dtype, weight.is_buffer)
        for weight in weights_of(model, lambda tensor: tensor)
    )


def packed(
    source: torch.nn.Module | Mapping[str, torch.Tensor],
    expected: Sequence[WorkerTensor],
    max_buffer_bytes: int = BUFFER_BYTES,
) -> Iterator[tuple[tuple[WorkerTensor, ...], Buffer]]:
    """Yield the new values of the expected tensors: buffer by buffer, and what is in each.

    Args:
        source: a training module, wrapped or not, whose adapters are added out of place; or a
            state dict of the plain model, of which buffers and tied names may be missing.
        expected: the tensors of the workers.
        max_buffer_bytes: most bytes of a buffer that holds several tensors.

    Raises:
        ConfigurationError: the module is sharded over processes, or an adapter cannot be merged.
        WeightSyncError: the tensors do not match; all differences are named.
    """
    if isinstance(source, torch.nn.Module):
        values = _values_of_module(source, expected)
    else:
        values = _values_of_state_dict(source, expected)
    sent: list[WorkerTensor] = []
    buffer: Buffer = []
    num_bytes = 0
    with torch.no_grad(), devices.plain_modes():
        for tensor, value in values:
            # A copy: the source may free the value.
            stored = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(value)
            array = stored.reshape(-1).view(torch.uint8).numpy()
            if buffer and num_bytes + array.nbytes > max_buffer_bytes:
                yield tuple(sent), buffer
                sent, buffer, num_bytes = [], [], 0
            sent.append(replace(tensor, checksum=_checksum(array)))
            buffer.append(array)
            num_bytes += array.nbytes
        if buffer:
            yield tuple(sent), buffer


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


def _checksum(array: np.ndarray) -> str:
    # Comes with the extra `ray`, and a trainer without a pool needs neither.
    import xxhash

    return xxhash.xxh3_128_hexdigest(array.data)


def require_whole(update: WeightUpdate, buffers: Sequence[Buffer]) -> None:
    """Raise `WeightSyncError` unless the buffers are those that were packed."""
    start, advice = f"weights of version {update.version}", "Nothing was written; sync again."
    if len(buffers) != len(update.buffers):
        raise WeightSyncError(
            f"{start} are cut off: {len(buffers)} of {len(update.buffers)} buffers arrived. "
            f"{advice}"
        )
    for index, (arrays, tensors) in enumerate(zip(buffers, update.buffers, strict=True)):
        sizes, expected = [a.nbytes for a in arrays], [tensor.num_bytes for tensor in tensors]
        if sizes != expected:
            raise WeightSyncError(
                f"{start} are cut off: buffer {index} has {sum(sizes)} of {sum(expected)} bytes, "
                f"and {len(sizes)} of {len(expected)} tensors. {advice}"
            )
    for index, (arrays, tensors) in enumerate(zip(buffers, update.buffers, strict=True)):
        for array, tensor in zip(arrays, tensors, strict=True):
            if (checksum := _checksum(array)) != tensor.checksum:
                raise WeightSyncError(
                    f"{start}: {tensor.names[0]} in buffer {index} has the checksum {checksum}, "
                    f"and {tensor.checksum} was sent. {advice}"
                )


def require_counterparts(update: WeightUpdate, tensors: Mapping[str, Any]) -> None:
    """Raise `WeightSyncError` unless the model has every sent tensor, in its shape."""
    faults = [
        tensor.names[0]
        for tensor in update.tensors
        if tensor.names[0] not in tensors or tuple(tensors[tensor.names[0]].shape) != tensor.shape
    ]
    if faults:
        raise WeightSyncError(
            f"weights of version {update.version} are of another model: this worker has no "
            f"tensor of the same shape for {abbreviated(faults)}. Nothing was written; "
            "make the pool of one checkpoint that does not change."
        )


def write_weights(
    update: WeightUpdate, buffers: Sequence[Buffer], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy packed weights over a model's tensors, in place; `require_whole` comes first."""
    with torch.no_grad(), devices.plain_modes(), warnings.catch_warnings():
        # An object store's memory is read-only, and it is only read here.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for tensor, array in zip(update.tensors, itertools.chain(*buffers), strict=True):
            value = torch.from_numpy(array).view(tensor.dtype).reshape(tensor.shape)
            tensors[tensor.names[0]].copy_(value)
