"""What a model sees as its cache in a decode step on the fast path.

A layer hands the new key and value back as they came; the attention function, called with that very
key, has the step's attention write them and read the row's history. So nothing is gathered, no
mask is made, and every shape is known before the step.

B: rows, V: vocabulary, H: query heads, K: key heads, D: size of a key, E: size of a value.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.attention.backend import AttentionSpec, Forward, UnsupportedAttentionError
from cb_rollout.engine.attention.gathered import attending
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerStates
from cb_rollout.engine.kv_cache.paged import PagedCache

HARMLESS = {
    *("cache", "cache_position", "dropout", "is_causal", "labels", "layer_idx"),
    *("num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache"),
}
# What models hand to an attention function that changes nothing about one new token a row.


class PagedAttention(Protocol):
    """Attends in one decode step."""

    def attend(
        self,
        layer: "DecodeLayer",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Write each row's new key and value; attention of its query over all that it has.

        Args:
            layer: whose pages.
            query: `[B, H, 1, D]`.
            key: `[B, K, 1, D]`.
            value: `[B, K, 1, E]`.
            spec: scale, window, cap and sinks.

        Returns:
            `[B, 1, H, E]`, in the query's dtype.

        Raises:
            UnsupportedAttentionError: the attention does not do that.
        """
        ...


class DecodeLayer(CacheLayerMixin):
    """One attention layer, in decode steps."""

    def __init__(self, index: int, states: LayerStates, device: torch.device) -> None:
        """Know the layer's number and form; what it holds is the attention's affair."""
        super().__init__()
        assert states.keys is not None
        assert states.values is not None
        self.is_initialized = True
        self.keys = self.values = torch.empty(0, device=device)
        self.index, self.window = index, states.window
        self.num_key_heads, self.value_size = states.values.shape
        self.key_dtype, self.value_dtype = states.keys.dtype, states.values.dtype
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None
        """The last update's key and value, by which the attention function knows its layer."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remember `[B, heads, 1, size]` states, and hand them back."""
        self.given = key_states, value_states
        return self.given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask, which nobody reads, should cover."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """None before the new tokens: a token's place is told by its position alone."""
        return 0

    def get_max_length(self) -> int:
        """No limit of its own (-1)."""
        return -1


class DecodeCache(Cache):
    """The paged cache, as decode steps on the fast path see it."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        """Look at no pages yet."""
        self.paged = [
            DecodeLayer(index, states, device)
            for index, states in enumerate(layout.layers)
            if states.keys
        ]
        layers: list[Any] = [hf_compat.DummyLayer() for _ in layout.layers]
        for layer in self.paged:
            layers[layer.index] = layer
        super().__init__(layers=layers)
        self._is_recurrent = layout.is_recurrent
        self._attention: PagedAttention | None = None

    def run(
        self,
        forward: Forward,
        attention: PagedAttention,
        tokens_B1: torch.Tensor,
        positions_B1: torch.Tensor,
        table_rows_B: torch.Tensor,
        cache: PagedCache | None = None,
    ) -> torch.Tensor:
        """float32 logits, `[B, V]`, by one forward of one new token of each row.

        Args:
            forward: calls the model.
            attention: attends, and knows where the rows lie.
            tokens_B1: the new tokens.
            positions_B1: each one's position.
            table_rows_B: integers; each row's table row.
            cache: where recurrent states are; None: there are none.
        """
        # A mask of four dimensions is taken as it is, and nobody reads it; recurrent layers would.
        mask = None if self._is_recurrent else tokens_B1.new_ones(tokens_B1.shape[0], 1, 1, 1)
        with self._reading(attention, table_rows_B, cache):
            return forward(tokens_B1, mask, positions_B1, self)

    @contextmanager
    def _reading(
        self, attention: PagedAttention, table_rows_B: torch.Tensor, cache: PagedCache | None
    ) -> Iterator[None]:
        """Within, a model that is given this cache runs one new token of each row."""
        self._attention = attention
        for layer in self.paged:
            layer.given = None
        layers, stateful = self.layers, cache.stateful if cache else {}
        self.layers = [stateful.get(index, layer) for index, layer in enumerate(layers)]
        for layer in stateful.values():
            layer.load(table_rows_B)
        try:
            with attending(self.attend):
                yield
            for layer in stateful.values():
                layer.save(table_rows_B.long())
        finally:
            # Nothing here may keep pages or states that are given back.
            self._attention, self.layers = None, layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """See `DecodeLayer`; whichever layer is asked."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """See `DecodeLayer`; whichever layer is asked."""
        return query_length, 0

    def attend(
        self,
        found: Callable[..., Any],
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **asked: Any,
    ) -> tuple[torch.Tensor, None]:
        """Stand in for the attention function that a layer would have `found`.

        Raises:
            UnsupportedAttentionError: the layer asks for what the kernels do not do.
        """
        assert self._attention is not None, "the cache was used outside a step"
        layer = next((layer for layer in self.paged if layer.given and layer.given[0] is key), None)
        if layer is None:
            return found(module, query, key, value, attention_mask, **asked)
        layer.given = None
        return self._attention.attend(layer, query, key, value, _spec(query, layer, asked)), None


def _spec(query: torch.Tensor, layer: DecodeLayer, asked: dict[str, Any]) -> AttentionSpec:
    """What a layer's attention does, from what it hands to its attention function."""
    rest = dict(asked)
    scale = rest.pop("scaling", None)
    window, softcap, sinks = (rest.pop(n, None) for n in ("sliding_window", "softcap", "s_aux"))
    unknown = [
        name
        for name, value in rest.items()
        if name not in HARMLESS and value is not None and value is not False
    ]
    if unknown or asked.get("dropout"):
        raise UnsupportedAttentionError(f"its attention takes {', '.join(unknown or ['dropout'])}")
    if window != layer.window:
        raise UnsupportedAttentionError(
            f"its attention sees {window} tokens, its cache {layer.window}"
        )
    return AttentionSpec(
        query.shape[-1] ** -0.5 if scale is None else scale, window, softcap or None, sinks
    )
