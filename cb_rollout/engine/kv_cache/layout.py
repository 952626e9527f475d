"""Describe the tensors that each layer of a model stores between forwards."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, for a token or a sequence, and dtype of a tensor that a layer stores."""

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
    """Positions that sparse attention stores for each token beside its index."""
    conv: tuple[TensorSpec | None, ...] = ()
    """Convolution states of a sequence."""
    recurrent: tuple[TensorSpec | None, ...] = ()
    """Recurrent states of a sequence; None: the layer leaves that one unused."""
    window: int | None = None
    """Newest tokens that transformers' own cache keeps; None: all."""

    @property
    def per_token(self) -> tuple[TensorSpec, ...]:
        return tuple(s for s in (self.keys, self.values, self.index) if s)

    @property
    def per_sequence(self) -> tuple[TensorSpec, ...]:
        return tuple(s for s in (*self.conv, *self.recurrent) if s)

    @property
    def is_recurrent(self) -> bool:
        """Return whether the layer stores states of fixed size, which no prefix can share."""
        return bool(self.conv or self.recurrent)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The tensors that a model's layers store, in order."""

    layers: tuple[LayerSpec, ...]
    routes: TensorSpec | None = None
    """Routers x experts that a token took, beside its keys; None: they are not recorded."""

    @property
    def bytes_per_token(self) -> int:
        routes = self.routes.num_bytes if self.routes else 0
        return sum(s.num_bytes for layer in self.layers for s in layer.per_token) + routes

    @property
    def bytes_per_sequence(self) -> int:
        return sum(s.num_bytes for layer in self.layers for s in layer.per_sequence)

    @property
    def has_keys(self) -> bool:
        return any(layer.keys for layer in self.layers)

    @property
    def is_recurrent(self) -> bool:
        return any(layer.is_recurrent for layer in self.layers)

    @property
    def packing_obstacle(self) -> str:
        """Return why rows may not stand end to end in one row; "": they may."""
        if self.has_keys and not any(layer.is_recurrent or layer.index for layer in self.layers):
            return ""
        return "recurrent states or sparse attention would mix rows that stand end to end"

    def at_least(self, dtype: torch.dtype) -> "CacheLayout":
        """Return the layout with no floating-point dtype of fewer bits than `dtype`."""

        def raised(spec: TensorSpec | None) -> TensorSpec | None:
            if spec is None or not spec.dtype.is_floating_point:
                return spec
            return replace(spec, dtype=max(spec.dtype, dtype, key=lambda d: d.itemsize))

        layers = tuple(
            replace(
                layer,
                keys=raised(layer.keys),
                values=raised(layer.values),
                index=raised(layer.index),
                conv=tuple(map(raised, layer.conv)),
                recurrent=tuple(map(raised, layer.recurrent)),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers)
