"""How decode steps are compiled: `torch.compile`'s own settings, as far as they mean anything here.

Loads no torch; the one that compiles knows modes and options.

Which values each setting of a rollout takes, and the errors that say so.

Owns ranges; the settings themselves, and what they mean, are `config`'s. Loads no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cb_rollout.config.enums import (
    KvDtype,
    LogprobsMode,
    OldLogps,
    OnLogprobDrift,
    ReleaseCache,
    RolloutDtype,
    SamplingMaskMode,
    SchedulerType,
    WeightSync,
)
from cb_rollout.config.validation import is_number, require_choice, require_integer
from cb_rollout.errors import ConfigurationError

_KNOWN = ("mode", "options", "backend", "dynamic", "fullgraph")


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """What inductor is told."""

    mode: str | None = None
    """A mode of `torch.compile`; None: its default."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of inductor; they come before those of the mode."""


def compile_settings(name: str, value: Any) -> CompileSettings | None:
    """Read a field that takes a transformers `CompileConfig`, or a dict of the same keys, or None.

    Args:
        name: the field's, for messages.
        value: what it was set to.

    Raises:
        ConfigurationError: it is something else, or asks for what cannot be honoured.
    """
    if value is None:
        return None
    given = value.to_dict() if hasattr(value, "to_dict") else value
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"{name}={value!r} is no CompileConfig; pass one, or a dict of {', '.join(_KNOWN)}."
        )
    unknown = [key for key in given if key not in _KNOWN]
    if unknown:
        raise ConfigurationError(
            f"{name} has no {unknown[0]!r}; it is a dict of {', '.join(_KNOWN)}."
        )
    if given.get("backend", "inductor") != "inductor":
        raise ConfigurationError(
            f"{name} has backend={given['backend']!r}; decode steps are compiled by 'inductor'."
        )
    if given.get("dynamic") is False:
        raise ConfigurationError(
            f"{name} has dynamic=False, which would compile anew for every number of running "
            "sequences; leave it at None."
        )
    mode, options = given.get("mode"), given.get("options") or {}
    if not isinstance(mode, str | None) or not isinstance(options, Mapping):
        raise ConfigurationError(
            f"{name} has mode={mode!r} and options={options!r}; the one is a word, the other a "
            "dict."
        )
    return CompileSettings(mode=mode, options=dict(options))


_BOOLEANS = (
    *("allow_block_sharing", "return_logprobs", "verify_weight_sync", "balance_ranks"),
    "use_default_compile_configs",
)

_CHOICES: dict[str, type[StrEnum]] = {
    "scheduler_type": SchedulerType,
    "weight_sync": WeightSync,
    "rollout_dtype": RolloutDtype,
    "logprobs_mode": LogprobsMode,
    "sampling_mask": SamplingMaskMode,
    "old_logps": OldLogps,
    "on_logprob_drift": OnLogprobDrift,
    "release_cache": ReleaseCache,
    "kv_dtype": KvDtype,
}

_INTEGERS: dict[str, tuple[int, bool]] = {
    "block_size": (1, False),
    "num_blocks": (1, True),
    "max_batch_tokens": (1, True),
    "max_requests_per_batch": (1, True),
    "max_blocks_per_request": (0, True),
    "max_queue_size": (0, False),
    "q_padding_interval_size": (0, False),
    "kv_padding_interval_size": (0, False),
    "max_cached_graphs": (0, False),
    "verify_every_steps": (0, False),
    "verify_num_sequences": (1, False),
    "record_num_sequences": (0, False),
    "num_speculative_tokens": (0, True),
    "seed": (0, True),
}
# Each whole number's least value, and whether None is allowed.

_AMOUNTS = {
    "training_reserve_gib": ("auto", "GiB"),
    "max_logprob_drift": (None, "nats"),
    "cpu_offload_gib": (0.0, "GiB"),
}
# Each amount's resting value and its unit.

