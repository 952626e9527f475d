"""Move recurrent states in a decode step, from and to tables that kernels find by address.

A layer's states are loaded when it first reads one. They are saved when another layer loads its
own, or when the forward ends. So a step holds the states of one layer at a time, and a forward that
raises leaves some states already updated. Imports Triton, so nothing imports it at the top. Called
by the thread that runs a decode step or captures a CUDA graph.
"""

from collections.abc import Callable, Sequence
from itertools import count

import torch
from transformers.cache_utils import LinearAttentionLayer

from cb_rollout.engine.attention.shared_prefix import AttentionMetadata
from cb_rollout.engine.attention.triton.launch import StateTable, move_states
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.engine.kv_cache.recurrent import RecurrentLayer


class LoadedStates(dict[int, torch.Tensor | None]):
    """The states of a step's rows, by index in the layer; the first read loads them."""

    def __init__(
        self, tables: Sequence[StateTable | None], load: Callable[[StateTable], torch.Tensor]
    ) -> None:
        super().__init__()
        self._tables = tables
        self._load = load

    def __missing__(self, index: int) -> torch.Tensor | None:
        table = self._tables[index]
        states = None if table is None else self._load(table)
        self[index] = states
        return states


class AddressedLayer(RecurrentLayer):
    """A layer's states in one decode step."""

    def __init__(
        self,
        spec: LayerSpec,
        numbers: count,
        metadata: AttentionMetadata,
        loaded: list["AddressedLayer"],
    ) -> None:
        """Take the next numbers of tables; `loaded`: the step's layer that holds states now."""
        LinearAttentionLayer.__init__(self, number_of_states=len(spec.conv))
        # In the order of `PagedCache.addresses`.
        self.states = {
            "conv_states": _tables(spec.conv, numbers),
            "recurrent_states": _tables(spec.recurrent, numbers),
        }
        self._metadata = metadata
        self._loaded = loaded

    def _gathered(
        self, all_states: Sequence[StateTable | None], table_rows_B: torch.Tensor
    ) -> LoadedStates:
        return LoadedStates(all_states, self._load)

    def _load(self, table: StateTable) -> torch.Tensor:
        if self._loaded != [self]:
            for layer in self._loaded:
                layer.save()
            self._loaded[:] = [self]
        return move_states(table, self._metadata)

    def save(self, table_rows_B: torch.Tensor | None = None) -> None:
        """Save the loaded states; the next read loads them again."""
        for name, tables in self.states.items():
            loaded = getattr(self, name)
            for index, states in loaded.items():
                if states is not None:
                    move_states(tables[index], self._metadata, states)
            loaded.clear()


def _tables(specs: Sequence[TensorSpec | None], numbers: count) -> list[StateTable | None]:
    """Return a table for each state of a layer, numbered from the next free number."""
    tables: list[StateTable | None] = []
    for spec in specs:
        if spec is None:
            tables.append(None)
        else:
            tables.append(StateTable(spec.shape, spec.dtype, next(numbers)))
    return tables


def addressed_layers(layout: CacheLayout, metadata: AttentionMetadata) -> dict[int, RecurrentLayer]:
    """Return a decode step's layers with recurrent states, by index."""
    numbers = count(2 * len(layout.layers) + 2)
    loaded: list[AddressedLayer] = []
    layers: dict[int, RecurrentLayer] = {}
    for index, spec in enumerate(layout.layers):
        if spec.is_recurrent:
            layers[index] = AddressedLayer(spec, numbers, metadata, loaded)
    return layers
