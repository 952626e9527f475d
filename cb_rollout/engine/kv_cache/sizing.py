"""Size the KV cache: estimate the memory of forwards, and refuse a plan without room.

Called once for each engine, and again after the first measured training step.
"""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import (
    GIB,
    MemoryModel,
    MemoryPlan,
    TrainingBytes,
    create_memory_plan,
)
from cb_rollout.errors import ConfigurationError, OutOfCacheMemoryError


def workspace_bytes_per_request(vocab_size: int) -> int:
    """Return a row's float32 bytes: logits, scaled logits and exponentials."""
    return vocab_size * 4 * 3


def gathered_bytes_per_token(
    layout: CacheLayout, num_heads: int, compute_dtype: torch.dtype
) -> int:
    """Return the bytes that a forward gathers per layer and token of history.

    If several of a layer's `num_heads` query heads share a key head, transformers' `repeat_kv`
    allocates repeated keys and values in addition to the gathered ones.
    """

    def num_elements(layer: LayerSpec) -> int:
        stored = sum(states.num_elements for states in layer.per_token)
        if layer.keys is None:
            return stored
        num_key_heads = layer.keys.shape[0]
        repeats = num_heads // num_key_heads
        if repeats < 2:
            return stored
        repeated = layer.keys.num_elements
        if layer.values is not None:
            repeated += layer.values.num_elements
        return stored + repeats * repeated

    return max(map(num_elements, layout.layers), default=0) * compute_dtype.itemsize


def create_memory_model(
    config: RolloutConfig,
    layout: CacheLayout,
    model: PreTrainedModel,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    memory: devices.DeviceMemory,
    training: TrainingBytes,
    max_requests: int,
    max_gather_ratio: int,
    gathers_always: bool,
    path_bytes: int,
) -> MemoryModel:
    """Return the inputs of an engine's memory plan.

    Args:
        config: the engine's settings.
        layout: what the model's layers store.
        model: generates.
        compute_dtype: of its forwards.
        device: the model's.
        memory: of the device, with no cache allocated, less what decode steps will allocate again.
        training: what training holds, and will allocate.
        max_requests: maximum rows of a forward.
        max_gather_ratio: maximum tokens that a prefill gathers per token that it computes.
        gathers_always: True if decode steps gather keys too.
        path_bytes: memory that the decode path holds, such as CUDA graphs.
    """
    max_sequence_tokens = None
    if not gathers_always:
        limits: list[int] = []
        for limit in (hf_compat.max_positions(model), config.max_model_len):
            if limit is not None:
                limits.append(limit)
        max_sequence_tokens = min(limits, default=None)
    gathered_bytes = gathered_bytes_per_token(
        layout, hf_compat.num_query_heads(model), compute_dtype
    )
    return MemoryModel(
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        training=training,
        max_memory_percent=config.max_memory_percent,
        block_size=config.block_size,
        max_requests=max_requests,
        max_batch_tokens=config.max_batch_tokens or devices.max_batch_tokens(device),
        bytes_per_token=layout.bytes_per_token,
        bytes_per_sequence=layout.bytes_per_sequence,
        workspace_bytes_per_request=workspace_bytes_per_request(hf_compat.vocab_size(model)),
        gathered_bytes_per_token=gathered_bytes,
        history_factor=1 if layout.is_recurrent else max_gather_ratio,
        max_sequence_tokens=max_sequence_tokens,
        graph_bytes=path_bytes,
        set_blocks=config.num_blocks,
    )


def require_room(plan: MemoryPlan, config: RolloutConfig, device: torch.device) -> MemoryPlan:
    """Return the plan for these settings, if a sequence fits.

    Raises `OutOfCacheMemoryError` if there is no room for one block, or for one sequence's states,
    and `ConfigurationError` if `num_blocks` is more than the device has memory for.
    """
    if plan.is_fixed and plan.kv_bytes > plan.total_bytes:
        most = plan.total_bytes // plan.bytes_per_block
        advice = f"num_blocks to {most} at most" if most else "block_size"
        raise ConfigurationError(
            f"num_blocks={plan.num_blocks} of block_size={config.block_size} tokens need "
            f"{plan.kv_bytes / GIB:.3f} GiB, but {device} has {plan.total_bytes / GIB:.3f}; lower "
            f"{advice}, or leave it out."
        )
    if plan.has_room:
        return plan
    found = (
        f"of {plan.free_bytes / GIB:.3f} GiB free, training will take "
        f"{plan.training.reserve / GIB:.3f}, a forward {plan.forward_bytes / GIB:.3f}, and a block "
        f"of {config.block_size} tokens {plan.bytes_per_block / GIB:.3f}"
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
        value = getattr(config, name)
        default = getattr(RolloutConfig, name)
        if value == default:
            continue
        other = create_memory_plan(replace(plan, **numbers))
        if other.has_room:
            turn = "raise" if name == "max_memory_percent" else "lower"
            raise OutOfCacheMemoryError(
                f"no memory for a KV cache with {name}={value!r}: {found}; {turn} {name}, for "
                f"example to {default!r}, which leaves room for {other.num_blocks} blocks.\n{plan}"
            )
    raise OutOfCacheMemoryError(
        f"no memory for a KV cache: {found}; raise max_memory_percent, lower training_reserve_gib, "
        f"max_batch_tokens or max_requests_per_batch, or free memory on {device}.\n{plan}"
    )
