"""Size the KV cache: choose the dtypes of its pages and plan its memory.

Called once for each engine, and again after the first measured training step.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import KvDtype
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec
from cb_rollout.engine.kv_cache.paged import float8_layout
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB, MemoryPlan, TrainingBytes, create_memory_plan
from cb_rollout.errors import ConfigurationError, OutOfCacheMemoryError

# Of every row at once: the logits, these over their temperature, and their exponentials.
FLOAT32_LOGITS = 3

# Settings that may leave the cache no memory, the likeliest first, and how to turn each.
KNOBS = {
    "block_size": "lower",
    "max_requests_per_batch": "lower",
    "max_batch_tokens": "lower",
    "training_reserve_gib": "lower",
    "max_memory_percent": "raise",
}


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


def plan_memory(
    layout: CacheLayout,
    config: RolloutConfig,
    training: TrainingBytes,
    *,
    vocab_size: int,
    compute_dtype: torch.dtype,
    num_heads: int,
    history_factor: int,
    max_sequence_tokens: int | None,
    graph_bytes: int,
    graph_bytes_to_come: int = 0,
    encoder_cache_bytes: int = 0,
    device: torch.device,
) -> MemoryPlan:
    """Plan the cache's memory from what is free on the device now.

    A forward's workspace is the logits of a full batch, and the history that one layer after the
    other gathers.

    Args:
        layout: tensors that the layers store.
        config: settings.
        training: memory that training holds and will still allocate.
        vocab_size: logits of a row.
        compute_dtype: dtype of the forward.
        num_heads: query heads of a layer; 0: not known.
        history_factor: tokens that the rows of a prefill gather together, for each token that it
            may compute, unless it has one row only.
        max_sequence_tokens: most tokens of one sequence, where only prefills gather; None: no
            limit, or decode steps gather too.
        graph_bytes: memory that captured CUDA graphs hold, which is not free any more.
        graph_bytes_to_come: memory that dropped CUDA graphs will hold again.
        encoder_cache_bytes: memory for the features of images.
        device: the device of the cache.

    Raises:
        OutOfCacheMemoryError: not even one block fits, or one sequence's states.
        ConfigurationError: `num_blocks` are more than the device has memory for.
    """
    memory = devices.memory_after_release(device)
    bytes_per_token = gathered_bytes_per_token(layout, num_heads, compute_dtype)

    def planned(config: RolloutConfig, training: TrainingBytes) -> MemoryPlan:
        max_requests = max_requests_per_batch(config, device)
        max_batch_tokens = config.max_batch_tokens or devices.max_batch_tokens(device)
        history, most = history_factor * max_batch_tokens, None
        if max_sequence_tokens is not None:
            most = -(-max_sequence_tokens // config.block_size)
        if most is not None and config.max_blocks_per_request:
            most = min(most, config.max_blocks_per_request)
        return create_memory_plan(
            total_bytes=memory.total_bytes,
            free_bytes=max(0, memory.free_bytes - graph_bytes_to_come),
            training=training,
            max_memory_percent=config.max_memory_percent,
            workspace_bytes=max_requests * vocab_size * 4 * FLOAT32_LOGITS,
            workspace_bytes_per_block=bytes_per_token * config.block_size,
            max_prefill_blocks=-(-history // config.block_size),
            max_sequence_blocks=most,
            graph_bytes=graph_bytes + graph_bytes_to_come,
            encoder_cache_bytes=encoder_cache_bytes,
            bytes_per_block=layout.bytes_per_token * config.block_size,
            bytes_per_sequence=layout.bytes_per_sequence,
            max_requests=max_requests,
            num_blocks=config.num_blocks,
        )

    plan = planned(config, training)
    if plan.is_fixed and plan.kv_bytes > plan.total_bytes:
        most = plan.total_bytes // plan.bytes_per_block
        advice = f"num_blocks to {most} at most" if most else "block_size"
        raise ConfigurationError(
            f"num_blocks={plan.num_blocks} of block_size={config.block_size} tokens are "
            f"{plan.kv_bytes / GIB:.3f} GiB, and {device} has {plan.total_bytes / GIB:.3f}; "
            f"lower {advice}, or leave it out."
        )
    if not _has_room(plan):
        raise _no_room(plan, config, training, device, planned)
    return plan


def _has_room(plan: MemoryPlan) -> bool:
    return bool(plan.num_blocks and plan.num_slots)


def _no_room(
    plan: MemoryPlan,
    config: RolloutConfig,
    training: TrainingBytes,
    device: torch.device,
    planned: Callable[[RolloutConfig, TrainingBytes], MemoryPlan],
) -> OutOfCacheMemoryError:
    """Return the error that names the first setting without which a block would fit."""
    found = (
        f"of {plan.free_bytes / GIB:.3f} GiB free, training will take "
        f"{plan.training_reserve_bytes / GIB:.3f}, a forward {plan.forward_bytes / GIB:.3f}, and a "
        f"block of {config.block_size} tokens {plan.bytes_per_block / GIB:.3f}"
    )
    for name, turn in KNOBS.items():
        value, default = getattr(config, name), getattr(RolloutConfig, name)
        if value == default:
            continue
        is_reserve = name == "training_reserve_gib"
        unreserved = replace(training, set_reserve=None) if is_reserve else training
        other = planned(replace(config, **{name: default}), unreserved)
        if _has_room(other):
            return OutOfCacheMemoryError(
                f"no memory for a KV cache under {name}={value!r}: {found}; {turn} {name}: with "
                f"{default!r} there would be {other.num_blocks} blocks.\n{plan}"
            )
    return OutOfCacheMemoryError(
        f"no memory for a KV cache: {found}; raise max_memory_percent, lower training_reserve_gib, "
        f"max_batch_tokens or max_requests_per_batch, or free some on {device}.\n{plan}"
    )
