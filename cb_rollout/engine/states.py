"""Recurrent and convolution states: of fixed size, one slot a sequence.

They are gathered for a forward and put back after it. Neither shared nor paged: a fork copies them.

B: rows.
"""

import torch
from transformers.cache_utils import LinearAttentionLayer

from cb_rollout.engine.probe import LayerStates, StateShape


class StateLayer(LinearAttentionLayer):
    """Convolution and recurrent states of one layer, one slot a sequence."""

    def __init__(self, states: LayerStates, num_slots: int, device: torch.device) -> None:
        """Allocate `num_slots` slots."""
        LinearAttentionLayer.__init__(self, number_of_states=len(states.conv))
        self.slots = {
            "conv_states": [_slots(shape, num_slots, device) for shape in states.conv],
            "recurrent_states": [_slots(shape, num_slots, device) for shape in states.recurrent],
        }

    def load(self, slots_B: torch.Tensor | None) -> None:
        """Hold the rows' states for the coming forward; None: the rows start anew."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        if slots_B is None:
            return
        for name, all_slots in self.slots.items():
            for index, states in enumerate(all_slots):
                if states is not None:
                    getattr(self, name)[index] = states.index_select(0, slots_B)
                    getattr(self, f"is_{name}_initialized")[index] = True
                    if name == "conv_states":
                        self.conv_kernel_size[index] = states.shape[-1]
                self.has_previous_state[index] = True

    def save(self, slots_B: torch.Tensor) -> None:
        """Put the rows' states back after the forward."""
        for name, all_slots in self.slots.items():
            for index, states in enumerate(all_slots):
                if states is not None:
                    states.index_copy_(0, slots_B, getattr(self, name)[index])


def _slots(shape: StateShape | None, num_slots: int, device: torch.device) -> torch.Tensor | None:
    if shape is None:
        return None
    return torch.zeros(num_slots, *shape.shape, dtype=shape.dtype, device=device)
