"""Store recurrent and convolution states of fixed size, in a table with a row for each sequence.

They are gathered before a forward and stored after it, never shared or paged: a fork copies them.
Where a model takes no transformers `Cache`, `OpaqueStateAdapter` moves them. B: rows.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionLayer

from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.errors import ConfigurationError


class RecurrentLayer(LinearAttentionLayer):
    """Convolution and recurrent states of a layer."""

    def __init__(self, states: LayerSpec, num_table_rows: int, device: torch.device) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=len(states.conv))
        self.states: dict[str, Sequence[Any]] = {
            "conv_states": _zeros(states.conv, num_table_rows, device),
            "recurrent_states": _zeros(states.recurrent, num_table_rows, device),
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the states of all table rows, a tensor for each state that the layer uses."""
        tensors: list[torch.Tensor] = []
        for states in self.states.values():
            tensors += (tensor for tensor in states if tensor is not None)
        return tensors

    def load(self, table_rows_B: torch.Tensor | None) -> None:
        """Gather the rows' states for the coming forward; None: the rows have no history."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        if table_rows_B is None:
            return
        for name, all_states in self.states.items():
            setattr(self, name, self._gathered(all_states, table_rows_B))
            for index, states in enumerate(all_states):
                if states is not None:
                    getattr(self, f"is_{name}_initialized")[index] = True
                    if name == "conv_states":
                        self.conv_kernel_size[index] = states.shape[-1]
                self.has_previous_state[index] = True

    def _gathered(
        self, all_states: Sequence[Any], table_rows_B: torch.Tensor
    ) -> dict[int, torch.Tensor | None]:
        gathered: dict[int, torch.Tensor | None] = {}
        for index, states in enumerate(all_states):
            gathered[index] = None
            if states is not None:
                gathered[index] = states.index_select(0, table_rows_B)
        return gathered

    def save(self, table_rows_B: torch.Tensor) -> None:
        for name, all_states in self.states.items():
            for index, states in enumerate(all_states):
                if states is not None:
                    states.index_copy_(0, table_rows_B, getattr(self, name)[index])


def _zeros(
    specs: Sequence[TensorSpec | None], num_table_rows: int, device: torch.device
) -> list[torch.Tensor | None]:
    """Return the states of all table rows before any forward; None for each unused state."""
    tensors: list[torch.Tensor | None] = []
    for spec in specs:
        if spec is None:
            tensors.append(None)
        else:
            shape = (num_table_rows, *spec.shape)
            tensors.append(torch.zeros(shape, dtype=spec.dtype, device=device))
    return tensors


# More than one, to tell a tensor with a row for each sequence from one that all share.
PROBE_ROWS = 2


class OpaqueStateAdapter:
    """Move recurrent states out of and into the object in which a model returns them.

    The object nests tensors. Those whose first dimension is the rows are states; the others are
    constants.
    """

    def __init__(self, short: object, long: object) -> None:
        """Read the states' shapes from two of the model's objects.

        Forwards of `PROBE_ROWS` rows returned them: `short` of one token, `long` of several. Raises
        `ConfigurationError` if there are no states, or they grow with the tokens.
        """
        self._template = long
        states = _states(short)
        later = _states(long)
        if not states or [s.shape for s in states] != [s.shape for s in later]:
            raise ConfigurationError(
                f"the model keeps its past in {type(long).__name__}, which is neither a "
                "transformers Cache nor of fixed size; use model.generate for this model."
            )
        specs = tuple(TensorSpec(tuple(tensor.shape[1:]), tensor.dtype) for tensor in later)
        no_convolutions = (None,) * len(specs)
        layer = LayerSpec(conv=no_convolutions, recurrent=specs)
        self.layout = CacheLayout((layer,))

    def inserted(self, layer: RecurrentLayer) -> object:
        """Return the rows' states in an object as the model takes it; None: there is no history."""
        if not layer.has_previous_state[0]:
            return None
        remaining = iter([s for s in layer.recurrent_states.values() if s is not None])

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            return next(remaining) if _is_state(tensor) else tensor.clone()

        return _mapped(self._template, taken)

    def extract(self, layer: RecurrentLayer, returned: object, num_rows: int) -> None:
        for index, states in enumerate(_states(returned, num_rows)):
            layer.recurrent_states[index] = states


def _is_state(tensor: torch.Tensor, num_rows: int = PROBE_ROWS) -> bool:
    return tensor.dim() > 1 and tensor.shape[0] == num_rows


def _states(nest: object, num_rows: int = PROBE_ROWS) -> list[torch.Tensor]:
    """Return the states that are nested in the result of a forward of so many rows."""
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    _mapped(nest, collect)
    return [tensor for tensor in tensors if _is_state(tensor, num_rows)]


def _mapped(nest: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of the nest with the function applied to every tensor."""
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, list | tuple):
        return type(nest)([_mapped(item, function) for item in nest])
    if isinstance(nest, dict):
        return {key: _mapped(item, function) for key, item in nest.items()}
    if isinstance(nest, PreTrainedConfig) or not hasattr(nest, "__dict__"):
        return nest
    made = copy.copy(nest)
    vars(made).update({name: _mapped(value, function) for name, value in vars(nest).items()})
    return made
