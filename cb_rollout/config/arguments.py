"""`RolloutArguments`: the settings of a rollout, for command lines and yaml files.

Owns which of `RolloutConfig`'s fields such a file may hold, and under which type a parser reads
them. Loads no torch.
"""

import dataclasses
from contextlib import suppress
from typing import Any, Literal, get_args, get_type_hints

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.rules import AVAILABLE, choices_of

_HINTS = get_type_hints(RolloutConfig)

_FIELDS = [
    field
    for field in dataclasses.fields(RolloutConfig)
    if field.name not in ("seed", *AVAILABLE) and object not in get_args(_HINTS[field.name])
]
# `seed` is the trainer's own argument, whose value is the default; some have one value only, and
# some hold objects.


def _parsed_type(name: str) -> Any:
    """What transformers' parser, which knows one type an argument, reads a field as."""
    if choices := choices_of(name):
        return Literal[choices]
    return str if _may_be_word(name) else _HINTS[name]


def _may_be_word(name: str) -> bool:
    return {float, str} <= set(get_args(_HINTS[name]))


def _value(name: str, parsed: Any) -> Any:
    """A number where a word was read that is one; `RolloutConfig` refuses the others."""
    if _may_be_word(name):
        with suppress(ValueError):
            return float(parsed)
    return parsed


class _Arguments:
    """What the generated dataclass does."""

    use_cb_rollout: bool

    def rollout_config(self) -> RolloutConfig:
        """The settings as `attach` takes them.

        Raises:
            ConfigurationError: one is out of range, or cannot be honoured.
        """
        return RolloutConfig(**{f.name: _value(f.name, getattr(self, f.name)) for f in _FIELDS})


RolloutArguments: Any = dataclasses.make_dataclass(
    "RolloutArguments",
    [
        (
            "use_cb_rollout",
            bool,
            dataclasses.field(default=False, metadata={"help": "Roll out through cb_rollout."}),
        ),
        *(
            (
                f.name,
                _parsed_type(f.name),
                dataclasses.field(
                    default=f.default,
                    # argparse takes a percent sign for a format.
                    metadata={"help": f.metadata["help"].replace("%", "%%")},
                ),
            )
            for f in _FIELDS
        ),
    ],
    bases=(_Arguments,),
    namespace={
        "__doc__": "Every setting of `RolloutConfig` that a yaml file may hold.",
        "__module__": __name__,
    },
)
"""For `TrlParser((ScriptArguments, GRPOConfig, ModelConfig, RolloutArguments))`: every field of
`RolloutConfig` under its name, except `seed`, which is the trainer's, and those that are not
available; and `use_cb_rollout`, which a script asks before it calls `attach`."""
