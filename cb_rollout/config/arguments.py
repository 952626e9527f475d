"""Define `RolloutArguments`: the fields of `RolloutConfig` for command lines and yaml files."""

import dataclasses
from contextlib import suppress
from typing import Any, Literal, get_args, get_type_hints

from cb_rollout.config.checks import real_number, whole_number
from cb_rollout.config.rollout import RolloutConfig

# `seed` is the trainer's argument, and `use_cuda_graph` may be a pair.
_LEFT_OUT = ("seed", "use_cuda_graph")

_HINTS = get_type_hints(RolloutConfig)


def _parsed_fields() -> list[dataclasses.Field[Any]]:
    """Return the fields of `RolloutConfig` that a yaml file may hold."""
    parsed_fields = []
    for field in dataclasses.fields(RolloutConfig):
        may_be_object = object in get_args(_HINTS[field.name])
        if field.name not in _LEFT_OUT and not may_be_object:
            parsed_fields.append(field)
    return parsed_fields


_FIELDS = _parsed_fields()


def _parsed_type(field: dataclasses.Field[Any]) -> Any:
    """Return the type that transformers' argument parser reads a field as."""
    choices = field.metadata.get("choices")
    if choices:
        return Literal[tuple(choices)]
    if _may_be_word(field.name):
        return str
    return _HINTS[field.name]


def _may_be_word(name: str) -> bool:
    types = set(get_args(_HINTS[name]))
    return str in types and bool(types & {int, float})


def _value(name: str, parsed: Any) -> Any:
    """Convert a string that spells a number; `RolloutConfig` checks every other string."""
    # Numbers from a yaml file stay as they are.
    if isinstance(parsed, str) and _may_be_word(name):
        read = real_number
        if int in get_args(_HINTS[name]):
            read = whole_number
        with suppress(ValueError):
            return read(parsed)
    return parsed


def _rollout_config(arguments: Any) -> RolloutConfig:
    """Return the `RolloutConfig` to pass to `attach`; `ConfigurationError` for a refused value."""
    settings: dict[str, Any] = {}
    for field in _FIELDS:
        parsed = getattr(arguments, field.name)
        settings[field.name] = _value(field.name, parsed)
    return RolloutConfig(**settings)


def _argument(name: str, parsed_type: Any, default: Any, help_text: str) -> tuple[str, Any, Any]:
    # argparse reads a percent sign as the start of a format specifier.
    metadata = {"help": help_text.replace("%", "%%")}
    return name, parsed_type, dataclasses.field(default=default, metadata=metadata)


def _arguments() -> list[tuple[str, Any, Any]]:
    arguments = [_argument("use_cb_rollout", bool, False, "Roll out through cb_rollout.")]
    for field in _FIELDS:
        parsed_type = _parsed_type(field)
        arguments.append(_argument(field.name, parsed_type, field.default, field.metadata["help"]))
    return arguments


RolloutArguments: Any = dataclasses.make_dataclass(
    "RolloutArguments",
    _arguments(),
    namespace={
        "__doc__": "Every setting of `RolloutConfig` that a yaml file may hold.",
        "__module__": __name__,
        "rollout_config": _rollout_config,
    },
)
"""For `TrlParser((ScriptArguments, GRPOConfig, ModelConfig, RolloutArguments))`: every field of
`RolloutConfig` under its name, except `seed`, which is the trainer's, `use_cuda_graph` and the two
compile configs. A script reads the additional field `use_cb_rollout` to decide whether to call
`attach`."""
