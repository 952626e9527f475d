"""Which settings there are, and what kind of value each takes. Loads no torch.

Plain numbers, token ids and texts, out of whatever a caller gives for them.

Owns what is accepted: Python's, numpy's and torch's scalars, never a truth value for a number.
Loads neither numpy nor torch.
"""

import dataclasses
import difflib
import functools
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from cb_rollout.errors import ConfigurationError, InvalidRequestError, RolloutError

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


def flag(name: str, given: Any) -> bool:
    """True or False."""
    value = _plain(given)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={given!r} is not True or False.")
    return value


def whole(name: str, given: Any, is_in_range: Callable[[int], bool], complaint: str) -> int:
    """A whole number in its range."""
    value = _plain(given)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not is_in_range(number):
        raise InvalidRequestError(f"{name}={given!r} {complaint}.")
    return number


def real(name: str, given: Any, is_in_range: Callable[[float], bool], complaint: str) -> float:
    """A number in its range."""
    value = _plain(given)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number = float(value) if is_number else math.nan
    if math.isnan(number) or not is_in_range(number):
        raise InvalidRequestError(f"{name}={given!r} {complaint}.")
    return number


def token_ids(name: str, given: Any) -> tuple[int, ...]:
    """One id or several, or an array of them."""
    complaint = "is not made of token ids"
    many = given if _is_many(given) else (given,)
    try:
        return tuple(whole(name, token, lambda _: True, complaint) for token in many)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}={given!r} {complaint}.") from error


def token_sequences(name: str, given: Any) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids, none of them empty."""
    if not _is_many(given) or not all(_is_many(sequence) and len(sequence) for sequence in given):
        raise InvalidRequestError(
            f"{name}={given!r} is not a sequence of token-id sequences; encode each word with "
            "tokenizer(word, add_special_tokens=False).input_ids."
        )
    return tuple(token_ids(name, sequence) for sequence in given)


def texts(name: str, given: Any) -> tuple[str, ...]:
    """One text or several, none of them empty."""
    many = (given,) if isinstance(given, str) else given
    if not _is_many(many) or not all(isinstance(text, str) and text for text in many):
        raise InvalidRequestError(f"{name}={given!r} is not a text, or several, each not empty.")
    return tuple(many)


def biases(name: str, given: Any, largest: float) -> dict[int, float]:
    """What is added to the logits of some tokens, at most `largest`; -inf forbids one."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{name}={given!r} is not a dict of token id to number.")
    complaint = "is not a finite number; -inf forbids a token"

    def is_bias(value: float) -> bool:
        return abs(value) <= largest or value == -math.inf

    return {
        token: real(f"{name}[{token}]", value, is_bias, complaint)
        for key, value in given.items()
        for token in token_ids(name, key)
    }


def callables(name: str, given: Any) -> tuple[Any, ...]:
    """Several things to call."""
    if not isinstance(given, list | tuple) or not all(map(callable, given)):
        raise InvalidRequestError(
            f"{name}={given!r} is not a list or tuple of callables; one processor is (processor,)."
        )
    return tuple(given)


def _plain(given: Any) -> Any:
    """A numpy or torch scalar as Python's own number or truth value."""
    return given.item() if getattr(given, "ndim", None) == 0 else given


def _is_many(given: Any) -> bool:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        return False
    return getattr(given, "ndim", 1) > 0
