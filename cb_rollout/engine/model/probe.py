"""Learn the tensors that each layer of a model stores, from one tiny forward.

No model config is parsed: the probe reads what the layers stored in transformers' own cache.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.errors import ConfigurationError

# Enough to fill the short convolutions in front of recurrent layers.
PROBE_TOKENS = 4


def probe(
    config: PreTrainedConfig, forward: Callable[[torch.Tensor, Cache], object]
) -> CacheLayout:
    """Run `forward(input_ids, cache)`, and read what it stored, or raise `ConfigurationError`."""
    cache = RecordingCache(config=config)
    with hf_compat.replacing_attention(cache.attend):
        forward(torch.zeros(1, PROBE_TOKENS, dtype=torch.int64), cache)
    return CacheLayout(
        tuple(
            _read(layer, *cache.recorded.get(i, (None, None)))
            for i, layer in enumerate(cache.layers)
        )
    )


class RecordingCache(DynamicCache):
    """Record the shapes and dtypes of keys and values; layers store both in one dtype.

    Autocast casts the inputs of attention. Keys and values that go straight to an attention
    function are recorded in that dtype, since to store them cast changes no bit of the result.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.recorded: dict[int, tuple[TensorSpec, ...]] = {}
        self._returned: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.recorded[layer_idx] = (_per_token(key_states), _per_token(value_states))
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._returned = layer_idx, keys, values
        return keys, values

    def attend(
        self,
        own_attention: Callable[..., Any],
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the model's attention; note what autocast casts the last update's states to."""
        layer_idx, keys, values = self._returned or (-1, None, None)
        if keys is key and values is value and torch.is_autocast_enabled(key.device.type):
            dtype = torch.get_autocast_dtype(key.device.type)
            # Autocast leaves float64 as it is.
            keys_and_values = (
                s if s.dtype == torch.float64 else replace(s, dtype=dtype)
                for s in self.recorded[layer_idx]
            )
            self.recorded[layer_idx] = tuple(keys_and_values)
        return own_attention(module, query, key, value, *args, **kwargs)

    # Without attention layers, transformers 5.23 raises in the next two.
    def _has_attention(self) -> bool:
        return any(isinstance(layer, CacheLayerMixin) for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) if self._has_attention() else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        has = self._has_attention()
        return super().get_mask_sizes(query_length, layer_idx) if has else (query_length, 0)


def _read(layer: object, keys: TensorSpec | None, values: TensorSpec | None) -> LayerSpec:
    if type(layer) not in hf_compat.pageable_layers():
        if isinstance(layer, CacheLayerMixin):
            raise ConfigurationError(
                f"a {type(layer).__name__} layer stores what the engine cannot keep in pages; "
                "roll this model out with model.generate."
            )
        return LayerSpec()
    index, num_index_positions = hf_compat.token_index(layer)
    conv, recurrent = (), ()
    if isinstance(layer, LinearAttentionLayer):
        indices = range(layer.number_of_states)
        conv = tuple(_per_sequence(layer.conv_states[i]) for i in indices)
        recurrent = tuple(_per_sequence(layer.recurrent_states[i]) for i in indices)
    return LayerSpec(
        keys,
        values,
        None if index is None else _per_token(index),
        num_index_positions,
        conv,
        recurrent,
        getattr(layer, "sliding_window", None),
    )


def _per_token(states: torch.Tensor) -> TensorSpec:
    """Return the shape that `[1, heads, tokens, size]` states have for one token."""
    return TensorSpec((states.shape[1], states.shape[3]), states.dtype)


def _per_sequence(states: torch.Tensor | None) -> TensorSpec | None:
    return None if states is None else TensorSpec(tuple(states.shape[1:]), states.dtype)
