"""Read PEFT adapters as updates of a plain model's weights, and add them to a model.

The only file that imports peft.

Never merges in place. Refuses adapters that cannot be merged exactly out of place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
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
        A = A.to(dtype)
        B = B.to(dtype)
        if split is not None:
            # Rows of the product are rows of B, its columns are columns of A.
            splits_rows_of_product = (split.dim == 0) != self.is_transposed
            if splits_rows_of_product:
                B = split.part(B, 0)
            else:
                A = split.part(A, 1)
        delta = (B @ A) * self.scaling
        return delta.T if self.is_transposed else delta


def has_adapters(model: torch.nn.Module) -> bool:
    """Return True if any layer runs through PEFT."""
    return any(isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper) for m in model.modules())


def with_identity_adapter(model: PreTrainedModel, layer: str, name: str) -> Any:
    """Return a frozen model with an adapter of one layer that changes nothing."""
    # LoRA's second factor begins as zeros.
    identity = LoraConfig(r=1, target_modules=[layer], task_type="CAUSAL_LM")
    return get_peft_model(model, identity, adapter_name=name).requires_grad_(False)


def add_lora(model: Any, name: str, *, rank: int, alpha: int, layers: Sequence[str]) -> None:
    """Add a LoRA adapter that is not active, drawn from torch's global generator.

    Args:
        model: a `PeftModel`.
        name: the adapter's name, which no other adapter has.
        rank: columns of its factors.
        alpha: the product of the factors is scaled by `alpha / rank`.
        layers: names of the linear layers to adapt.
    """
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=list(layers),
        task_type="CAUSAL_LM",
    )
    model.add_adapter(name, settings)


def adapter_weights(model: Any, name: str) -> dict[str, torch.Tensor]:
    """Return a copy, on the CPU, of the weights of a `PeftModel`'s adapter."""
    weights = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return {key: value.detach().cpu().clone() for key, value in weights.items()}


def write_adapter_weights(model: Any, name: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Write weights that `adapter_weights` returned into an adapter of the same shape."""
    set_peft_model_state_dict(model, dict(weights), adapter_name=name)


def with_adapters(model: PreTrainedModel, config: PeftConfig) -> torch.nn.Module:
    """Return a frozen model with new adapters, its only parameters that train."""
    return get_peft_model(model, config)


def scalings_of(model: torch.nn.Module) -> dict[str, float]:
    """Return the factor of each active adapter, by its layer's name inside the model."""
    scalings: dict[str, float] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        scaling_of_adapter: Any = getattr(layer, "scaling", {})
        for adapter in layer.active_adapters:
            if adapter in scaling_of_adapter:
                scalings[f"{path}.{adapter}"] = float(scaling_of_adapter[adapter])
    return scalings


def wrapped_by_peft(module: Any, adapter: str | None = None) -> torch.nn.Module | None:
    """Return the plain module inside a PEFT module; None: `module` is not a PEFT module.

    Args:
        module: any module.
        adapter: the adapter to treat as the only active one; None: the active adapters count.
    """
    if isinstance(module, ModulesToSaveWrapper):
        if adapter is not None:
            if adapter in module.modules_to_save:
                return module.modules_to_save[adapter]
            return module.original_module
        if module.disable_adapters or not module.active_adapters:
            return module.original_module
        return module.modules_to_save[module.active_adapters[0]]
    if _is_adapted(module):
        return module.base_layer
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise _cannot_merge(type(module).__name__)
    return None


def low_ranks_of(module: Any, adapter: str | None = None) -> tuple[LowRank, ...]:
    """List the updates that the adapters of a PEFT layer add to its base weight.

    Args:
        module: any module.
        adapter: the adapter to treat as the only active one; None: the active adapters count.
    """
    if not _is_adapted(module):
        return ()
    if adapter is not None:
        return _low_ranks(module, [adapter])
    if module.disable_adapters and module.merged:
        # Its next forward unmerges it, in place.
        raise ConfigurationError(
            "an adapter is both merged and disabled: PEFT removes it from the weights in the next "
            "forward, but a copy would keep it; call unmerge_adapter() before the sync."
        )
    if module.disable_adapters or module.merged:
        return ()
    return _low_ranks(module, module.active_adapters)


def _low_ranks(module: Any, adapters: Sequence[str]) -> tuple[LowRank, ...]:
    """List the updates that some adapters of a PEFT layer add to its base weight."""
    if type(module) not in MERGEABLE or _is_adapted(module.base_layer):
        raise _cannot_merge(f"{type(module).__module__}.{type(module).__name__}")
    low_ranks: list[LowRank] = []
    for adapter in adapters:
        if adapter in module.lora_A or adapter in module.lora_embedding_A:
            low_ranks.append(_low_rank(module, adapter))
    return tuple(low_ranks)


def _is_adapted(module: torch.nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer)


def _low_rank(layer: Any, adapter: str) -> LowRank:
    """Return the update of an adapter of a `MERGEABLE` layer."""
    if adapter in layer.lora_variant:
        raise _cannot_merge(type(layer.lora_variant[adapter]).__name__)
    if layer.lora_bias.get(adapter):
        raise _cannot_merge("lora_bias=True")
    if isinstance(layer, lora.Embedding):
        return LowRank(
            A=layer.lora_embedding_A[adapter],
            B=layer.lora_embedding_B[adapter],
            scaling=layer.scaling[adapter],
            is_transposed=True,
        )
    return LowRank(
        A=layer.lora_A[adapter].weight,
        B=layer.lora_B[adapter].weight,
        scaling=layer.scaling[adapter],
        is_transposed=layer.fan_in_fan_out,
    )


def _cannot_merge(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"weight_sync='copy' merges plain LoRA only, not {what}; use 'shared', which runs any "
        "adapter unmerged."
    )
