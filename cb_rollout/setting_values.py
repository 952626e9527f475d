"""Which settings there are, and what kind of value each takes. Loads no torch."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from cb_rollout.errors import ConfigurationError, RolloutError

T = TypeVar("T")


def known_fields_only(
    error: type[RolloutError], synonyms: Mapping[str, str] | None = None
) -> Callable[[type[T]], type[T]]:
    """Make a keyword dataclass refuse an unknown field with an error that names the right one.

    Args:
        error: what is raised.
        synonyms: what others call our fields.
    """

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

        @functools.wraps(init)
        def checked(self: T, **given: Any) -> None:
            for name in given:
                if name not in names:
                    close = difflib.get_close_matches(name, names, n=1)
                    meant = (synonyms or {}).get(name) or next(iter(close), None)
                    hint = f"did you mean {meant!r}?" if meant else f"known: {', '.join(names)}."
                    raise error(f"{cls.__name__} has no field {name!r}; {hint}")
            init(self, **given)

        cls.__init__ = checked
        return cls

    return decorate


def is_number(value: object) -> bool:
    """Whether it is one; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_integer(name: str, value: object, least: int, may_be_none: bool) -> None:
    """Raise `ConfigurationError` for what is not a whole number, or below the least."""
    if value is None and may_be_none:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} is not a whole number.")
    if value < least:
        raise ConfigurationError(f"{name}={value} is below {least}; raise it.")


def require_choice(name: str, value: object, kind: type[StrEnum]) -> None:
    """Raise `ConfigurationError` for what is none of the words."""
    choices = [choice.value for choice in kind]
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(choices)}.")
