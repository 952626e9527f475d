"""Select the module that generates, and keep its weights equal to the trainer's.

`base` shares the weights and `copied` copies them; `source` reads them wherever a trainer keeps
them.
`RolloutGenerator` calls `create_weight_sync`.
"""

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import accelerate as accelerate_compat
from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import Numerics, WeightSync
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB
from cb_rollout.engine.memory.training import TrainingMemory
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.model.precision import Precision, rollout_precision
from cb_rollout.errors import ConfigurationError, WeightSyncError, abbreviated, error_text
from cb_rollout.weights.adapters import has_adapters
from cb_rollout.weights.base import SharedWeights, WeightSynchronizer, require_equal
from cb_rollout.weights.copied import CopiedWeights
from cb_rollout.weights.replica import casts_weights, held_dtype

__all__ = ["WeightSynchronizer", "create_weight_sync", "require_equal"]

_LOGGER = logging.getLogger(__name__)


def create_weight_sync(
    model: torch.nn.Module, config: RolloutConfig, accelerator: Any = None, optimizer: Any = None
) -> WeightSynchronizer:
    """Create the weight synchronizer for a training module, wrapped or not, and its settings.

    `accelerator`: the trainer's, which has precision and device. `optimizer`: the model's
        optimizer, its class or known name, to plan memory for its states.

    Raises:
        ConfigurationError: the model's weights cannot be used as the config says, or at all.
        WeightSyncError: a copy made from the model's config does not have the model's tensors.
    """
    facts = ModelFacts.of(model)
    module = facts.module
    precision = rollout_precision(config, model, accelerator)
    weight_sync = config.weight_sync
    tensor_parallel_size = _tensor_parallel_size(facts, config)
    device = getattr(accelerator, "device", None)
    if facts.is_split and weight_sync == WeightSync.AUTO:
        is_sharded = fsdp_compat.has_fsdp2(model)
        weight_sync = WeightSync.COPY if is_sharded else WeightSync.SHARED
    elif tensor_parallel_size > 1 and not facts.is_split:
        weight_sync = WeightSync.COPY
    if weight_sync == WeightSync.AUTO:
        will_be_sharded = accelerator is not None and accelerate_compat.shards_models(accelerator)
        if will_be_sharded or fsdp_compat.is_sharded(model):
            weight_sync = WeightSync.COPY
        elif accelerator is not None and accelerate_compat.zero_stage(accelerator) is not None:
            # DeepSpeed casts the module itself, so a copy would save nothing.
            weight_sync = WeightSync.SHARED
        elif has_adapters(module):
            return _with_adapters(facts, config, precision, optimizer)
        elif _pays_as_copy(facts, precision):
            return _copied_if_possible(facts, precision, device)
        else:
            weight_sync = WeightSync.SHARED
    if weight_sync == WeightSync.SHARED:
        return _shared(facts, precision)
    _require_copyable(facts, config)
    return CopiedWeights(model, precision, device, tensor_parallel_size)


def _shared(facts: ModelFacts, precision: Precision) -> SharedWeights:
    """Share the weights of a training module."""
    hf_compat.keep_differentiable(facts.module)
    return SharedWeights(facts.given, precision.autocast_dtype)


def _require_copyable(facts: ModelFacts, config: RolloutConfig) -> None:
    """Raise `ConfigurationError` if a model's weights cannot be copied."""
    if config.numerics == Numerics.BITWISE and has_adapters(facts.module):
        raise refused("bitwise, adapter in a copy")
    if facts.is_quantized:
        raise refused("copy, quantised")


def _copied_if_possible(
    facts: ModelFacts, precision: Precision, device: torch.device | None
) -> WeightSynchronizer:
    """Copy a model's weights; share them if a copy would compute something else."""
    try:
        return CopiedWeights(facts.given, precision, device)
    except WeightSyncError as error:
        # Only a copy can have weights in a dtype other than the training module's.
        if precision.copy_dtype is not None:
            raise
        _LOGGER.warning("weights: shared, so each step casts them: %s", error)
    return _shared(facts, precision)


