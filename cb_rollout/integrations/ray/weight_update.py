"""Pack a model's weights into contiguous buffers with checksums, and write them over a copy.

Owns the layout of the buffers and the checks before the first tensor is written. Sends nothing.
Packing is called on the trainer's thread, the rest in a worker.
"""

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
from cb_rollout.weights.source import create_source
from cb_rollout.weights.tensor import weights_of

# Bytes of one buffer, unless a single tensor is larger.
BUFFER_BYTES = 256 * 2**20

# Start of each tensor in its buffer.
ALIGNMENT = 64


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
class PackedTensor:
    """Place of a tensor in the buffers."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    buffer: int
    """Index of its buffer."""
    offset: int
    """Byte at which it starts there."""

    @property
    def num_bytes(self) -> int:
        """Return its bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """All weights of one policy version, without the buffers that hold them."""

    version: int
    tensors: tuple[PackedTensor, ...]
    buffer_bytes: tuple[int, ...]
    checksums: tuple[str, ...]
    """xxh3-128 of each buffer, in hexadecimal."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(self.buffer_bytes)


def held_tensors(model: torch.nn.Module) -> tuple[HeldTensor, ...]:
    """List the tensors of a whole, plain model, in its order."""
    return tuple(
        HeldTensor(weight.names, tuple(weight.base.shape), weight.base.dtype, weight.is_buffer)
        for weight in weights_of(model, lambda tensor: tensor)
    )


def new_values(
    source: torch.nn.Module | Mapping[str, torch.Tensor], held: Sequence[HeldTensor]
) -> Iterator[tuple[HeldTensor, torch.Tensor]]:
    """Yield a new value of each held tensor; a value is valid until the next one is requested.

    Args:
        source: a training module, wrapped or not, whose adapters are added out of place; or a
            state dict of the plain model, of which buffers and tied names may be missing.
        held: the tensors of the workers.

    Raises:
        ConfigurationError: the module is sharded over processes, or an adapter cannot be merged.
        WeightSyncError: the tensors do not match; all differences are named.
    """
    if isinstance(source, torch.nn.Module):
        yield from _values_of_module(source, held)
    else:
        yield from _values_of_state_dict(source, held)


def _values_of_module(
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


def _values_of_state_dict(
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


class PackedWeights:
    """The weights of one version, packed buffer by buffer."""

    def __init__(
        self,
        source: torch.nn.Module | Mapping[str, torch.Tensor],
        held: Sequence[HeldTensor],
        max_buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Lay out the tensors; see `new_values`.

        Args:
            source: the new weights.
            held: the tensors of the workers.
            max_buffer_bytes: most bytes of a buffer that holds several tensors.
        """
        self._source, self._checksums = source, list[str]()
        self._held = tuple(
            tensor
            for tensor in held
            if not isinstance(source, Mapping) or any(name in source for name in tensor.names)
        )
        self._tensors, self._buffer_bytes = _layout(self._held, max_buffer_bytes)
        self._all_held = tuple(held)

    def buffers(self) -> Iterator[np.ndarray]:
        """Yield the buffers in order, one-dimensional arrays of uint8.

        Raises:
            ConfigurationError: see `new_values`.
            WeightSyncError: see `new_values`.
        """
        buffer, index = np.zeros(0, dtype=np.uint8), -1
        with torch.no_grad(), devices.plain_modes():
            values = new_values(self._source, self._all_held)
            for packed, (_, value) in zip(self._tensors, values, strict=True):
                if packed.buffer != index:
                    if index >= 0:
                        yield self._finished(buffer)
                    index = packed.buffer
                    buffer = np.zeros(self._buffer_bytes[index], dtype=np.uint8)
                place = torch.from_numpy(buffer[packed.offset : packed.offset + packed.num_bytes])
                stored = value.detach().to("cpu", packed.dtype).contiguous()
                place.copy_(stored.reshape(-1).view(torch.uint8))
            if index >= 0:
                yield self._finished(buffer)

    def update(self, version: int) -> WeightUpdate:
        """Return the description of the buffers, all of which were taken."""
        assert len(self._checksums) == len(self._buffer_bytes), "not all buffers were taken"
        return WeightUpdate(
            version, tuple(self._tensors), tuple(self._buffer_bytes), tuple(self._checksums)
        )

    def _finished(self, buffer: np.ndarray) -> np.ndarray:
        self._checksums.append(checksum(buffer))
        return buffer


def _layout(
    held: Sequence[HeldTensor], max_buffer_bytes: int
) -> tuple[list[PackedTensor], list[int]]:
    """Return the place of each tensor, and the bytes of each buffer."""
    tensors: list[PackedTensor] = []
    sizes: list[int] = []
    for tensor in held:
        packed = PackedTensor(tensor.names[0], tensor.shape, tensor.dtype, 0, 0)
        padded = -(-packed.num_bytes // ALIGNMENT) * ALIGNMENT
        if not sizes or (sizes[-1] and sizes[-1] + padded > max_buffer_bytes):
            sizes.append(0)
        tensors.append(replace(packed, buffer=len(sizes) - 1, offset=sizes[-1]))
        sizes[-1] += padded
    return tensors, sizes


def checksum(buffer: np.ndarray) -> str:
    """Return a buffer's checksum."""
    # Comes with the extra `ray`, and a trainer without a pool needs neither.
    import xxhash

    return xxhash.xxh3_128_hexdigest(buffer.data)


def require_whole(update: WeightUpdate, buffers: Sequence[np.ndarray]) -> None:
    """Raise `WeightSyncError` unless the buffers are those that were packed."""
    advice = "Nothing was written; sync again."
    if len(buffers) != len(update.buffer_bytes):
        raise WeightSyncError(
            f"weights of version {update.version} are cut off: {len(buffers)} of "
            f"{len(update.buffer_bytes)} buffers arrived. {advice}"
        )
    for index, (buffer, size) in enumerate(zip(buffers, update.buffer_bytes, strict=True)):
        if buffer.nbytes != size:
            raise WeightSyncError(
                f"weights of version {update.version} are cut off: buffer {index} has "
                f"{buffer.nbytes} of {size} bytes. {advice}"
            )
    for index, (buffer, expected) in enumerate(zip(buffers, update.checksums, strict=True)):
        if (found := checksum(buffer)) != expected:
            raise WeightSyncError(
                f"weights of version {update.version}: buffer {index} has the checksum {found}, "
                f"and {expected} was sent. {advice}"
            )


def write_weights(
    update: WeightUpdate, buffers: Sequence[np.ndarray], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy packed weights over a model's tensors, in place; `require_whole` comes first."""
    with torch.no_grad(), devices.plain_modes():
        for packed in update.tensors:
            tensors[packed.name].copy_(_value(packed, buffers[packed.buffer]))


def require_places(update: WeightUpdate, tensors: Mapping[str, Any]) -> None:
    """Raise `WeightSyncError` unless every packed tensor has its place in the model."""
    faults = [
        packed.name
        for packed in update.tensors
        if packed.name not in tensors or tuple(tensors[packed.name].shape) != packed.shape
    ]
    if faults:
        raise WeightSyncError(
            f"weights of version {update.version} are of another model: this worker has no "
            f"tensor of the same shape for {abbreviated(faults)}. Nothing was written; "
            "make the pool of one checkpoint that does not change."
        )


def _value(packed: PackedTensor, buffer: np.ndarray) -> torch.Tensor:
    part = buffer[packed.offset : packed.offset + packed.num_bytes]
    with warnings.catch_warnings():
        # An object store's memory is read-only, and it is only read here.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(part)
    return flat.view(packed.dtype).reshape(packed.shape)
