"""Size the KV cache: choose the dtypes of its pages, and refuse a plan without room.

Called once for each engine, and again after the first measured training step.
"""

from dataclasses import replace
from typing import Any

import torch

from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import KvDtype
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec
from cb_rollout.engine.kv_cache.paged import float8_layout
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB, MemoryPlan, create_memory_plan
from cb_rollout.errors import ConfigurationError, OutOfCacheMemoryError

# Of every row at once: the logits, these over their temperature, and their exponentials.
FLOAT32_LOGITS = 3


def workspace_bytes_per_request(vocab_size: int) -> int:
    """Return the bytes of a forward for each row: of its logits."""
    return vocab_size * 4 * FLOAT32_LOGITS


def page_layout(layout: CacheLayout, config: RolloutConfig, device: torch.device) -> CacheLayout:
    """Return the layout with the dtypes that pages have under `kv_dtype`.

    Raises:
        ConfigurationError: `kv_dtype` or `cpu_offload_gib` cannot be honoured.
    """
    if config.cpu_offload_gib and layout.is_recurrent:
        raise refused("offload, recurrent", value=config.cpu_offload_gib)
    if config.kv_dtype == KvDtype.AUTO:
        return layout
    if not devices.has_float8(device):
        raise ConfigurationError(
            f"kv_dtype={config.kv_dtype!r} needs a device that computes with it, an NVIDIA GPU of "
            f"compute capability 8.9 or later, and the model is on {device}; leave it at 'auto'."
        )
    if not layout.has_keys:
        raise refused("kv dtype, no keys", value=repr(config.kv_dtype))
    return float8_layout(layout)


def max_requests_per_batch(config: RolloutConfig, device: torch.device) -> int:
    """Return the most sequences decoded together, unless their states take too much memory."""
    return config.max_requests_per_batch or devices.max_requests_per_batch(device)


def gathered_bytes_per_token(
    layout: CacheLayout, num_heads: int, compute_dtype: torch.dtype
) -> int:
    """Return the bytes that a forward gathers of one layer, for each token of each row's history.

    Attention with several queries for each key head first repeats the gathered keys and values for
    each of them (`repeat_kv` in transformers), and holds both.

    Args:
        layout: tensors that the layers store.
        num_heads: query heads of a layer; 0: not known.
        compute_dtype: dtype of the gathered tensors.
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

    Raises:
        OutOfCacheMemoryError: not even one block fits, or one sequence's states.
        ConfigurationError: `num_blocks` are more than the device has memory for.
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
        f"{plan.training_reserve_bytes / GIB:.3f}, a forward {plan.forward_bytes / GIB:.3f}, and a "
        f"block of {config.block_size} tokens {plan.bytes_per_block / GIB:.3f}"
    )
    for name, (turn, numbers) in _defaults(plan, device).items():
        value, default = getattr(config, name), getattr(RolloutConfig, name)
        if value == default:
            continue
        other = create_memory_plan(replace(plan, **numbers))
        if other.has_room:
            raise OutOfCacheMemoryError(
                f"no memory for a KV cache under {name}={value!r}: {found}; {turn} {name}: with "
                f"{default!r} there would be {other.num_blocks} blocks.\n{plan}"
            )
    raise OutOfCacheMemoryError(
        f"no memory for a KV cache: {found}; raise max_memory_percent, lower training_reserve_gib, "
        f"max_batch_tokens or max_requests_per_batch, or free some on {device}.\n{plan}"
    )


def _defaults(plan: MemoryPlan, device: torch.device) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return settings that may leave no memory, the likeliest first, how to turn each, its default.

    The default is the plan's number that follows from it.
    """
    unreserved = replace(plan.training, set_reserve=None)
    percent = RolloutConfig.max_memory_percent
    return {
        "block_size": ("lower", {"block_size": RolloutConfig.block_size}),
        "max_requests_per_batch": (
            "lower",
            {"max_requests": devices.max_requests_per_batch(device)},
        ),
        "max_batch_tokens": ("lower", {"max_batch_tokens": devices.max_batch_tokens(device)}),
        "training_reserve_gib": ("lower", {"training": unreserved}),
        "max_memory_percent": ("raise", {"max_memory_percent": percent}),
    }
