"""Read the fields of transformers' `ContinuousBatchingConfig` (5.17 to 5.24).

`RolloutConfig` accepts the fields by name, and `as_rollout_config` reads a whole config. Loads no
torch.
"""

from collections.abc import Mapping
from typing import Any

from cb_rollout.errors import ConfigurationError

# transformers 5.17 renamed its `block_size` to `page_size`; it keeps the old name, deprecated.
RENAMED = {"page_size": "block_size"}

# Fields without a counterpart: the values that change nothing here, and the reason. If no values
# are listed, no value changes anything.
NO_COUNTERPART: dict[str, tuple[tuple[Any, ...], str]] = {
    "auto_switch_to_flash": ((True, False), "no attention is switched"),
    "per_request_processors": ((True, False), "every request has its own"),
    "drop_unsupported_processors": ((True, False), "none is dropped"),
    "disable_nccl_graph_mixing": ((True, False), "no graph holds a collective"),
}

# Fields that `RolloutConfig` has under the same name.
SAME_NAME = (
    "block_size", "num_blocks", "max_batch_tokens", "max_memory_percent", "max_requests_per_batch",
    "max_blocks_per_request", "allow_block_sharing", "use_async_batching", "use_cuda_graph",
    "q_padding_interval_size", "kv_padding_interval_size", "varlen_compile_config",
    "decode_compile_config", "default_compile_level", "use_default_compile_configs",
    "max_cached_graphs", "scheduler_type", "return_logprobs", "seed", "max_queue_size",
    "cpu_offload_space", "cpu_offload_space_safety_threshold", "safety_margin", "cpu_group_timeout",
)  # fmt: skip

# Fields where None has a meaning that differs from the default.
NONE_ASKS = frozenset({"cpu_offload_space"})

NAMES = frozenset({*RENAMED, *NO_COUNTERPART})


def own_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by our names, or raise `ConfigurationError` for one that is unavailable."""
    settings = {name: value for name, value in given.items() if name not in NAMES}
    for name, value in given.items():
        if name in NO_COUNTERPART:
            neutral, advice = NO_COUNTERPART[name]
            if neutral and value not in neutral:
                raise unavailable(name, value, neutral[0], advice)
        elif name in RENAMED:
            our_name = RENAMED[name]
            our_value = settings.setdefault(our_name, value)
            if our_value != value:
                raise ConfigurationError(
                    f"{our_name}={our_value!r} and {name}={value!r} are one setting "
                    "under two names; give one."
                )
    return settings


def unavailable(name: str, value: Any, neutral: Any, advice: str) -> ConfigurationError:
    """Return the error for a field of transformers whose value is not available."""
    return ConfigurationError(
        f"ContinuousBatchingConfig.{name}={value!r} is not available; leave it at {neutral!r}: "
        f"{advice}."
    )
