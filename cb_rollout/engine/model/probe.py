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
    layers: list[LayerSpec] = []
    for index, layer in enumerate(cache.layers):
        keys, values = cache.recorded.get(index, (None, None))
        layers.append(_read(layer, keys, values))
    return CacheLayout(tuple(layers))


class RecordingCache(DynamicCache):
    """Record the shapes and dtypes of keys and values; layers store both in one dtype.

    Autocast casts the inputs of attention. Keys and values that go directly to an attention
    function are recorded in the cast dtype, because storing them cast does not change the result.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.recorded: dict[int, tuple[TensorSpec, TensorSpec]] = {}
        """Keys and values of a token, by layer."""
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
        """Call the model's attention; note what autocast casts the last update's states to.

        Args:
            own_attention: the model's attention function.
            module: the layer that calls it.
            query: as in `own_attention`.
            key: as in `own_attention`.
            value: as in `own_attention`.
            args: further arguments of `own_attention`.
            kwargs: further arguments of `own_attention`.
        """
        layer_idx, keys, values = self._returned or (-1, None, None)
        if keys is key and values is value and torch.is_autocast_enabled(key.device.type):
            dtype = torch.get_autocast_dtype(key.device.type)
            key_spec, value_spec = self.recorded[layer_idx]
            self.recorded[layer_idx] = (_cast(key_spec, dtype), _cast(value_spec, dtype))
        return own_attention(module, query, key, value, *args, **kwargs)

    # Without attention layers, transformers 5.23 raises in the next two methods.
    def _has_attention(self) -> bool:
        return any(isinstance(layer, CacheLayerMixin) for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) if self._has_attention() else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if not self._has_attention():
            return query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)


def _cast(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    """Return these tensors as autocast to `dtype` casts them; it does not cast float64."""
    return spec if spec.dtype == torch.float64 else replace(spec, dtype=dtype)


def _read(layer: object, keys: TensorSpec | None, values: TensorSpec | None) -> LayerSpec:
    """Return what a cache layer stores; `keys` and `values`: of a token, None where it has none."""
    if type(layer) not in hf_compat.pageable_layers():
        if isinstance(layer, CacheLayerMixin):
            raise ConfigurationError(
                f"a {type(layer).__name__} layer caches state that does not fit the paged cache; "
                "use model.generate for this model."
            )
        return LayerSpec()
    index, num_index_positions = hf_compat.token_index(layer)
    conv: tuple[TensorSpec | None, ...] = ()
    recurrent: tuple[TensorSpec | None, ...] = ()
    if isinstance(layer, LinearAttentionLayer):
        indices = range(layer.number_of_states)
        conv = tuple(_per_sequence(layer.conv_states[i]) for i in indices)
        recurrent = tuple(_per_sequence(layer.recurrent_states[i]) for i in indices)
    return LayerSpec(
        keys=keys,
        values=values,
        index=None if index is None else _per_token(index),
        num_index_positions=num_index_positions,
        conv=conv,
        recurrent=recurrent,
        window=getattr(layer, "sliding_window", None),
    )


def _per_token(states: torch.Tensor) -> TensorSpec:
    """Return the shape that `[1, heads, tokens, size]` states have for one token."""
    return TensorSpec((states.shape[1], states.shape[3]), states.dtype)


def _per_sequence(states: torch.Tensor | None) -> TensorSpec | None:
    return None if states is None else TensorSpec(tuple(states.shape[1:]), states.dtype)
