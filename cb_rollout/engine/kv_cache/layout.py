"""Describe the tensors that each layer of a model stores between forwards."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, per token or per sequence, and dtype of a tensor that a layer stores."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The tensors that a layer stores."""

    keys: TensorSpec | None = None
    """Heads x size of a token's keys; None: the layer is recurrent, or shares another's."""
    values: TensorSpec | None = None
    index: TensorSpec | None = None
    """Heads x size of a token's index, by which sparse attention ranks tokens."""
    num_index_positions: int = 0
    """Positions that sparse attention stores for each token with its index."""
    conv: tuple[TensorSpec | None, ...] = ()
    """Convolution states of a sequence."""
    recurrent: tuple[TensorSpec | None, ...] = ()
    """Recurrent states of a sequence; None: the layer does not use this state."""
    window: int | None = None
    """Number of newest tokens that transformers' own cache keeps; None: all."""

    @property
    def per_token(self) -> tuple[TensorSpec, ...]:
        states = (self.keys, self.values, self.index)
        return tuple(spec for spec in states if spec is not None)

    @property
    def per_sequence(self) -> tuple[TensorSpec, ...]:
        states = (*self.conv, *self.recurrent)
        return tuple(spec for spec in states if spec is not None)

    @property
    def bytes_per_token(self) -> int:
        return sum(spec.num_bytes for spec in self.per_token)

    @property
    def bytes_per_sequence(self) -> int:
        return sum(spec.num_bytes for spec in self.per_sequence)

    @property
    def is_recurrent(self) -> bool:
        """Return whether the layer stores states of fixed size, which prefixes cannot share."""
        return bool(self.conv or self.recurrent)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The tensors that a model's layers store, in order."""

    layers: tuple[LayerSpec, ...]
    routes: TensorSpec | None = None
    """A token's experts per router, stored with its keys; None: not recorded."""

    @property
    def bytes_per_token(self) -> int:
        num_bytes = sum(layer.bytes_per_token for layer in self.layers)
        if self.routes is not None:
            num_bytes += self.routes.num_bytes
        return num_bytes

    @property
    def bytes_per_sequence(self) -> int:
        return sum(layer.bytes_per_sequence for layer in self.layers)

    @property
    def has_keys(self) -> bool:
        return any(layer.keys for layer in self.layers)

    @property
    def is_recurrent(self) -> bool:
        return any(layer.is_recurrent for layer in self.layers)

    @property
    def packing_obstacle(self) -> str:
        """Return why rows cannot be concatenated into one row; "": they can."""
        if self.has_keys and not any(layer.is_recurrent or layer.index for layer in self.layers):
            return ""
        return "recurrent states or sparse attention would mix rows that stand end to end"

    def at_least(self, dtype: torch.dtype) -> "CacheLayout":
        """Return the layout with at least as many bits as `dtype` in floating-point tensors."""

        def raised(spec: TensorSpec | None) -> TensorSpec | None:
            if spec is None or not spec.dtype.is_floating_point:
                return spec
            return replace(spec, dtype=max(spec.dtype, dtype, key=lambda d: d.itemsize))

        layers: list[LayerSpec] = []
        for layer in self.layers:
            layers.append(
                replace(
                    layer,
                    keys=raised(layer.keys),
                    values=raised(layer.values),
                    index=raised(layer.index),
                    conv=tuple(map(raised, layer.conv)),
                    recurrent=tuple(map(raised, layer.recurrent)),
                )
            )
        return replace(self, layers=tuple(layers))
