"""States rounded to float8, as the bytes that pages of `kv_dtype="float8_e4m3fn"` hold."""

from dataclasses import replace

import torch

from cb_rollout.engine.probe import CacheLayout, LayerStates, StateShape

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


def page_dtype(dtype: torch.dtype) -> torch.dtype:
    """What pages are made of: bytes for float8, which few operators take."""
    return torch.uint8 if dtype == FLOAT8 else dtype


def packed(states: torch.Tensor) -> torch.Tensor:
    """The bytes of states rounded to float8."""
    # A conversion makes NaN of what is too large.
    return states.clamp(-LARGEST, LARGEST).to(FLOAT8).view(torch.uint8)


def unpacked(packed_states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a model reads of packed states."""
    return packed_states.view(FLOAT8).to(dtype)


def in_float8(layout: CacheLayout) -> CacheLayout:
    """The layout with keys and values in float8; states, and what ranks tokens, stay as is."""
    return CacheLayout(tuple(_layer_in_float8(layer) for layer in layout.layers))


def _layer_in_float8(layer: LayerStates) -> LayerStates:
    keys, values = (_shape_in_float8(shape) for shape in (layer.keys, layer.values))
    return replace(layer, keys=keys, values=values)


def _shape_in_float8(shape: StateShape | None) -> StateShape | None:
    return None if shape is None else StateShape(shape.shape, FLOAT8)
