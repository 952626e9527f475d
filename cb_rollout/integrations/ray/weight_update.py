"""Read a model's weights for the workers of a pool, and write them over a worker's copy.

Owns the form of a delta: the bits that differ from the version before, compressed by zstandard, an
optional package. Sends nothing. Reading is called on the trainer's thread, the rest in a worker.
"""

import importlib
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from cb_rollout.compat.fsdp import local_part
from cb_rollout.compat.tensor_parallel import split_of
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.errors import WeightSyncError, abbreviated
from cb_rollout.weights.adapters import scalings_of
from cb_rollout.weights.replica import mismatches, tensors_by_name
from cb_rollout.weights.source import create_source, register_head
from cb_rollout.weights.tensor import Weight, values_of, weights_of

# Integers as wide as an element, whose bits a delta changes.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class WorkerTensor:
    """A tensor of a worker's model, without its bytes."""

    names: tuple[str, ...]
    """Its names; several if it is tied."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool
    """True: it is not a parameter, and a state dict may lack it."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """All weights of one policy version, without their bytes."""

    version: int
    tensors: Sequence[WorkerTensor] = ()
    """Empty: the weights are those of the checkpoint."""
    references: Sequence[Any] = ()
    """Reference of each tensor's bytes in the object store, which are kept while this record is."""
    deltas: Sequence[Any] = ()
    """Reference of each tensor's delta to the version before, in the store; empty: no deltas."""
    delta_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that a worker of the version before fetches."""
        return self.delta_bytes or sum(tensor.num_bytes for tensor in self.tensors)

    def is_delta_for(self, version: int) -> bool:
        """Return whether a worker of `version` is sent deltas instead of whole tensors."""
        return bool(self.deltas) and version == self.version - 1


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The weights that adapters are added to, which a trainer shares with its workers."""

    checksums: Mapping[WorkerTensor, int]
    """The crc32 checksum of each frozen parameter's bytes."""
    scalings: Mapping[str, float]
    """Factor of each adapter."""


def worker_tensors(
    model: torch.nn.Module, *, merges_adapters: bool = True
) -> tuple[WorkerTensor, ...]:
    """List the tensors of a whole, plain model; `merges_adapters=False`: only those that train."""
    weights = _chosen_weights(model, lambda tensor: tensor, merges_adapters)
    return tuple(map(_description, weights))


def adapter_base(model: torch.nn.Module) -> AdapterBase:
    """Describe the frozen parameters and the scalings of a worker's model."""
    weights = weights_of(model, lambda tensor: tensor, merges_adapters=False)
    trained = _trained(weights)
    checksums: dict[WorkerTensor, int] = {}
    for weight in weights:
        if weight not in trained and not weight.is_buffer:
            checksums[_description(weight)] = _checksum(weight.base, weight.base.dtype)
    return AdapterBase(checksums, scalings_of(model))


def require_base(model: torch.nn.Module, base: AdapterBase) -> None:
    """Compare a training module with the workers' base; collective where it is sharded.

    Raises:
        WeightSyncError: frozen weights or scalings differ; they are named.
    """
    module = ModelFacts.of(model).module
    source = create_source(model)
    dtypes = {tensor.names: tensor.dtype for tensor in base.checksums}
    weights = weights_of(module, source.stored, merges_adapters=False)
    shared = [weight for weight in weights if weight.names in dtypes]
    checksums: dict[tuple[str, ...], int] = {}
    with torch.no_grad(), devices.plain_modes():
        values = values_of(shared, source, lambda weight: (dtypes[weight.names], None))
        for weight, value in values:
            checksums[weight.names] = _checksum(value, dtypes[weight.names])
    scalings = scalings_of(module)
    faults = []
    for tensor, checksum in base.checksums.items():
        if checksums.get(tensor.names) != checksum:
            faults.append(tensor.names[0])
    for name, factor in base.scalings.items():
        if scalings.get(name) != factor:
            faults.append(name)
    if faults:
        raise WeightSyncError(
            f"{len(faults)} frozen weights or adapter scalings differ from the workers': "
            f"{abbreviated(faults)}; nothing was sent. Make the pool from the trainer's own "
            "checkpoint and peft_config; without peft_config, a sync sends whole weights."
        )


