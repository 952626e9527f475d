"""Declare settings dataclasses whose fields check themselves.

A check takes a value and returns it as plain Python, or raises ValueError with a message that
follows `name=value`. Numbers may be Python, numpy or torch scalars, but not bools. Loads neither
numpy nor torch.
"""

import dataclasses
import functools
import math
import numbers
import operator
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from enum import EnumMeta, StrEnum
from typing import Any, TypeVar

from cb_rollout.config import removed
from cb_rollout.config.nearest import hint, nearest_names
from cb_rollout.errors import InvalidRequestError, RolloutError

T = TypeVar("T")
Check = Callable[[Any], Any]

# Default upper bound of whole-number settings: it fits in 32 bits, and twice as much in 64 bits.
MAX_INTEGER = 2**31 - 1

# Maximum number of characters of a refused value in a message.
MAX_SHOWN = 200

# Narrower than `int` and `float`, which accept white space, "+5", "1_000" and digits of any script.
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]*")
_REAL_NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def setting(default: Any, help_text: str, check: Check | type[StrEnum] | None = None) -> Any:
    """Declare a field of a settings dataclass, with its default, help text and check.

    The default is never checked. `check` converts a value to plain Python, or raises; an enum class
    accepts its values; None accepts a bool or a whole number >= 0, depending on the default.
    """
    if check is None:
        check = integer(0)
        if isinstance(default, bool):
            check = boolean
    metadata: dict[str, Any] = {"help": help_text, "check": check}
    if isinstance(check, EnumMeta):
        words = [str(member) for member in check.__members__.values()]
        metadata["check"] = one_of(*words, listed=True)
        metadata["choices"] = words
    # Fields that default to None may hold a dict, which has no hash. Without these fields, equal
    # settings still have equal hashes.
    return dataclasses.field(default=default, metadata=metadata, hash=default is not None)


def known_fields_only(
    error: type[RolloutError],
    synonyms: Mapping[str, str],
    renamed: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
) -> Callable[[type[T]], type[T]]:
    """Make a keyword dataclass raise `error` for an unknown field, with a suggestion.

    `synonyms` maps other projects' names to this package's, for the suggestion; `renamed` returns
    the passed keywords under the names of the fields.
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


def checked_timeout(timeout: Any) -> float | None:
    """Return a timeout in seconds; None: no limit, which infinity means too.

    Raises `InvalidRequestError` for anything but None or a number >= 0.
    """
    if timeout is None:
        return None
    is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if not is_number or not float(timeout) >= 0:
        raise InvalidRequestError(
            f"timeout={timeout!r} is not a number >= 0 of seconds; None waits without a limit."
        )
    seconds = float(timeout)
    if seconds >= threading.TIMEOUT_MAX:
        # `threading` accepts no larger timeout.
        return None
    return seconds


def require_known(
    given: Iterable[str],
    known: Collection[str],
    complaint: str,
    error: type[RolloutError],
    synonyms: Mapping[str, str] | None = None,
) -> None:
    """Raise an error for the first unknown name, with advice on what to write instead.

    The advice is the replacement of a removed setting, a synonym, the nearest known name, or all
    known names.

    Args:
        given: the names to check.
        known: the names that exist.
        complaint: the error's text up to the name.
        error: the error's class.
        synonyms: maps other names to the known name with the same meaning.
    """
    for name in given:
        if name not in known:
            advice = _advice_on_unknown(name, known, synonyms or {})
            raise error(f"{complaint} {name!r}; {advice}")


def _advice_on_unknown(name: str, known: Collection[str], synonyms: Mapping[str, str]) -> str:
    if name in removed.SETTINGS:
        return f"{removed.SETTINGS[name].sentence}."
    meant = nearest_names(name, known, synonyms)
    if meant:
        return hint(meant)
    all_names = ", ".join(known) or "none"
    return f"known: {all_names}."


def check_fields(settings: Any, error: type[RolloutError]) -> None:
    """Check the fields that are not at their defaults: raise `error`, or store plain values."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is field.default:
            continue
        if value is None and field.default == ():
            # None is an empty collection.
            value = ()
        try:
            plain = field.metadata["check"](value)
        except ValueError as complaint:
            message = f"{field.name}={shown(value)} {complaint}"
            if isinstance(value, str) and (field.name, value) in removed.VALUES:
                message = f"{message}; {removed.VALUES[field.name, value].sentence}"
            raise error(f"{message}.") from None
        object.__setattr__(settings, field.name, plain)


