"""Define `RolloutArguments`: the fields of `RolloutConfig` for command lines and yaml files."""

import dataclasses
from contextlib import suppress
from typing import Any, Literal, get_args, get_type_hints

from cb_rollout.config.checks import real_number, whole_number
from cb_rollout.config.rollout import RolloutConfig

# `seed` is the trainer's own argument. The others hold pairs, objects, or a single value.
_LEFT_OUT = ("seed", "use_async_batching", "use_cuda_graph", "varlen_compile_config")

_HINTS = get_type_hints(RolloutConfig)

_FIELDS = [
    field
    for field in dataclasses.fields(RolloutConfig)
    if field.name not in _LEFT_OUT and object not in get_args(_HINTS[field.name])
]


def _parsed_type(field: dataclasses.Field[Any]) -> Any:
    """Return the type that transformers' argument parser reads a field as."""
    if choices := field.metadata.get("choices"):
        return Literal[tuple(choices)]
    return str if _may_be_word(field.name) else _HINTS[field.name]


def _may_be_word(name: str) -> bool:
    types = set(get_args(_HINTS[name]))
    return str in types and bool(types & {int, float})


def _value(name: str, parsed: Any) -> Any:
    """Convert a string to a number where it is one; `RolloutConfig` refuses other strings."""
    # A yaml file has numbers, which stay as they are.
    if isinstance(parsed, str) and _may_be_word(name):
        read = whole_number if int in get_args(_HINTS[name]) else real_number
        with suppress(ValueError):
            return read(parsed)
    return parsed


def _rollout_config(arguments: Any) -> RolloutConfig:
    """Return the settings as `attach` takes them; `ConfigurationError`: one is refused."""
    return RolloutConfig(**{f.name: _value(f.name, getattr(arguments, f.name)) for f in _FIELDS})


def _argument(name: str, parsed_type: Any, default: Any, help_text: str) -> tuple[str, Any, Any]:
    # argparse takes a percent sign for a format.
    metadata = {"help": help_text.replace("%", "%%")}
    return name, parsed_type, dataclasses.field(default=default, metadata=metadata)


RolloutArguments: Any = dataclasses.make_dataclass(
    "RolloutArguments",
    [
        _argument("use_cb_rollout", bool, False, "Roll out through cb_rollout."),
        *(_argument(f.name, _parsed_type(f), f.default, f.metadata["help"]) for f in _FIELDS),
    ],
    namespace={
        "__doc__": "Every setting of `RolloutConfig` that a yaml file may hold.",
        "__module__": __name__,
        "rollout_config": _rollout_config,
    },
)
"""For `TrlParser((ScriptArguments, GRPOConfig, ModelConfig, RolloutArguments))`: every field of
`RolloutConfig` under its name, except `seed`, which is the trainer's, and those that are not
available; and `use_cb_rollout`, which a script asks before it calls `attach`."""
