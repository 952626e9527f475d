"""What the cache keeps, and a plan for its memory: from model, config, training and device."""

import torch

from cb_rollout import _compat
from cb_rollout.choices import KvDtype
from cb_rollout.config import RolloutConfig
from cb_rollout.engine import device as devices
from cb_rollout.engine.pages import in_float8
from cb_rollout.engine.probe import CacheLayout
from cb_rollout.engine.runner import ModelRunner
from cb_rollout.engine.training import TrainingMemory
from cb_rollout.errors import ConfigurationError
from cb_rollout.memory import MemoryPlan, create_memory_plan

FLOAT32_LOGITS = 3
# Of every row at once: the logits, their probabilities and the sum of these along the vocabulary.


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
    return in_float8(layout)


def plan_memory(
    runner: ModelRunner, training: TrainingMemory, config: RolloutConfig, layout: CacheLayout
) -> MemoryPlan:
    """What the cache may take of what is free now, and how many sequences it may serve at once.

    A forward's workspace is counted as the logits of a full batch, and the history that one layer
    after the other gathers.
    """
    device = runner.device
    max_requests = config.max_requests_per_batch or devices.max_requests_per_batch(device)
    memory = devices.memory(device)
    itemsize = runner.compute_dtype.itemsize
    kept = [sum(shape.num_elements for shape in layer.per_token) for layer in layout.layers]
    return create_memory_plan(
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        training=training.in_bytes(),
        max_memory_percent=config.max_memory_percent,
        workspace_bytes=max_requests * _compat.vocab_size(runner.model) * 4 * FLOAT32_LOGITS,
        workspace_bytes_per_block=max(kept, default=0) * itemsize * config.block_size,
        bytes_per_block=layout.bytes_per_token * config.block_size,
        bytes_per_sequence=layout.bytes_per_sequence,
        max_requests=max_requests,
        num_blocks=config.num_blocks,
    )
