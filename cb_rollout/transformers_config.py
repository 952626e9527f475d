"""A transformers `ContinuousBatchingConfig`, read as a `RolloutConfig`. Loads no transformers."""

import dataclasses
from typing import Any

from cb_rollout.config import RolloutConfig
from cb_rollout.errors import ConfigurationError

_RENAMED = {"page_size": "block_size"}
# transformers 5.17 renamed the field; its old name stays there as a deprecated alias.

_NO_COUNTERPART: dict[str, tuple[Any, ...]] = {
    "safety_margin": (None,),
    "auto_switch_to_flash": (True, False),
    "cpu_offload_space": (0, 0.0),
    "cpu_offload_space_safety_threshold": (0.8,),
    "per_request_processors": (True, False),
    "drop_unsupported_processors": (True, False),
    "disable_nccl_graph_mixing": (True, False),
    "cpu_group_timeout": (300.0, None),
    "default_compile_level": (0,),
}
# transformers' fields without a counterpart, and the values at which they ask for nothing here.


def as_rollout_config(config: Any) -> RolloutConfig:
    """`config` as a `RolloutConfig`: itself, a transformers `ContinuousBatchingConfig`, or None.

    Raises:
        ConfigurationError: `config` is something else, or asks for what cannot be honoured.
    """
    if config is None:
        return RolloutConfig()
    if isinstance(config, RolloutConfig):
        return config
    is_record = dataclasses.is_dataclass(config) and not isinstance(config, type)
    if not (is_record and hasattr(config, "max_batch_tokens")):
        raise ConfigurationError(
            f"config is a {type(config).__name__}; pass a RolloutConfig or a transformers "
            "ContinuousBatchingConfig."
        )
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _NO_COUNTERPART:
            if value not in _NO_COUNTERPART[field.name]:
                raise ConfigurationError(
                    f"ContinuousBatchingConfig.{field.name}={value!r} is not available; leave it "
                    f"at {_NO_COUNTERPART[field.name][0]!r}."
                )
        elif value is not None:
            values[_RENAMED.get(field.name, field.name)] = value
    return RolloutConfig(**values)


def as_trainers_config(config: Any, seed: int) -> RolloutConfig:
    """As `as_rollout_config`, with log-probabilities, and a trainer's seed where none is set.

    Raises:
        ConfigurationError: also where a `RolloutConfig` leaves log-probabilities out.
    """
    if isinstance(config, RolloutConfig) and not config.return_logprobs:
        raise ConfigurationError("return_logprobs=False: the trainer needs them; leave it True.")
    resolved = as_rollout_config(config)
    # transformers' own config leaves them out by default.
    return dataclasses.replace(
        resolved, return_logprobs=True, seed=seed if resolved.seed is None else resolved.seed
    )
