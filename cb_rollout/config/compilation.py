"""Read `torch.compile` settings of decode steps. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KNOWN = ("mode", "options", "backend", "dynamic", "fullgraph")


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """Settings that inductor is called with."""

    mode: str | None = None
    """A mode of `torch.compile`; None: its default."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of inductor; they override those of the mode."""


def compile_settings(value: Any) -> CompileSettings | None:
    """Read a transformers `CompileConfig`, a dict of its fields, or None.

    Raises `ValueError` for anything else, and for what is not honoured.
    """
    if value is None:
        return None
    given = value.to_dict() if hasattr(value, "to_dict") else value
    known = ", ".join(_KNOWN)
    if not isinstance(given, Mapping):
        raise ValueError(f"is no CompileConfig; pass one, or a dict of {known}")
    unknown = [key for key in given if key not in _KNOWN]
    if unknown:
        raise ValueError(f"has no {unknown[0]!r}; it is a dict of {known}")
    if given.get("backend", "inductor") != "inductor":
        raise ValueError(
            f"has backend={given['backend']!r}; decode steps are compiled by 'inductor'"
        )
    if given.get("dynamic") is False:
        raise ValueError(
            "has dynamic=False, which would compile again for every number of running sequences; "
            "leave it at None"
        )
    mode, options = given.get("mode"), given.get("options") or {}
    if not isinstance(mode, str | None) or not isinstance(options, Mapping):
        raise ValueError("needs a string as mode and a dict as options")
    return CompileSettings(mode=mode, options=dict(options))


def check_compile_config(value: Any) -> Any:
    """Accept what `compile_settings` reads, and keep it as given."""
    compile_settings(value)
    return value
