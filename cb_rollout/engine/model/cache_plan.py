"""What the cache keeps, and a plan for its memory: from model, config, training and device."""

from dataclasses import replace

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.enums import KvDtype
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import float8_layout
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB, MemoryPlan, TrainingBytes, create_memory_plan
from cb_rollout.engine.memory.training import TrainingMemory
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.errors import ConfigurationError, OutOfCacheMemoryError

FLOAT32_LOGITS = 3
# Of every row at once: the logits, these over their temperature, and their exponentials.

TURNED = {
    "block_size": "lower",
    "max_requests_per_batch": "lower",
    "training_reserve_gib": "lower",
    "max_memory_percent": "raise",
}
# Settings that may leave a cache no room, the surest first, and the way out.


def kept_layout(layout: CacheLayout, config: RolloutConfig, device: torch.device) -> CacheLayout:
    """The layout in which the cache keeps what a model stores.

    Raises:
        ConfigurationError: `kv_dtype` or `cpu_offload_gib` cannot be honoured.
    """
    if config.cpu_offload_gib and layout.is_recurrent:
        raise ConfigurationError(
            f"cpu_offload_gib={config.cpu_offload_gib}: this model keeps recurrent states, which "
            "cannot be continued from kept keys; leave it at 0."
        )
    if config.kv_dtype == KvDtype.AUTO:
        return layout
    if not devices.has_float8(device):
        raise ConfigurationError(
            f"kv_dtype={config.kv_dtype!r} needs a device that computes with it, an NVIDIA GPU of "
            f"compute capability 8.9 or later, and the model is on {device}; leave it at 'auto'."
        )
    if not layout.has_keys:
        raise ConfigurationError(
            f"kv_dtype={config.kv_dtype!r}: this model keeps no keys and values; leave it at "
            "'auto'."
        )
    return float8_layout(layout)


def plan_memory(
    runner: ModelRunner, training: TrainingMemory, config: RolloutConfig, layout: CacheLayout
) -> MemoryPlan:
    """What the cache may take of what is free now, and how many sequences it may serve at once.

    A forward's workspace is counted as the logits of a full batch, and the history that one layer
    after the other gathers.

    Raises:
        OutOfCacheMemoryError: not even one block fits, or one sequence's states.
        ConfigurationError: `num_blocks` are more than the device has memory for.
    """
    held = training.in_bytes()
    plan = _planned(runner, held, config, layout)
    if plan.is_fixed and plan.kv_bytes > plan.total_bytes:
        most = plan.total_bytes // plan.bytes_per_block
        advice = f"num_blocks to {most} at most" if most else "block_size"
        raise ConfigurationError(
            f"num_blocks={plan.num_blocks} of block_size={config.block_size} tokens are "
            f"{plan.kv_bytes / GIB:.3f} GiB, and {runner.device} has {plan.total_bytes / GIB:.3f}; "
            f"lower {advice}, or leave it out."
        )
    if not _has_room(plan):
        raise _no_room(plan, runner, held, config, layout)
    return plan


def _no_room(
    plan: MemoryPlan,
    runner: ModelRunner,
    held: TrainingBytes,
    config: RolloutConfig,
    layout: CacheLayout,
) -> OutOfCacheMemoryError:
    """What to say where nothing fits: the first setting without which something would."""
    forward_bytes = plan.workspace_bytes + plan.workspace_bytes_per_block
    found = (
        f"of {plan.free_bytes / GIB:.3f} GiB free, training will take "
        f"{plan.training_reserve_bytes / GIB:.3f}, a forward {forward_bytes / GIB:.3f}, and a "
        f"block of {config.block_size} tokens {plan.bytes_per_block / GIB:.3f}"
    )
    for name, turn in TURNED.items():
        value, default = getattr(config, name), getattr(RolloutConfig, name)
        if value == default:
            continue
        training = replace(held, set_reserve=None) if name == "training_reserve_gib" else held
        other = _planned(runner, training, replace(config, **{name: default}), layout)
        if _has_room(other):
            return OutOfCacheMemoryError(
                f"no memory for a KV cache under {name}={value!r}: {found}; {turn} {name}: with "
                f"{default!r} there would be {other.num_blocks} blocks.\n{plan}"
            )
    return OutOfCacheMemoryError(
        f"no memory for a KV cache: {found}; raise max_memory_percent, lower training_reserve_gib "
        f"or max_requests_per_batch, or free some on {runner.device}.\n{plan}"
    )


def _has_room(plan: MemoryPlan) -> bool:
    return bool(plan.num_blocks and plan.num_slots)


def _planned(
    runner: ModelRunner, training: TrainingBytes, config: RolloutConfig, layout: CacheLayout
) -> MemoryPlan:
    device = runner.device
    max_requests = config.max_requests_per_batch or devices.max_requests_per_batch(device)
    memory = devices.memory(device)
    itemsize = runner.compute_dtype.itemsize
    kept = [sum(shape.num_elements for shape in layer.per_token) for layer in layout.layers]
    return create_memory_plan(
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        training=training,
        max_memory_percent=config.max_memory_percent,
        workspace_bytes=max_requests * hf_compat.vocab_size(runner.model) * 4 * FLOAT32_LOGITS,
        workspace_bytes_per_block=max(kept, default=0) * itemsize * config.block_size,
        bytes_per_block=layout.bytes_per_token * config.block_size,
        bytes_per_sequence=layout.bytes_per_sequence,
        max_requests=max_requests,
        num_blocks=config.num_blocks,
    )
