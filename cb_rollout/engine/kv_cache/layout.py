"""Describe what each layer of a model stores between forwards: shapes, dtypes and bytes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor that a layer keeps: its shape for one token or for one sequence, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Elements of one such tensor."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of one such tensor."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerStates:
    """What one layer keeps."""

    keys: StateShape | None = None
    """Heads x size, for each token; None: the layer stores no keys (shared, recurrent, or none)."""
    values: StateShape | None = None
    index: StateShape | None = None
    """Heads x size of what a sparse attention ranks its tokens by, for each token."""
    num_index_positions: int = 0
    """Positions of each token that a sparse attention keeps beside its index; 0: it keeps none."""
    conv: tuple[StateShape | None, ...] = ()
    """Convolution states of one sequence."""
    recurrent: tuple[StateShape | None, ...] = ()
    """Recurrent states of one sequence; None where the layer leaves that one unused."""
    window: int | None = None
    """Newest tokens that transformers' own cache would keep; None: all."""

    @property
    def per_token(self) -> tuple[StateShape, ...]:
        """What is kept of every token: keys and values, and an index where there is one."""
        return tuple(s for s in (self.keys, self.values, self.index) if s)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that grow with every cached token."""
        return sum(s.num_bytes for s in self.per_token)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of fixed-size states."""
        return sum(s.num_bytes for s in (*self.conv, *self.recurrent) if s)

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer keeps a state that only whole sequences can hand over."""
        return bool(self.conv or self.recurrent)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What every layer keeps, in order."""

    layers: tuple[LayerStates, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that every cached token takes, over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of fixed-size states that every running sequence takes, over all layers."""
        return sum(layer.bytes_per_sequence for layer in self.layers)

    @property
    def has_keys(self) -> bool:
        """Whether any layer keeps something of every token."""
        return any(layer.keys for layer in self.layers)

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer keeps a recurrent state."""
        return any(layer.is_recurrent for layer in self.layers)
