"""Give a model its cache of a decode step: layers that hand new keys and values to a kernel.

A layer returns the new key and value as they came. The attention function, called with that very
key, has the kernels write them to the pages and read the row's history. Nothing is gathered, no
mask is made, and every shape is known before the step. Called by the thread that runs the step.

B: rows, V: vocabulary, H: query heads, K: key heads, D: size of a key, E: size of a value.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.moe import GroupedProduct, replacing_grouped_product
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec
from cb_rollout.engine.kv_cache.recurrent import RecurrentLayer

# Arguments of attention functions that change nothing about one new token a row.
HARMLESS_ARGUMENTS = {
    *("cache", "cache_position", "dropout", "is_causal", "labels", "layer_idx"),
    *("num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache"),
}


class UnsupportedAttentionError(Exception):
    """A layer asks for attention that no kernel computes."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer, beyond the plain softmax."""

    scale: float
    window: int | None = None
    """Newest tokens that are seen; None: all."""
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None
    """A score for each head that takes its share of the softmax and gives no value."""


def unsupported_states(
    layout: CacheLayout | None, dtypes: Collection[torch.dtype], max_head_size: int | None = None
) -> str | None:
    """Name the first keys or values that a kernel does not take; None: it takes all of them."""
    layers = () if layout is None else layout.layers
    for states in (states for layer in layers for states in layer.per_token):
        if max_head_size is not None and states.shape[1] > max_head_size:
            return f"heads of {states.shape[1]} are larger than {max_head_size}"
        if states.dtype not in dtypes:
            return f"keys are {states.dtype}"
    return None


class DecodeLayer(CacheLayerMixin):
    """One attention layer, in decode steps."""

    def __init__(self, index: int, states: LayerSpec, device: torch.device) -> None:
        super().__init__()
        assert states.keys
        assert states.values
        self.is_initialized = True
        self.keys = self.values = torch.empty(0, device=device)
        self.index, self.window = index, states.window
        self.num_key_heads, self.key_size = states.keys.shape
        self.value_size = states.values.shape[1]
        self.key_dtype, self.value_dtype = states.keys.dtype, states.values.dtype
        self.new_states: tuple[torch.Tensor, torch.Tensor] | None = None
        """The last update's key and value, by which the attention function finds its layer."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.new_states = key_states, value_states
        return self.new_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # The kernels read no mask.
        return query_length, 0

    def get_seq_length(self) -> int:
        # `position_ids` alone say where a token stands.
        return 0

    def get_max_length(self) -> int:
        return -1


PagedAttention = Callable[
    [DecodeLayer, torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], torch.Tensor
]
"""Write each row's new key and value, then attend over the row's history, in one decode step.

Takes the layer that attends, a query `[B, H, 1, D]`, a key `[B, K, 1, D]` and a value
`[B, K, 1, E]`; returns `[B, 1, H, E]`, in the dtype of the pages of values. Raises
`UnsupportedAttentionError` for what the kernels do not compute.
"""


class DecodeCache(Cache):
    """The paged cache, as a model sees it in decode steps of a backend."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        self.paged = [
            DecodeLayer(index, states, device)
            for index, states in enumerate(layout.layers)
            if states.keys
        ]
        layers: list[Any] = [hf_compat.DummyLayer() for _ in layout.layers]
        for layer in self.paged:
            layers[layer.index] = layer
        super().__init__(layers=layers)
        self.device = device
        self.is_recurrent = layout.is_recurrent
        self._attend: PagedAttention | None = None

    def mask(self, tokens_B1: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a decode step."""
        # Models take a mask of four dimensions as it is, and the kernels ignore it; recurrent
        # layers would read it.
        return None if self.is_recurrent else tokens_B1.new_ones(tokens_B1.shape[0], 1, 1, 1)

    @contextmanager
    def attending(self, inputs: "DecodeInputs") -> Iterator[None]:
        """Have a forward with this cache attend over the pages of these inputs."""
        for layer in self.paged:
            layer.new_states = None
        layers, recurrent = self.layers, inputs.recurrent
        self.layers = [recurrent.get(index, layer) for index, layer in enumerate(layers)]
        self._attend = inputs.attend
        for layer in recurrent.values():
            layer.load(inputs.table_rows_B)
        try:
            product = inputs.grouped_product
            with (
                hf_compat.replacing_attention(self._attend_to_pages),
                replacing_grouped_product(product) if product else nullcontext(),
            ):
                yield
            for layer in recurrent.values():
                layer.save(inputs.table_rows_B.long())
        finally:
            # A reference kept here would keep released pages and states alive.
            self._attend, self.layers = None, layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def _attend_to_pages(
        self,
        own_attention: Callable[..., Any],
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend over the pages, in place of the attention function that the model looked up.

        Raises:
            UnsupportedAttentionError: the layer asks for what the kernels do not compute.
        """
        assert self._attend is not None, "the cache was used outside a step"
        layer = next((x for x in self.paged if x.new_states and x.new_states[0] is key), None)
        if layer is None:
            if any(layer.new_states for layer in self.paged):
                raise UnsupportedAttentionError("its attention changes the keys that it caches")
            return own_attention(module, query, key, value, attention_mask, **arguments)
        layer.new_states = None
        if attention_mask is not None and attention_mask.shape[1:] != (1, 1, 1):
            raise UnsupportedAttentionError("its attention makes a mask of its own")
        spec = _spec(query, layer, arguments)
        return self._attend(layer, query, key, value, spec), None


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode forward: one new token of each row, and the attention over its pages."""

    cache: DecodeCache
    """Passed to the model as its cache."""
    attend: PagedAttention
    tokens_B1: torch.Tensor
    positions_B1: torch.Tensor
    table_rows_B: torch.Tensor
    """Integers: each row's index into the recurrent states."""
    recurrent: Mapping[int, RecurrentLayer] = field(default_factory=dict)
    """The layers with recurrent states, by their index."""
    grouped_product: GroupedProduct | None = None
    """Multiplies experts where torch's own product would wait; None: torch's own."""


def _spec(query: torch.Tensor, layer: DecodeLayer, arguments: dict[str, Any]) -> AttentionSpec:
    """Read a layer's attention from the arguments of its attention function."""
    rest = dict(arguments)
    scale = rest.pop("scaling", None)
    window, softcap, sinks = (rest.pop(n, None) for n in ("sliding_window", "softcap", "s_aux"))
    unknown = [
        name
        for name, value in rest.items()
        if name not in HARMLESS_ARGUMENTS and value is not None and value is not False
    ]
    if unknown or arguments.get("dropout"):
        raise UnsupportedAttentionError(f"its attention takes {', '.join(unknown or ['dropout'])}")
    if window != layer.window:
        raise UnsupportedAttentionError(
            f"its attention sees {window} tokens, its cache {layer.window}"
        )
    return AttentionSpec(
        query.shape[-1] ** -0.5 if scale is None else scale, window, softcap or None, sinks
    )
