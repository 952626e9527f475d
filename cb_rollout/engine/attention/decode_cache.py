"""Give a model its cache for a decode step: layers that hand new keys and values to a kernel.

A layer returns the new key and value unchanged. The attention function, called with that very
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

# Arguments of attention functions that change nothing about one new token per row.
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
    if layout is None:
        return None
    for layer in layout.layers:
        for states in layer.per_token:
            head_size = states.shape[1]
            if max_head_size is not None and head_size > max_head_size:
                return f"heads of {head_size} are larger than {max_head_size}"
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
        nothing = torch.empty(0, device=device)
        self.keys = nothing
        self.values = nothing
        self.index = index
        self.window = states.window
        self.num_key_heads, self.key_size = states.keys.shape
        self.value_size = states.values.shape[1]
        self.key_dtype = states.keys.dtype
        self.value_dtype = states.values.dtype
        self.new_states: tuple[torch.Tensor, torch.Tensor] | None = None
        """The last update's key and value, by which the attention function finds its layer."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new_states = (key_states, value_states)
        self.new_states = new_states
        return new_states

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
        self.paged: list[DecodeLayer] = []
        layers: list[Any] = []
        for index, states in enumerate(layout.layers):
            if states.keys:
                layer = DecodeLayer(index, states, device)
                self.paged.append(layer)
                layers.append(layer)
            else:
                layers.append(hf_compat.DummyLayer())
        super().__init__(layers=layers)
        self.device = device
        self.is_recurrent = layout.is_recurrent
        self._attend: PagedAttention | None = None

    def mask(self, tokens_B1: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a decode step, `[B, 1, 1, 1]`, or None."""
        if self.is_recurrent:
            # Recurrent layers would read it.
            return None
        # Models take a mask of four dimensions as it is, and the kernels ignore it.
        return tokens_B1.new_ones(tokens_B1.shape[0], 1, 1, 1)

    @contextmanager
    def attending(self, inputs: "DecodeInputs") -> Iterator[None]:
        """Make a forward with this cache attend over the pages of these inputs."""
        for layer in self.paged:
            layer.new_states = None
        own_layers = self.layers
        recurrent = inputs.recurrent
        self.layers = [recurrent.get(index, layer) for index, layer in enumerate(own_layers)]
        self._attend = inputs.attend
        for layer in recurrent.values():
            layer.load(inputs.table_rows_B)
        product = inputs.grouped_product
        try:
            with (
                hf_compat.replacing_attention(self._attend_to_pages),
                replacing_grouped_product(product) if product else nullcontext(),
            ):
                yield
            for layer in recurrent.values():
                layer.save(inputs.table_rows_B.long())
        finally:
            # A reference kept here would keep released pages and states alive.
            self._attend = None
            self.layers = own_layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def layer_of(self, key: torch.Tensor) -> DecodeLayer | None:
        """Return the layer whose last update returned this very key; None: there is none."""
        for layer in self.paged:
            if layer.new_states and layer.new_states[0] is key:
                return layer
        return None

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

        Args:
            own_attention: the function that the model looked up.
            module: the attention layer.
            query: `[B, H, 1, D]`.
            key: `[B, K, 1, D]`, as the layer's cache returned it.
            value: `[B, K, 1, E]`.
            attention_mask: that of `mask`, or None.
            arguments: further arguments of the attention function.

        Returns:
            The outputs, `[B, 1, H, E]`, and no weights.

        Raises:
            UnsupportedAttentionError: the layer asks for what the kernels do not compute.
        """
        assert self._attend is not None, "the cache was used outside a step"
        layer = self.layer_of(key)
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
    window = rest.pop("sliding_window", None)
    softcap = rest.pop("softcap", None)
    sinks_H = rest.pop("s_aux", None)
    unknown: list[str] = []
    for name, value in rest.items():
        is_given = value is not None and value is not False
        if is_given and name not in HARMLESS_ARGUMENTS:
            unknown.append(name)
    if unknown or arguments.get("dropout"):
        raise UnsupportedAttentionError(f"its attention takes {', '.join(unknown or ['dropout'])}")
    if window != layer.window:
        raise UnsupportedAttentionError(
            f"its attention sees {window} tokens, its cache {layer.window}"
        )
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return AttentionSpec(scale=scale, window=window, softcap=softcap or None, sinks_H=sinks_H)