def _chosen_weights(
    model: torch.nn.Module,
    stored: Callable[[torch.Tensor], torch.Tensor],
    merges_adapters: bool,
) -> Sequence[Weight]:
    """Return all weights of a model, with the tensors of `stored`, or only those that train."""
    weights = weights_of(model, stored, merges_adapters=merges_adapters)
    return weights if merges_adapters else _trained(weights)


def _trained(weights: Sequence[Weight]) -> list[Weight]:
    return [weight for weight in weights if weight.base.requires_grad]


def _description(weight: Weight) -> WorkerTensor:
    base = weight.base
    return WorkerTensor(
        names=weight.names,
        shape=tuple(base.shape),
        dtype=base.dtype,
        is_buffer=weight.is_buffer,
    )


def _checksum(value: torch.Tensor, dtype: torch.dtype) -> int:
    return zlib.crc32(bytes_of(value, dtype).data)


def new_values(
    source: torch.nn.Module | Mapping[str, torch.Tensor],
    expected: Sequence[WorkerTensor],
    *,
    merges_adapters: bool = True,
) -> Iterator[tuple[WorkerTensor, torch.Tensor]]:
    """Yield the expected tensors with their new values, each valid until the next one.

    Every process that a module is sharded over reads all of them: a bucket is gathered at a time.

    Args:
        source: a training module, wrapped or not; or a state dict of the plain model, of which
            buffers and tied names may be missing.
        expected: the tensors of the workers.
        merges_adapters: add a module's adapters to its weights, out of place; False: read the
            parameters that train as they are.

    Raises:
        ConfigurationError: an adapter cannot be merged.
        WeightSyncError: the tensors do not match; all differences are named.
    """
    with torch.no_grad(), devices.plain_modes():
        if isinstance(source, torch.nn.Module):
            yield from _values_of_module(source, expected, merges_adapters)
        else:
            yield from _values_of_state_dict(source, expected)


def bytes_of(value: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """Return a copy of a value in the workers' dtype, as a flat array of bytes."""
    stored = torch.empty(value.shape, dtype=dtype).copy_(value)
    return stored.reshape(-1).view(torch.uint8).numpy()


class DeltaCodec:
    """Compress the bits in which two versions of a tensor differ; frames carry a checksum."""

    def __init__(self) -> None:
        """Raise `ImportError` where zstandard is not installed."""
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError as error:
            raise ImportError(
                "weight_deltas=True needs zstandard: pip install 'cb_rollout[ray]'."
            ) from error
        self._compressor = zstandard.ZstdCompressor(level=1, threads=-1, write_checksum=True)
        self._decompressor = zstandard.ZstdDecompressor()

    def delta(self, tensor: WorkerTensor, new: np.ndarray, old: np.ndarray) -> np.ndarray:
        """Compress the changed bits, the first bytes of all elements before the second ones."""
        planes = np.ascontiguousarray((new ^ old).reshape(-1, tensor.dtype.itemsize).T)
        return np.frombuffer(self._compressor.compress(planes), dtype=np.uint8)

    def changed(self, tensor: WorkerTensor, delta: np.ndarray) -> torch.Tensor:
        """Return the changed bits that a delta holds, `[bytes]` uint8; raise if it is damaged."""
        planes = np.frombuffer(self._decompressor.decompress(delta.data), dtype=np.uint8)
        return torch.from_numpy(planes).view(tensor.dtype.itemsize, -1).t().reshape(-1)


def _values_of_module(
    model: torch.nn.Module, expected: Sequence[WorkerTensor], merges_adapters: bool
) -> Iterator[tuple[WorkerTensor, torch.Tensor]]:
    module = ModelFacts.of(model).module
    source = create_source(model)
    register_head(module)
    by_name: dict[str, Weight] = {}
    for weight in _chosen_weights(module, source.stored, merges_adapters):
        for name in weight.names:
            by_name[name] = weight
    shapes = {name: tuple(source.shape(weight.base)) for name, weight in by_name.items()}
    _require_match(expected, shapes)
    chosen: list[Weight] = []
    dtypes: dict[Weight, torch.dtype] = {}
    for tensor in expected:
        weight = by_name[tensor.names[0]]
        chosen.append(weight)
        dtypes[weight] = tensor.dtype
        untied = [name for name in tensor.names if by_name[name] is not weight]
        if untied:
            raise WeightSyncError(
                f"{tensor.names[0]} and {', '.join(untied)} are one tensor in the workers' model "
                "but several in the training module; save the module as it is now, and make a new "
                "pool from that checkpoint."
            )
    values = values_of(chosen, source, lambda weight: (dtypes[weight], None))
    for tensor, (_, value) in zip(expected, values, strict=True):
        yield tensor, value


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
                f"{' and '.join(tensor.names)} are one tensor in the workers' model but differ in "
                "the state dict; make a new pool from a checkpoint in which they are not tied."
            )
        yield tensor, first