AVAILABLE: dict[str, tuple[Any, ...]] = {
    "use_async_batching": (None, True, False),
    # A pair is of prefill, which is not captured, and of decode.
    "use_cuda_graph": (
        *(None, True, False, (False, True), (False, False), [False, True], [False, False]),
    ),
    "varlen_compile_config": (None,),
}
# Each field's values that can be honoured today, the first one being the advice.


OF_A_TRAINER: dict[str, tuple[Any, ...]] = {
    "old_logps": (),
    "verify_every_steps": (0,),
    "verify_num_sequences": (),
    "max_logprob_drift": (),
    "on_logprob_drift": (),
    "record_num_sequences": (0,),
}
# Settings that only an attached trainer acts on; beside their defaults, what asks for nothing.

OF_A_GENERATOR: dict[str, tuple[Any, ...]] = {
    "weight_sync": ("shared",),
    "verify_weight_sync": (),
    "balance_ranks": (),
}
# The same, of a generator.


def choices_of(name: str) -> tuple[str, ...]:
    """The words that a field may be; empty where it is not one word of a few."""
    return tuple(choice.value for choice in _CHOICES.get(name, ()))


def require_valid(settings: Any) -> None:
    """Check every type and range of a `RolloutConfig`, and refuse what cannot be honoured.

    Raises:
        ConfigurationError: with the field's name, its value, and what to set instead.
    """
    for name, kind in _CHOICES.items():
        require_choice(name, getattr(settings, name), kind)
    for name, (least, may_be_none) in _INTEGERS.items():
        require_integer(name, getattr(settings, name), least, may_be_none)
    for name in _BOOLEANS:
        if not isinstance(value := getattr(settings, name), bool):
            raise ConfigurationError(f"{name}={value!r} is not True or False.")
    if not is_number(settings.max_memory_percent) or not 0 < settings.max_memory_percent <= 1:
        raise ConfigurationError(
            f"max_memory_percent={settings.max_memory_percent!r} is outside (0, 1]; 0.4 is 40%."
        )
    for name, (rest, unit) in _AMOUNTS.items():
        value = getattr(settings, name)
        if value != rest and not (is_number(value) and 0 <= value < math.inf):
            raise ConfigurationError(
                f"{name}={value!r} is neither {rest!r} nor a finite number >= 0 of {unit}."
            )
    _require_available(settings)
    compile_settings("decode_compile_config", settings.decode_compile_config)
    _require_something_to_fall_back_to(settings)


def _require_available(settings: Any) -> None:
    for name, available in AVAILABLE.items():
        value = getattr(settings, name)
        if value not in available:
            raise ConfigurationError(
                f"{name}={value!r} is not available; leave it at {available[0]!r}."
            )
    if settings.use_async_batching and settings.wants_graphs is False:
        raise ConfigurationError(
            "use_async_batching=True launches CUDA graphs ahead, and use_cuda_graph="
            f"{settings.use_cuda_graph!r} has none; leave one of them at None."
        )


def require_left_alone(
    settings: Any, fields: Mapping[str, tuple[Any, ...]], complaint: str
) -> None:
    """Refuse settings on which nobody would act.

    Args:
        settings: a `RolloutConfig`.
        fields: their names, each with the values beside its default that ask for nothing.
        complaint: who does not act, and who would.

    Raises:
        ConfigurationError: one of them asks for something.
    """
    for name, harmless in fields.items():
        value, default = getattr(settings, name), getattr(type(settings), name)
        if value != default and value not in harmless:
            raise ConfigurationError(f"{name}={value!r}: {complaint}; or leave it at {default!r}.")


def _require_something_to_fall_back_to(settings: Any) -> None:
    if settings.on_logprob_drift == OnLogprobDrift.RECOMPUTE and (
        settings.old_logps == OldLogps.TRAINER or settings.max_logprob_drift is None
    ):
        raise ConfigurationError(
            "on_logprob_drift='recompute' needs old_logps='rollout' and a max_logprob_drift; set "
            "both, or leave it at 'raise'."
        )
