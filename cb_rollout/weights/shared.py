"""Generate with the training module itself. Copies nothing."""

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat


class SharedWeights:
    """The training module in both roles."""

    is_collective = False

    def __init__(self, model: PreTrainedModel, autocast_dtype: torch.dtype | None) -> None:
        self.module = model
        self.trained: torch.nn.Module = model
        self.autocast_dtype = autocast_dtype

    def follow(self, trained: torch.nn.Module) -> None:
        """Do nothing: a wrapper does not change the module inside."""

    def sync(self) -> int:
        """Return 0: nothing is copied.

        Raises:
            ConfigurationError: the model was sharded meanwhile; no process can run it alone.
        """
        hf_compat.refuse_sharded(self.module)
        return 0

    def differing(self) -> list[str]:
        """Return no name: nothing can differ."""
        return []
