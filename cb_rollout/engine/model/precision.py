"""Choose the dtype of a rollout, by default the one that the trainer's own forward computes in."""

from typing import Any, NamedTuple

import torch

from cb_rollout.compat import accelerate as accelerate_compat
from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.compat import torch as torch_compat
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import RolloutDtype, WeightSync
from cb_rollout.config.rollout import (
    GENERATOR_FIELDS,
    TRAINER_FIELDS,
    RolloutConfig,
    require_unused,
)
from cb_rollout.errors import ConfigurationError

# accelerate's names; its others ("no", "fp8") leave the forward as it is.
MIXED_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision(NamedTuple):
    """The dtypes of a rollout's forwards and weights."""

    autocast_dtype: torch.dtype | None
    """Run forwards under autocast to this dtype; None: without autocast."""
    copy_dtype: torch.dtype | None
    """Store every parameter of a copy in this dtype; None: as `autocast_dtype` implies."""


def rollout_precision(config: RolloutConfig, model: torch.nn.Module, accelerator: Any) -> Precision:
    """Return a rollout's precision; `ConfigurationError`: a copy of the weights is needed."""
    word = "no" if accelerator is None else accelerator.mixed_precision
    trainers_autocast = MIXED_PRECISION.get(word)
    is_deepspeed = accelerator is not None and accelerate_compat.zero_stage(accelerator) is not None
    if config.rollout_dtype == RolloutDtype.AUTO:
        if is_deepspeed:
            # DeepSpeed casts the module itself, and runs it without autocast.
            return Precision(None, trainers_autocast)
        plugin = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
        policy = getattr(plugin, "mixed_precision_policy", None)
        sharded = getattr(policy, "param_dtype", None) or fsdp_compat.fsdp_param_dtype(model)
        return Precision(trainers_autocast, sharded)
    wanted: torch.dtype = getattr(torch, config.rollout_dtype)
    own = torch_compat.compute_dtype(model)
    if trainers_autocast is None and wanted == own:
        return Precision(None, None)
    if wanted == trainers_autocast or (trainers_autocast is None and own == torch.float32):
        return Precision(wanted, None)
    if config.weight_sync == WeightSync.COPY:
        return Precision(None, wanted)
    if trainers_autocast is not None:
        raise refused(
            "rollout dtype, autocast", value=repr(config.rollout_dtype), precision=repr(word)
        )
    raise ConfigurationError(
        f"rollout_dtype={config.rollout_dtype!r} differs from the dtype of the model's weights, "
        f"{own}; use 'auto', or weight_sync='copy'."
    )


def autocast_alone(config: RolloutConfig, model: torch.nn.Module) -> torch.dtype | None:
    """Return a lone manager's autocast dtype or None; refuse generators' and trainers' settings."""
    needs_trainer = "a manager alone has no trainer; use cb_rollout.attach(trainer, config)"
    require_unused(config, TRAINER_FIELDS, needs_trainer)
    needs_generator = "a manager alone syncs no weights; use a RolloutGenerator, and its .manager"
    require_unused(config, GENERATOR_FIELDS, needs_generator)
    return rollout_precision(config, model, None).autocast_dtype
