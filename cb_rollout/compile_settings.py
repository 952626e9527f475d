"""How decode steps are compiled: `torch.compile`'s own settings, as far as they mean anything here.

Loads no torch; the one that compiles knows modes and options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
