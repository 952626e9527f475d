"""What each layer of a model keeps between forwards, learnt from one tiny forward.

No model config is parsed: whatever the layers stored in transformers' own cache is what they need.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionLayer,
)

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerStates, StateShape
from cb_rollout.errors import ConfigurationError

PROBE_TOKENS = 4
# Enough for the short convolutions in front of recurrent layers to be filled.


def probe(
    config: PreTrainedConfig, forward: Callable[[torch.Tensor, Cache], object]
) -> CacheLayout:
    """Run `forward(input_ids, cache)` on a few tokens and read what the layers stored.

    Args:
        config: the model's config, from which transformers makes its own cache.
        forward: runs the model under the dtype settings of a rollout.

    Raises:
        ConfigurationError: a layer stores something that the engine does not know how to keep.
    """
    cache = RecordingCache(config=config)
    forward(torch.zeros(1, PROBE_TOKENS, dtype=torch.int64), cache)
    return CacheLayout(
        tuple(
            _read(layer, *cache.arrived.get(i, (None, None)))
            for i, layer in enumerate(cache.layers)
        )
    )


class RecordingCache(DynamicCache):
    """Notes the keys and values that arrive; the layers would make both one dtype."""

    def __init__(self, config: PreTrainedConfig) -> None:
        """Make transformers' own layers for this config."""
        super().__init__(config=config)
        self.arrived: dict[int, tuple[StateShape, StateShape]] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note shapes and dtypes, then store as usual."""
        self.arrived[layer_idx] = (_per_token(key_states), _per_token(value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero where every layer is recurrent, of which transformers 5.23 will not be asked."""
        is_counted = any(isinstance(layer, CacheLayerMixin) for layer in self.layers)
        return super().get_seq_length(layer_idx) if is_counted else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As above."""
        is_counted = any(isinstance(layer, CacheLayerMixin) for layer in self.layers)
        return super().get_mask_sizes(query_length, layer_idx) if is_counted else (query_length, 0)


def _read(layer: object, keys: StateShape | None, values: StateShape | None) -> LayerStates:
    if type(layer) not in hf_compat.pageable_layers():
        if isinstance(layer, CacheLayerMixin):
            raise ConfigurationError(
                f"a {type(layer).__name__} layer stores what the engine cannot keep in pages; "
                "roll this model out with model.generate."
            )
        return LayerStates()
    index, num_index_positions = hf_compat.token_index(layer)
    conv, recurrent = (), ()
    if isinstance(layer, LinearAttentionLayer):
        indices = range(layer.number_of_states)
        conv = tuple(_per_sequence(layer.conv_states[i]) for i in indices)
        recurrent = tuple(_per_sequence(layer.recurrent_states[i]) for i in indices)
    return LayerStates(
        keys,
        values,
        None if index is None else _per_token(index),
        num_index_positions,
        conv,
        recurrent,
        getattr(layer, "sliding_window", None),
    )


def _per_token(states: torch.Tensor) -> StateShape:
    """Shape of `[1, heads, tokens, size]` states for one token."""
    return StateShape((states.shape[1], states.shape[3]), states.dtype)


def _per_sequence(states: torch.Tensor | None) -> StateShape | None:
    return None if states is None else StateShape(tuple(states.shape[1:]), states.dtype)
