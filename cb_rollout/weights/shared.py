"""The training module itself generates: nothing is copied, nothing can differ."""

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat


class SharedWeights:
    """One module in both roles."""

    is_collective = False

    def __init__(self, model: PreTrainedModel, autocast_dtype: torch.dtype | None) -> None:
        """Generate with the training module."""
        self.module = model
        self.trained: torch.nn.Module = model
        self.autocast_dtype = autocast_dtype

    def follow(self, trained: torch.nn.Module) -> None:
        """A wrapper changes nothing of the module inside."""

    def sync(self) -> int:
        """Nothing to copy.

        Raises:
            ConfigurationError: the model was sharded since; no process can run it alone any more.
        """
        hf_compat.refuse_sharded(self.module)
        return 0

    def differing(self) -> list[str]:
        """Nothing can differ."""
        return []
