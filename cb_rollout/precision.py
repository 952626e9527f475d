"""What a rollout computes in, so that it is what the trainer's own forward computes in."""

from typing import Any

import torch
from transformers import PreTrainedModel

from cb_rollout import _compat
from cb_rollout.config import RolloutConfig
from cb_rollout.errors import ConfigurationError

MIXED_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
# accelerate's words; its others ("no", "fp8") leave the forward as it is.


def autocast_dtype(
    config: RolloutConfig, model: PreTrainedModel, accelerator: Any
) -> torch.dtype | None:
    """What to autocast a rollout's forwards to; None: nothing.

    Raises:
        ConfigurationError: `rollout_dtype` asks for what the model's own weights cannot give.
    """
    if config.rollout_dtype == "auto":
        return None if accelerator is None else MIXED_PRECISION.get(accelerator.mixed_precision)
    if accelerator is not None and accelerator.mixed_precision in MIXED_PRECISION:
        wanted_word = {"bf16": "bfloat16", "fp16": "float16"}[accelerator.mixed_precision]
        if config.rollout_dtype != wanted_word:
            raise ConfigurationError(
                f"rollout_dtype={config.rollout_dtype!r} under accelerate's mixed precision "
                f"{accelerator.mixed_precision!r}, in which the model's forward computes whoever "
                "calls it; use 'auto'."
            )
    wanted: torch.dtype = getattr(torch, config.rollout_dtype)
    held = _compat.compute_dtype(model)
    if wanted == held:
        return None
    if held != torch.float32:
        raise ConfigurationError(
            f"rollout_dtype={config.rollout_dtype!r} needs other weights than the model's {held}; "
            "use 'auto', or load the model in float32."
        )
    return wanted
