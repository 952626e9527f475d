"""Declare settings dataclasses whose fields carry their own check.

A check takes a value and returns it as plain Python, or raises ValueError with a complaint that
follows `name=value`. Accepts the scalars of Python, numpy and torch; never a bool for a number.
Loads neither numpy nor torch.
"""

import dataclasses
import difflib
import functools
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from enum import EnumMeta, StrEnum
from typing import Any, TypeVar

from cb_rollout.errors import RolloutError

T = TypeVar("T")
Check = Callable[[Any], Any]

# Largest whole number of a setting without a bound of its own: fits 32 bits, and twice it 64.
MAX_INTEGER = 2**31 - 1

# Most characters of a refused value in a message.
MAX_SHOWN = 200

# Narrower than `int` and `float`, which take white space, "+5", "1_000" and digits of any script.
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]*")
_REAL_NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def setting(default: Any, help_text: str, check: Check | type[StrEnum] | None = None) -> Any:
    """Declare a field with its default, which is never checked, its help text and its check.

    `check` makes a value plain, or complains; an enum takes one of its words; None: a bool, or a
    whole number >= 0, as the default is.
    """
    check = check or (boolean if isinstance(default, bool) else integer(0))
    metadata: dict[str, Any] = {"help": help_text, "check": check}
    if isinstance(check, EnumMeta):
        words = [str(member) for member in check.__members__.values()]
        metadata |= {"check": one_of(*words, listed=True), "choices": words}
    # A dict has no hash; equal settings hash alike without the fields that are left open.
    return dataclasses.field(default=default, metadata=metadata, hash=default is not None)


def known_fields_only(
    error: type[RolloutError],
    synonyms: Mapping[str, str],
    renamed: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
) -> Callable[[type[T]], type[T]]:
    """Make a keyword dataclass raise `error` for an unknown field, with the right name.

    `synonyms` maps other projects' names to ours; `renamed` translates keywords that are accepted.
    """

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

        @functools.wraps(init)
        def checked(self: T, **keywords: Any) -> None:
            given = renamed(keywords)
            require_known(given, names, f"{cls.__name__} has no field", error, synonyms)
            init(self, **given)

        cls.__init__ = checked
        return cls

    return decorate


def require_known(
    given: Iterable[str],
    known: Collection[str],
    complaint: str,
    error: type[RolloutError],
    synonyms: Mapping[str, str] | None = None,
) -> None:
    """Raise `error` for an unknown name, after `complaint`, with its synonym or the nearest one."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = (synonyms or {}).get(name) or next(iter(close), None)
            hint = f"did you mean {meant!r}?" if meant else f"known: {', '.join(known) or 'none'}."
            raise error(f"{complaint} {name!r}; {hint}")


def check_fields(settings: Any, error: type[RolloutError]) -> None:
    """Check fields that are not at their defaults; raise `error`, or keep the plain values."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is field.default:
            continue
        try:
            # None is an empty collection.
            value = () if value is None and field.default == () else value
            plain = field.metadata["check"](value)
        except ValueError as complaint:
            raise error(f"{field.name}={shown(value)} {complaint}.") from None
        object.__setattr__(settings, field.name, plain)


def shown(value: Any) -> str:
    """Return a value as a message writes it: shortened, and without a huge number's digits."""
    try:
        text = repr(value)
    except ValueError:
        # Python writes no integer of more than 4300 digits.
        return "(a number of thousands of digits)"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def whole_number(text: str) -> int:
    """Read a whole number from text; each number has one spelling.

    Raises:
        ValueError: the text is anything but ASCII digits, without a leading zero, perhaps after a
            minus sign; or has thousands of digits.
    """
    if _WHOLE_NUMBER.fullmatch(text):
        with suppress(ValueError):
            return int(text)
    raise ValueError(f"{shown(text)} is not a whole number in plain digits, such as 5")


def real_number(text: str) -> float:
    """Read a finite number from text: ASCII digits, with a point or an exponent.

    Raises:
        ValueError: the text is anything else, or the number is too large for a float.
    """
    number = float(text) if _REAL_NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is not a number in plain digits, such as 0.5")
    return number


def boolean(value: Any) -> bool:
    """Accept True or False."""
    plain = _plain(value)
    if not isinstance(plain, bool):
        raise ValueError("is not True or False")
    return plain


