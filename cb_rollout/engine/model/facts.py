"""Collect the facts about a model that are constant while its wrappers do not change.

An object that receives a model creates one `ModelFacts` and passes it on. Properties that a user
may change during a run are not included, and are read from the model each time: vocabulary size,
dtype, device, adapters, head and generation config.
"""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The user's model, the transformers model inside, and the arguments of its forward."""

    given: torch.nn.Module
    """The user's model: plain, or wrapped by PEFT, DDP, `torch.compile` or accelerate."""
    module: PreTrainedModel
    """The transformers model inside."""
    outermost: torch.nn.Module
    """The module to call for the forward that the trainer computes; see `trained_forward`."""
    argument_names: frozenset[str]
    """Argument names of the forward of the module's class."""
    takes_any_argument: bool
    """True: the forward accepts and passes on arbitrary keyword arguments."""
    cache_argument: str | None
    """Name of the forward's argument for the cache; None: it takes no cache."""
    split_group: ProcessGroup | None
    """The processes that share the module's layers; None: the layers are not split."""
    is_quantized: bool
    """True: the weights are quantized."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> "ModelFacts":
        """Collect the facts about a model, plain or wrapped.

        Raises:
            ConfigurationError: there is no transformers model inside, or a prompt-learning adapter
                around it.
        """
        module = hf_compat.unwrap(model)
        return cls(
            given=model,
            module=module,
            outermost=hf_compat.trained_forward(model),
            argument_names=hf_compat.forward_argument_names(module),
            takes_any_argument=hf_compat.forward_passes_on(module),
            cache_argument=hf_compat.cache_argument(module),
            split_group=hf_compat.tensor_parallel_group(module),
            is_quantized=hf_compat.is_quantized(module),
        )

    @property
    def name(self) -> str:
        """Return the name of the module's class, for error messages."""
        return type(self.module).__name__

    @property
    def is_split(self) -> bool:
        """Return whether other processes compute parts of each layer in the same forwards."""
        return self.split_group is not None
