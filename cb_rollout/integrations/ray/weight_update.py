"""Pack a model's weights into buffers with checksums, and write them over a copy.

Owns the order of the tensors in the buffers, and the checks before the first tensor is written.
Sends nothing. Packing is called on the trainer's thread, the rest in a worker.
"""

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.combinations import refused
from cb_rollout.engine.memory import device as devices
from cb_rollout.errors import WeightSyncError, abbreviated
from cb_rollout.weights.source import create_source
from cb_rollout.weights.tensor import weights_of

# Bytes of one buffer, unless a single tensor is larger.
BUFFER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor of a worker's model."""

    names: tuple[str, ...]
    """Its names; several where it is tied."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool
    """True: no parameter; a state dict may lack it."""


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor of an update, without its bytes."""

    tensor: HeldTensor
    num_bytes: int
    checksum: str
    """xxh3-128 of its bytes, in hexadecimal."""


# Bytes of tensors, in one object of the object store.
Buffer = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """All weights of one policy version, without the buffers that hold them."""

    version: int
    buffers: Sequence[tuple[SentTensor, ...]]
    """Tensors of each buffer, in its order; none: the weights are those of the checkpoint."""
    references: Sequence[Any] = ()
    """Of the buffers in the object store, which are kept while this record is."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(sent.num_bytes for sent in itertools.chain(*self.buffers))

    @property
    def tensors(self) -> list[HeldTensor]:
        """Return its tensors, in the order of the buffers."""
        return [sent.tensor for sent in itertools.chain(*self.buffers)]


def held_tensors(model: torch.nn.Module) -> tuple[HeldTensor, ...]:
    """List the tensors of a whole, plain model, in its order."""
    return tuple(
        HeldTensor(weight.names, tuple(weight.base.shape), weight.base.dtype, weight.is_buffer)
        for weight in weights_of(model, lambda tensor: tensor)
    )


def packed(
    source: torch.nn.Module | Mapping[str, torch.Tensor],
    held: Sequence[HeldTensor],
    max_buffer_bytes: int = BUFFER_BYTES,
) -> Iterator[tuple[tuple[SentTensor, ...], Buffer]]:
    """Yield the new values of the held tensors: buffer by buffer, and what is in each.

    Args:
        source: a training module, wrapped or not, whose adapters are added out of place; or a
            state dict of the plain model, of which buffers and tied names may be missing.
        held: the tensors of the workers.
        max_buffer_bytes: most bytes of a buffer that holds several tensors.

    Raises:
        ConfigurationError: the module is sharded over processes, or an adapter cannot be merged.
        WeightSyncError: the tensors do not match; all differences are named.
    """
    if isinstance(source, torch.nn.Module):
        values = _of_module(source, held)
    else:
        values = _of_state_dict(source, held)
    sent: list[SentTensor] = []
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
            sent.append(SentTensor(tensor, array.nbytes, checksum(array)))
            buffer.append(array)
            num_bytes += array.nbytes
        if buffer:
            yield tuple(sent), buffer


def _of_module(
    model: torch.nn.Module, held: Sequence[HeldTensor]
) -> Iterator[tuple[HeldTensor, torch.Tensor]]:
    plain, source = hf_compat.unwrap(model), create_source(model)
    if source.is_collective and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise refused("pool, sharded module")
    weights = weights_of(plain, source.stored)
    found = {name: weight for weight in weights for name in weight.names}
    _require_match(held, {name: tuple(source.shape(w.base)) for name, w in found.items()})
    for tensor in held:
        weight = found[tensor.names[0]]
        if untied := [name for name in tensor.names if found[name] is not weight]:
            raise WeightSyncError(
                f"{tensor.names[0]} and {', '.join(untied)} are one tensor in the workers' model "
                "and several in the training module; save the module as it is now, and make a "
                "new pool of that checkpoint."
            )
        with source.read(weight.tensors) as whole:
            yield tensor, weight.value(whole)


def _of_state_dict(
    state: Mapping[str, torch.Tensor], held: Sequence[HeldTensor]
) -> Iterator[tuple[HeldTensor, torch.Tensor]]:
    if not isinstance(state, Mapping):
        raise WeightSyncError(
            f"weights are a {type(state).__name__}; pass the training module or its state dict."
        )
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for tensor in held:
        if tensor.is_buffer or any(name in given for name in tensor.names):
            given |= {name: tensor.shape for name in tensor.names if name not in given}
    _require_match(held, given)
    for tensor in held:
        found = [state[name] for name in tensor.names if name in state]
        if not found:
            continue
        first, *others = found
        if any(other is not first and not torch.equal(other, first) for other in others):
            raise WeightSyncError(
                f"{' and '.join(tensor.names)} are one tensor in the workers' model and differ in "
                "the state dict; make a new pool of a checkpoint in which they are not tied."
            )
        yield tensor, first


def _require_match(held: Sequence[HeldTensor], given: Mapping[str, tuple[int, ...]]) -> None:
    known = {name: tensor.shape for tensor in held for name in tensor.names}
    faults = [
        *(f"{name}: not given" for name in known.keys() - given.keys()),
        *(f"{name}: not in the workers' model" for name in given.keys() - known.keys()),
        *(
            f"{name}: {given[name]} given, {known[name]} in the workers' model"
            for name in known.keys() & given.keys()
            if given[name] != known[name]
        ),
    ]
    if faults:
        raise WeightSyncError(
            f"{len(faults)} tensors do not match the workers' model; nothing was sent. Make the "
            "pool of the trainer's own checkpoint, and pass the plain model's names:\n  "
            + abbreviated(sorted(faults), "\n  ")
        )


def checksum(array: np.ndarray) -> str:
    """Return the checksum of an array's bytes."""
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
        sizes, expected = [a.nbytes for a in arrays], [sent.num_bytes for sent in tensors]
        if sizes != expected:
            raise WeightSyncError(
                f"{start} are cut off: buffer {index} has {sum(sizes)} of {sum(expected)} bytes, "
                f"and {len(sizes)} of {len(expected)} tensors. {advice}"
            )
    for index, (arrays, tensors) in enumerate(zip(buffers, update.buffers, strict=True)):
        for array, sent in zip(arrays, tensors, strict=True):
            if (found := checksum(array)) != sent.checksum:
                raise WeightSyncError(
                    f"{start}: {sent.tensor.names[0]} in buffer {index} has the checksum {found}, "
                    f"and {sent.checksum} was sent. {advice}"
                )


def require_places(update: WeightUpdate, tensors: Mapping[str, Any]) -> None:
    """Raise `WeightSyncError` unless every sent tensor has its place in the model."""
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
