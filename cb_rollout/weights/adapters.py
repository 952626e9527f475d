"""Read PEFT adapters as updates of a plain model's weights, and add them to a model.

The only file that imports peft.

Never merges in place. Refuses adapters that cannot be merged exactly out of place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from transformers import PreTrainedModel

from cb_rollout.compat.tensor_parallel import Split
from cb_rollout.errors import ConfigurationError

# Layers of peft 0.21 whose forward is that of one weight, base + scaling * B @ A.
MERGEABLE = (lora.Linear, lora.Embedding)


@dataclass(frozen=True)
class LowRank:
    """The update that one adapter adds to a weight: `scaling * (B @ A)`."""

    A: torch.Tensor
    B: torch.Tensor
    scaling: float
    is_transposed: bool
    """True: add the product transposed, as embeddings and GPT-2's layers store weights."""

    def delta(
        self, A: torch.Tensor, B: torch.Tensor, dtype: torch.dtype, split: Split | None
    ) -> torch.Tensor:
        """Compute the update from the whole factors, in `dtype`, or this process's part of it."""
        A, B = A.to(dtype), B.to(dtype)
        if split is not None and (split.dim == 0) != self.is_transposed:
            B = split.part(B, 0)
        elif split is not None:
            A = split.part(A, 1)
        delta = (B @ A) * self.scaling
        return delta.T if self.is_transposed else delta


def has_adapters(model: torch.nn.Module) -> bool:
    """Return True if any layer runs through PEFT."""
    return any(isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper) for m in model.modules())


def with_adapters(model: PreTrainedModel, config: PeftConfig) -> torch.nn.Module:
    """Return a frozen model with new adapters, its only parameters that train."""
    return get_peft_model(model, config)


def scalings_of(model: torch.nn.Module) -> dict[str, float]:
    """Return the factor of each active adapter, by its layer's name inside the model."""
    layers: Any = [(path, m) for path, m in model.named_modules() if _is_adapted(m)]
    return {
        f"{path}.{name}": float(layer.scaling[name])
        for path, layer in layers
        for name in layer.active_adapters
        if name in getattr(layer, "scaling", ())
    }


def wrapped_by_peft(module: Any) -> torch.nn.Module | None:
    """Return the plain module inside a PEFT module; None: `module` is no PEFT module."""
    if isinstance(module, ModulesToSaveWrapper):
        if module.disable_adapters or not module.active_adapters:
            return module.original_module
        return module.modules_to_save[module.active_adapters[0]]
    if _is_adapted(module):
        return module.base_layer
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise _cannot_merge(type(module).__name__)
    return None


def low_ranks_of(module: Any) -> tuple[LowRank, ...]:
    """List the updates that the active adapters of a PEFT layer add to its base weight."""
    if not _is_adapted(module):
        return ()
    if module.disable_adapters and module.merged:
        # Its next forward unmerges it, in place.
        raise ConfigurationError(
            "an adapter is merged and disabled: PEFT takes it out of the weights in the next "
            "forward, and a copy would keep it; call unmerge_adapter() before the sync."
        )
    if module.disable_adapters or module.merged:
        return ()
    if type(module) not in MERGEABLE or _is_adapted(module.base_layer):
        raise _cannot_merge(f"{type(module).__module__}.{type(module).__name__}")
    return tuple(
        _low_rank(module, name)
        for name in module.active_adapters
        if name in module.lora_A or name in module.lora_embedding_A
    )


def _is_adapted(module: torch.nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer)


def _low_rank(layer: Any, name: str) -> LowRank:
    if name in layer.lora_variant:
        raise _cannot_merge(type(layer.lora_variant[name]).__name__)
    if layer.lora_bias.get(name):
        raise _cannot_merge("lora_bias=True")
    if isinstance(layer, lora.Embedding):
        A, B = layer.lora_embedding_A[name], layer.lora_embedding_B[name]
        return LowRank(A, B, layer.scaling[name], is_transposed=True)
    A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
    return LowRank(A, B, layer.scaling[name], is_transposed=layer.fan_in_fan_out)


def _cannot_merge(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"weight_sync='copy' merges plain LoRA only, not {what}; use 'shared', which runs any "
        "adapter unmerged."
    )