def _require_match(expected: Sequence[WorkerTensor], given: Mapping[str, tuple[int, ...]]) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in expected:
        shapes |= dict.fromkeys(tensor.names, tensor.shape)
    texts = ("not given", "not in the workers' model", "{} given, {} in the workers' model")
    faults = mismatches(given, shapes, *texts)
    if faults:
        raise WeightSyncError(
            f"{len(faults)} tensors do not match the workers' model; nothing was sent. Make the "
            "pool from the trainer's own checkpoint, and its peft_config if it has one. A state "
            "dict must use the names of the plain model, or of its adapters:\n  "
            + abbreviated(faults, "\n  ")
        )


def counterparts(update: WeightUpdate, model: PreTrainedModel) -> list[torch.Tensor]:
    """Return a model's tensor for each sent one; refuse weights of another model."""
    by_name = tensors_by_name(model)
    tensors = []
    faults = []
    for sent in update.tensors:
        name = sent.names[0]
        tensor = by_name.get(name)
        if tensor is None or tensor.shape != sent.shape:
            faults.append(name)
        else:
            tensors.append(tensor)
    if faults:
        raise WeightSyncError(
            f"weights of version {update.version} are of another model: this worker has no "
            f"tensor of the same shape for {abbreviated(faults)}. Nothing was written; "
            "make the pool of one checkpoint that does not change."
        )
    return tensors


def write_weights(
    update: WeightUpdate,
    arrays: Sequence[np.ndarray],
    tensors: Sequence[torch.Tensor],
    *,
    are_deltas: bool = False,
) -> None:
    """Copy sent weights over their `counterparts`, in place; or change the bits of deltas."""
    codec = DeltaCodec() if are_deltas else None
    with torch.no_grad(), devices.plain_modes(), warnings.catch_warnings():
        # An object store's memory is read-only, and it is only read here.
        warnings.filterwarnings("ignore", message="The given .* is not writable")
        for sent, array, tensor in zip(update.tensors, arrays, tensors, strict=True):
            if codec is None:
                content = torch.from_numpy(array)
            else:
                content = codec.changed(sent, array)
            # Bits of one element stay together where a tensor is cut.
            bits = BITS[sent.dtype.itemsize]
            value = content.view(bits).reshape(sent.shape)
            split = split_of(tensor)
            if split is not None:
                value = split.part(value)
            local = local_part(tensor)
            if codec is not None:
                value = local.view(bits) ^ value.to(local.device)
            local.copy_(value.view(sent.dtype))
