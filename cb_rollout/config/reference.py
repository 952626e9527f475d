"""Read the fields of transformers' `ContinuousBatchingConfig` (5.17 to 5.23).

`RolloutConfig` takes their names; `as_rollout_config` reads a config by them. Loads no torch.
"""

from collections.abc import Mapping
from typing import Any

from cb_rollout.errors import ConfigurationError

# transformers 5.17 renamed the first; its old name stays there, deprecated.
RENAMED = {"page_size": "block_size"}

# A level of default compilation, and the setting that asks for the same.
_COMPILE_LEVELS: dict[int, dict[str, Any]] = {0: {}, 1: {"use_default_compile_configs": True}}
_LEVELS_ADVICE = "1 compiles decode steps with inductor's defaults"

# Fields without a counterpart: the values that ask for nothing here, and what to set instead.
# Without values, no value asks for anything.
NO_COUNTERPART: dict[str, tuple[tuple[Any, ...], str]] = {
    "safety_margin": ((None, 0.0), "a lower max_requests_per_batch keeps blocks free"),
    "auto_switch_to_flash": ((True, False), "no attention is switched"),
    "cpu_offload_space": (
        (0.0,),
        "preempted sequences are computed again, and a higher max_memory_percent preempts fewer",
    ),
    "cpu_offload_space_safety_threshold": ((), "nothing is offloaded"),
    "per_request_processors": ((True, False), "every request has its own"),
    "drop_unsupported_processors": ((True, False), "none is dropped"),
    "disable_nccl_graph_mixing": ((True, False), "no graph holds a collective"),
    "cpu_group_timeout": ((300.0, None), "an engine has no such group"),
}

NAMES = frozenset({*RENAMED, *NO_COUNTERPART, "default_compile_level"})


def own_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by our names, or raise `ConfigurationError` for one that is unavailable."""
    theirs = {name: value for name, value in given.items() if name in NAMES}
    own = {name: value for name, value in given.items() if name not in NAMES}
    level = theirs.pop("default_compile_level", 0)
    if level not in _COMPILE_LEVELS:
        raise unavailable("default_compile_level", level, 0, _LEVELS_ADVICE)
    own = _COMPILE_LEVELS[level] | own
    for name, value in theirs.items():
        if name in NO_COUNTERPART:
            values, advice = NO_COUNTERPART[name]
            if values and value not in values:
                raise unavailable(name, value, values[0], advice)
        elif own.setdefault(RENAMED[name], value) != value:
            raise ConfigurationError(
                f"{RENAMED[name]}={own[RENAMED[name]]!r} and {name}={value!r} are one setting "
                "under two names; give one."
            )
    return own


def unavailable(name: str, value: Any, neutral: Any, advice: str) -> ConfigurationError:
    """Return the error for a field of transformers that asks for what is not available."""
    return ConfigurationError(
        f"ContinuousBatchingConfig.{name}={value!r} is not available; leave it at {neutral!r}: "
        f"{advice}."
    )
