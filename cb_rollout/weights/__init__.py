"""Select the module that generates, and keep its weights equal to the trainer's.

`base` and `copied` are the two ways, and `cast_base` is between them; `source` reads weights
wherever a trainer keeps them. `RolloutGenerator` calls `create_weight_sync`.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat import zero3 as zero3_compat
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import Numerics, WeightSync
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.model.precision import rollout_precision
from cb_rollout.errors import ConfigurationError
from cb_rollout.weights.adapters import has_adapters
from cb_rollout.weights.base import SharedWeights, WeightSynchronizer, require_equal
from cb_rollout.weights.cast_base import CastBaseWeights, saves_casts
from cb_rollout.weights.copied import CopiedWeights
from cb_rollout.weights.replica import casts_weights

__all__ = ["WeightSynchronizer", "create_weight_sync", "require_equal"]


def create_weight_sync(
    model: torch.nn.Module, config: RolloutConfig, accelerator: Any = None
) -> WeightSynchronizer:
    """Create the synchronizer that `weight_sync` and the model call for.

    Args:
        model: the training module, wrapped or not.
        config: its `weight_sync` and `rollout_dtype` decide.
        accelerator: the trainer's; gives precision and device.

    Raises:
        ConfigurationError: the model's weights cannot be used as the config says, or at all.
        WeightSyncError: a copy made from the model's config has other tensors than the model.
    """
    module = hf_compat.unwrap(model)
    precision = rollout_precision(config, model, accelerator)
    weight_sync = config.weight_sync
    tensor_parallel_size = _tensor_parallel_size(module, config)
    is_split = hf_compat.tensor_parallel_group(module) is not None
    if is_split and weight_sync == WeightSync.AUTO:
        is_sharded = fsdp_compat.has_fsdp2(model)
        weight_sync = WeightSync.COPY if is_sharded else WeightSync.SHARED
    elif tensor_parallel_size > 1 and not is_split:
        weight_sync = WeightSync.COPY
    if weight_sync == WeightSync.AUTO:
        will_be_sharded = accelerator is not None and zero3_compat.shards_models(accelerator)
        if will_be_sharded or fsdp_compat.is_sharded(model):
            weight_sync = WeightSync.COPY
        elif accelerator is not None and zero3_compat.zero_stage(accelerator) is not None:
            # DeepSpeed casts the module itself, so a copy would save nothing.
            weight_sync = WeightSync.SHARED
        elif saves_casts(module, precision):
            hf_compat.keep_differentiable(module)
            return CastBaseWeights(module, precision)
        else:
            # Merging rounds after the sum, the trainer before it; so adapters stay unmerged.
            is_unmerged = hf_compat.is_quantized(module) or has_adapters(module)
            is_copied = not is_unmerged and casts_weights(module, precision)
            weight_sync = WeightSync.COPY if is_copied else WeightSync.SHARED
    if weight_sync == WeightSync.SHARED:
        hf_compat.keep_differentiable(module)
        return SharedWeights(module, precision.autocast_dtype)
    if config.numerics == Numerics.BITWISE and has_adapters(module):
        raise refused("bitwise, adapter in a copy")
    if hf_compat.is_quantized(module):
        raise refused("copy, quantised")
    device = getattr(accelerator, "device", None)
    return CopiedWeights(model, precision, device, tensor_parallel_size)


def _tensor_parallel_size(module: PreTrainedModel, config: RolloutConfig) -> int:
    """Return the number of processes over which the generating model's layers are split."""
    wanted = config.tensor_parallel_size
    if hf_compat.tensor_parallel_group(module) is not None:
        size: int = module.tp_size or 1
        if wanted not in (1, size):
            raise ConfigurationError(
                f"tensor_parallel_size={wanted}, but the model is split over {size} processes by "
                f"its distributed_config; leave it at 1, or set {size}."
            )
        return size
    if wanted > 1 and config.weight_sync == WeightSync.SHARED:
        raise refused("tensor parallel, shared", size=wanted)
    return wanted