def _pays_as_copy(facts: ModelFacts, precision: Precision) -> bool:
    """Return whether a copy saves casts that the training module would make in each step."""
    if facts.is_quantized or not casts_weights(facts.module, precision):
        return False
    changed = _changes_forwards(facts.module)
    # Only a copy can have weights in a dtype other than the training module's.
    if changed and precision.copy_dtype is None:
        _LOGGER.info("weights: shared; a copy would not compute %s", abbreviated(changed))
        return False
    return True


def _changes_forwards(module: PreTrainedModel) -> list[str]:
    """Return the names of modules that a copy would compute differently."""
    return [*torch_compat.own_forwards(module), *torch_compat.own_hooks(module)]


def _with_adapters(
    facts: ModelFacts, config: RolloutConfig, precision: Precision, optimizer: Any
) -> WeightSynchronizer:
    """Merge adapters into a copy if a GPU has room for it; otherwise run them unmerged."""
    module = facts.module
    weights = None
    selection = ""
    # Merged weights are rounded after the sum of base and adapter, the trainer's terms before it.
    if next(module.parameters()).device.type == "cuda" and config.numerics != Numerics.BITWISE:
        try:
            fits, selection = _merged_copy_fits(facts, config, precision, optimizer)
            if fits:
                weights = CopiedWeights(facts.given, precision, None)
        except (ConfigurationError, WeightSyncError) as error:
            selection = f"adapters unmerged ({error_text(error)})"
        _LOGGER.info("weights: %s", selection)
    if weights is None:
        weights = _shared(facts, precision)
    weights.selection = selection
    return weights


def _merged_copy_fits(
    facts: ModelFacts, config: RolloutConfig, precision: Precision, optimizer: Any
) -> tuple[bool, str]:
    """Return whether there is room for a merged copy, and why, as a phrase."""
    module = facts.module
    if facts.is_quantized or _changes_forwards(module):
        return False, "adapters unmerged (hooks, replaced forwards, quantised weights stay as is)"
    if config.num_blocks is not None:
        return False, "adapters unmerged (num_blocks is set); weight_sync='copy' merges them"
    # A tied weight is held once for each dtype of its modules.
    held = {
        (id(p), p.numel() * held_dtype(precision, owner, p.dtype).itemsize, p.nbytes)
        for owner in module.modules()
        for p in owner.parameters(recurse=False)
    }
    added = sum(size for _, size, _ in held) + sum(buffer.nbytes for buffer in module.buffers())
    # In every step, the unmerged model casts the weights that a copy holds cast. Saving these casts
    # is worth their memory.
    cast = sum(size for _, size, own_size in held if size != own_size)
    device = next(module.parameters()).device
    training = TrainingMemory(module, module, device, optimizer, config.training_reserve_gib)
    free = devices.memory_after_release(device).free_bytes - training.bytes_now().reserve
    rooms = f"a copy adds {added / GIB:.3f} GiB where {max(0, free) / GIB:.3f} are free"
    if devices.FREE_PER_COPY * (added - cast) + cast <= free:
        return True, f"adapters merged ({rooms}); weight_sync='shared' runs them unmerged"
    return False, f"adapters unmerged ({rooms}); weight_sync='copy' merges them"


def _tensor_parallel_size(facts: ModelFacts, config: RolloutConfig) -> int:
    """Return the number of processes over which the generating model's layers are split."""
    wanted = config.tensor_parallel_size
    if facts.is_split:
        size: int = facts.module.tp_size or 1
        if wanted not in (1, size):
            raise ConfigurationError(
                f"tensor_parallel_size={wanted}, but the model is split over {size} processes by "
                f"its distributed_config; leave it at 1, or set {size}."
            )
        return size
    if wanted > 1 and config.weight_sync == WeightSync.SHARED:
        raise refused("tensor parallel, shared", size=wanted)
    return wanted