def integer(
    least: int = -MAX_INTEGER,
    advice: str = "",
    *,
    most: int = MAX_INTEGER,
    also: tuple[str | None, ...] = (),
) -> Check:
    """Accept a whole number from `least` to `most`, and the values in `also` as they are."""
    range_text = f" >= {least}" if least > -MAX_INTEGER else ""
    range_text += "".join(f", nor {word!r}" for word in also if word)

    def check(value: Any) -> Any:
        if _is_one_of(value, also):
            return value
        plain = _plain(value)
        number = None
        with suppress(TypeError):
            number = None if isinstance(plain, bool) else operator.index(plain)
        if number is None or number < least:
            raise ValueError(f"is not a whole number{range_text}{advice}")
        if number > most:
            raise ValueError(f"is above {most}{advice}")
        return number

    return check


def number(is_in_range: Callable[[float], bool], complaint: str, *also: Any) -> Check:
    """Accept a real number in a range, and the values in `also` as they are."""

    def check(value: Any) -> Any:
        if _is_one_of(value, also):
            return value
        plain = _plain(value)
        is_real = isinstance(plain, numbers.Real) and not isinstance(plain, bool)
        real = math.nan
        with suppress(OverflowError):
            real = float(plain) if is_real else math.nan
        if math.isnan(real) or not is_in_range(real):
            raise ValueError(complaint)
        return real

    return check


def amount(unit: str, default: str | float | None) -> Check:
    """Accept a finite number >= 0 of some unit, or the default."""
    complaint = f"is neither {default!r} nor a finite number >= 0 of {unit}"
    return number(lambda v: 0 <= v < math.inf, complaint, default)


def one_of(*values: Any, listed: bool = False) -> Check:
    """Accept one of a few values; the first is the advice, unless all are `listed`."""
    complaint = f"is not available; leave it at {values[0]!r}"
    if listed:
        complaint = f"is not one of {', '.join(values)}"

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(complaint)
        return value

    return check


def token_ids(value: Any) -> tuple[int, ...]:
    """Accept one token id or several, or an array of them."""
    try:
        return tuple(map(integer(), value if _is_many(value) else (value,)))
    except ValueError:
        raise ValueError("is not made of token ids") from None


def token_sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    """Accept sequences of token ids, none of them empty."""
    if not _is_many(value) or not all(_is_many(sequence) and len(sequence) for sequence in value):
        raise ValueError(
            "is not a sequence of token-id sequences; encode each word with "
            "tokenizer(word, add_special_tokens=False).input_ids"
        )
    return tuple(map(token_ids, value))


def optional_path(value: Any) -> str | None:
    """Accept a path, and None."""
    if value is not None and not (isinstance(value, str | os.PathLike) and str(value)):
        raise ValueError("is neither a path nor None")
    return None if value is None else os.fspath(value)


def strings(value: Any) -> tuple[str, ...]:
    """Accept one string or several, none of them empty."""
    many = (value,) if isinstance(value, str) else value
    if not _is_many(many) or not all(isinstance(text, str) and text for text in many):
        raise ValueError("is not a text, or several, each not empty")
    return tuple(many)


def biases(largest: float, *, of_sequences: bool = False) -> Check:
    """Accept a dict of token id, or of tuples or pairs `of_sequences`, to bias; -inf forbids."""
    bias = number(lambda v: abs(v) <= largest or v == -math.inf, "")

    def check(value: Any) -> dict[Any, float]:
        if not (isinstance(value, Mapping) or of_sequences):
            raise ValueError("is not a dict of token id to number")
        try:
            pairs = list(value.items() if isinstance(value, Mapping) else value)
            read = token_sequences if of_sequences else token_ids
            plain = {key: added for name, added in pairs for key in read([name])}
        except (TypeError, ValueError):
            if not of_sequences:
                raise
            raise ValueError("is not a dict of token-id tuple to number") from None
        for key, added in plain.items():
            try:
                plain[key] = bias(added)
            except ValueError:
                token = key[-1] if isinstance(key, tuple) else key
                complaint = f"gives token {token} {added!r}, which is not a finite number"
                raise ValueError(f"{complaint}; -inf forbids a token") from None
        return plain

    return check


def callables(value: Any) -> tuple[Any, ...]:
    """Accept a list or tuple of callables."""
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise ValueError("is not a list or tuple of callables; one processor is (processor,)")
    return tuple(value)


def _is_one_of(value: Any, words: Iterable[Any]) -> bool:
    return any(value is word or (isinstance(value, str) and value == word) for word in words)


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _is_many(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return False
    return getattr(value, "ndim", 1) > 0
