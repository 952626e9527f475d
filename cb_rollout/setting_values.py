"""What kind of value a setting takes. Loads no torch."""

from enum import StrEnum

from cb_rollout.errors import ConfigurationError


def is_number(value: object) -> bool:
    """Whether it is one; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_integer(name: str, value: object, least: int, may_be_none: bool) -> None:
    """Raise `ConfigurationError` for what is no whole number, or below the least."""
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