def shown(value: Any) -> str:
    """Return a value as text for a message: shortened, and without the digits of a huge number."""
    try:
        text = repr(value)
    except ValueError:
        # Python does not convert an integer of more than 4300 digits to text.
        return "(a number of thousands of digits)"
    if len(text) > MAX_SHOWN:
        return f"{text[:MAX_SHOWN]}..."
    return text


def whole_number(text: str) -> int:
    """Read a whole number from text; each number has one spelling.

    Raises:
        ValueError: the text is anything but ASCII digits without a leading zero, optionally after
            a minus sign; or the text has thousands of digits.
    """
    if _WHOLE_NUMBER.fullmatch(text):
        with suppress(ValueError):
            return int(text)
    raise ValueError(f"{shown(text)} is not a whole number in plain digits, such as 5")


def real_number(text: str) -> float:
    """Read a finite number from text: ASCII digits, optionally a sign, a point and an exponent.

    Raises:
        ValueError: the text is anything else, or the number is too large for a float.
    """
    if _REAL_NUMBER.fullmatch(text):
        number = float(text)
        if math.isfinite(number):
            return number
    raise ValueError(f"{shown(text)} is not a number in plain digits, such as 0.5")


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
    """Accept a whole number from `least` to `most`, and the values in `also`."""
    range_text = ""
    if least > -MAX_INTEGER:
        range_text = f" >= {least}"
    for word in also:
        if word:
            range_text += f", nor {word!r}"

    def check(value: Any) -> Any:
        if _is_one_of(value, also):
            return value
        plain = _plain(value)
        number = None
        if not isinstance(plain, bool):
            with suppress(TypeError):
                number = operator.index(plain)
        if number is None or number < least:
            raise ValueError(f"is not a whole number{range_text}{advice}")
        if number > most:
            raise ValueError(f"is above {most}{advice}")
        return number

    return check


def number(is_in_range: Callable[[float], bool], complaint: str, *also: Any) -> Check:
    """Accept a real number in a range, and the values in `also`."""

    def check(value: Any) -> Any:
        if _is_one_of(value, also):
            return value
        plain = _plain(value)
        is_real = isinstance(plain, numbers.Real) and not isinstance(plain, bool)
        real = math.nan
        if is_real:
            with suppress(OverflowError):
                real = float(plain)
        if math.isnan(real) or not is_in_range(real):
            raise ValueError(complaint)
        return real

    return check


def amount(unit: str, default: str | float | None) -> Check:
    """Accept a finite number >= 0 of some unit, or the default."""
    complaint = f"is neither {default!r} nor a finite number >= 0 of {unit}"
    return number(lambda v: 0 <= v < math.inf, complaint, default)


def one_of(*values: Any, listed: bool = False) -> Check:
    """Accept one of a few values; an error suggests the first, or all if `listed`."""
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
    many = value
    if not _is_many(value):
        many = (value,)
    try:
        return tuple(map(integer(), many))
    except ValueError:
        raise ValueError("is not made of token ids") from None


