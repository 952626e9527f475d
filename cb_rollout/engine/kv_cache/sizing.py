"""Size the KV cache: what forwards take beside it, and a refusal of a plan without room.

Called once for each engine, and again after the first measured training step.
"""

from dataclasses import replace
from typing import Any

import torch

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB, MemoryPlan, create_memory_plan
from cb_rollout.errors import ConfigurationError, OutOfCacheMemoryError


def workspace_bytes_per_request(vocab_size: int) -> int:
    """Return a row's bytes of float32: logits, these over the temperature, and exponentials."""
    return vocab_size * 4 * 3


def gathered_bytes_per_token(
    layout: CacheLayout, num_heads: int, compute_dtype: torch.dtype
) -> int:
    """Return the bytes that a forward gathers of a layer, for each token of each row's history.

    Where several of a layer's `num_heads` query heads share a key head, transformers' `repeat_kv`
    holds repeated keys and values beside the gathered ones.
    """

    def num_elements(layer: LayerSpec) -> int:
        stored = sum(states.num_elements for states in layer.per_token)
        repeats = num_heads // layer.keys.shape[0] if layer.keys else 0
        if repeats < 2:
            return stored
        repeated = sum(states.num_elements for states in (layer.keys, layer.values) if states)
        return stored + repeats * repeated

    return max(map(num_elements, layout.layers), default=0) * compute_dtype.itemsize


def require_room(plan: MemoryPlan, config: RolloutConfig, device: torch.device) -> MemoryPlan:
    """Return the plan of these settings, where a sequence fits.

    Raises `OutOfCacheMemoryError` if not even one block fits, or a sequence's states, and
    `ConfigurationError` if `num_blocks` are more than the device has memory for.
    """
    if plan.is_fixed and plan.kv_bytes > plan.total_bytes:
        most = plan.total_bytes // plan.bytes_per_block
        advice = f"num_blocks to {most} at most" if most else "block_size"
        raise ConfigurationError(
            f"num_blocks={plan.num_blocks} of block_size={config.block_size} tokens are "
            f"{plan.kv_bytes / GIB:.3f} GiB, and {device} has {plan.total_bytes / GIB:.3f}; "
            f"lower {advice}, or leave it out."
        )
    if plan.has_room:
        return plan
    found = (
        f"of {plan.free_bytes / GIB:.3f} GiB free, training will take "
        f"{plan.training.reserve / GIB:.3f}, a forward {plan.forward_bytes / GIB:.3f}, and a "
        f"block of {config.block_size} tokens {plan.bytes_per_block / GIB:.3f}"
    )
    # The likeliest settings to leave no memory come first.
    defaults: dict[str, dict[str, Any]] = {
        "block_size": {"block_size": RolloutConfig.block_size},
        "max_requests_per_batch": {"max_requests": devices.max_requests_per_batch(device)},
        "max_batch_tokens": {"max_batch_tokens": devices.max_batch_tokens(device)},
        "training_reserve_gib": {"training": replace(plan.training, set_reserve=None)},
        "max_memory_percent": {"max_memory_percent": RolloutConfig.max_memory_percent},
    }
    for name, numbers in defaults.items():
        value, default = getattr(config, name), getattr(RolloutConfig, name)
        if value != default and (other := create_memory_plan(replace(plan, **numbers))).has_room:
            turn = "raise" if name == "max_memory_percent" else "lower"
            raise OutOfCacheMemoryError(
                f"no memory for a KV cache under {name}={value!r}: {found}; {turn} {name}: with "
                f"{default!r} there would be {other.num_blocks} blocks.\n{plan}"
            )
    raise OutOfCacheMemoryError(
        f"no memory for a KV cache: {found}; raise max_memory_percent, lower training_reserve_gib, "
        f"max_batch_tokens or max_requests_per_batch, or free some on {device}.\n{plan}"
    )