def plain_token_ids(ids: Iterable[Any]) -> list[int]:
    """Return the token ids of one sequence as Python's integers.

    Args:
        ids: a sequence, or a one-dimensional array or tensor.

    Raises:
        TypeError: an id is a boolean or not a whole number; the message describes the id and gives
            its position.
    """
    if hasattr(ids, "tolist"):
        values = ids.tolist()  # type: ignore[attr-defined]
    else:
        values = list(ids)
    if set(map(type, values)) == {int}:
        return values
    return [_plain_token_id(value, position) for position, value in enumerate(values)]


def _plain_token_id(value: Any, position: int) -> int:
    plain = _plain(value)
    if isinstance(plain, bool):
        raise TypeError(f"{plain} at position {position} is a boolean, as in a mask")
    if isinstance(plain, float):
        raise TypeError(f"{plain!r} at position {position} is a float, and ids are whole numbers")
    try:
        return operator.index(plain)
    except TypeError as error:
        raise TypeError(f"at position {position}: {error}") from None


def token_sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    """Accept non-empty sequences of token ids."""
    if not _is_many(value) or not all(map(_is_filled_sequence, value)):
        raise ValueError(
            "is not a sequence of token-id sequences; encode each word with "
            "tokenizer(word, add_special_tokens=False).input_ids"
        )
    return tuple(map(token_ids, value))


def _is_filled_sequence(value: Any) -> bool:
    return _is_many(value) and len(value) > 0


def optional_path(value: Any) -> str | None:
    """Accept a path or None."""
    if value is None:
        return None
    is_path = isinstance(value, str | os.PathLike) and str(value)
    if not is_path:
        raise ValueError("is neither a path nor None")
    return os.fspath(value)


def strings(value: Any) -> tuple[str, ...]:
    """Accept one or several non-empty strings."""
    texts = value
    if isinstance(value, str):
        texts = (value,)
    if not _is_many(texts) or not all(map(_is_filled_text, texts)):
        raise ValueError("is not a text, or several, each not empty")
    return tuple(texts)


def _is_filled_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def biases(largest: float, *, of_sequences: bool = False) -> Check:
    """Accept a dict that maps token ids to biases; -inf forbids a token.

    With `of_sequences`, the keys are tuples of token ids, and (key, bias) pairs may replace the
    dict.
    """
    bias = number(lambda v: abs(v) <= largest or v == -math.inf, "")

    def check(value: Any) -> dict[Any, float]:
        if not (isinstance(value, Mapping) or of_sequences):
            raise ValueError("is not a dict of token id to number")
        if of_sequences:
            plain = _by_sequence(value)
        else:
            plain = _by_token(value)
        for key, added in plain.items():
            try:
                plain[key] = bias(added)
            except ValueError:
                token = key
                if isinstance(key, tuple):
                    token = key[-1]
                complaint = f"gives token {token} {added!r}, which is not a finite number"
                raise ValueError(f"{complaint}; -inf forbids a token") from None
        return plain

    return check


def _by_token(value: Mapping[Any, Any]) -> dict[Any, Any]:
    by_token: dict[Any, Any] = {}
    for token, added in value.items():
        (key,) = token_ids([token])
        by_token[key] = added
    return by_token


def _by_sequence(value: Any) -> dict[Any, Any]:
    pairs = value
    if isinstance(value, Mapping):
        pairs = value.items()
    by_sequence: dict[Any, Any] = {}
    try:
        for sequence, added in pairs:
            (key,) = token_sequences([sequence])
            by_sequence[key] = added
    except (TypeError, ValueError):
        raise ValueError("is not a dict of token-id tuple to number") from None
    return by_sequence


def callables(value: Any) -> tuple[Any, ...]:
    """Accept a list or tuple of callables."""
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise ValueError("is not a list or tuple of callables; one processor is (processor,)")
    return tuple(value)


def _is_one_of(value: Any, words: Iterable[Any]) -> bool:
    for word in words:
        if value is word:
            return True
        # An array would compare each of its elements with the word.
        if isinstance(value, str) and value == word:
            return True
    return False


def _plain(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def _is_many(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return False
    return getattr(value, "ndim", 1) > 0
