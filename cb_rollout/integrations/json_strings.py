"""Texts that a JSON schema allows, as patterns that xgrammar 0.2.8 enforces.

Owns the reading of patterns. Left alone, xgrammar ignores an anchor in the middle, takes `x(ab+)?`
to match xb, and lets quotation marks, backslashes and control characters stand in the JSON
unescaped. So every set of characters is written out, without these, and a mark that matches
nothing has xgrammar read the pattern by its grammar instead of its automaton. Lengths and some
formats, which xgrammar enforces only partly, become patterns too. Called on any thread.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from cb_rollout.errors import InvalidRequestError

LENGTHS = ("minLength", "maxLength")

# xgrammar's own patterns of these hold.
KEPT_FORMATS = ("duration", "ipv6", "uri", "uri-reference", "uri-template", "uuid")

# Years 1000 to 2999.
_DAY = (
    "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8])"
)
_LEAP_YEAR = "([12][0-9](0[48]|[2468][048]|[13579][26])|(12|16|20|24|28)00)"
_DATE = f"([12][0-9]{{3}}-({_DAY})|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR_MINUTE})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]{1,9}(-[A-Za-z0-9]{1,9}){0,4}"
_ATOM = "[A-Za-z0-9_+-]{1,20}"

# These are narrower than the format: no leap seconds, no quoted names.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "email": rf"{_ATOM}(\.{_ATOM}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,3}}",
}

# Any character.
_ANY = r"[\d\D]"

# Characters of one property's name, and of the pattern of all other names: compilation takes
# seconds beyond.
MAX_NAME_CHARACTERS, MAX_NAMES_PATTERN = 64, 1 << 14

# xgrammar's automata read only ASCII.
_MARK = "\u00e9{0}"

Ranges = list[tuple[int, int]]
_LAST, _CARET = 0x10FFFF, ord("^")
# Control characters, the quotation mark, the backslash and surrogates.
_ESCAPED_IN_JSON: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
_ENDS_OF_LINES: Ranges = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]
_SPACES: Ranges = [
    (0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_ESCAPED_SETS: dict[str, Ranges] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": _SPACES,
}

_ESCAPE = r"\\(?:[dDwWsS]|[/^$.*+?()\[\]{}|-]|\\|u[0-9a-fA-F]{4})"
_ITEM = rf"(?:{_ESCAPE}|[^\]\\\[])"
_ITEMS = re.compile(rf"({_ITEM})(?:-({_ITEM}))?")
_TOKEN = re.compile(
    rf"\[(?P<negated>\^|(?!\^))(?P<class>{_ITEM}+)\]"
    rf"|(?P<atom>{_ESCAPE}|[^\\\[\]{{}}()*+?|^$])"
    r"|(?P<open>\((?:\?:)?)"
    r"|(?P<repeat>(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??)"
    r"|(?P<anchor>[\^$])"
    r"|[|)]"
)


def read_string(path: str, schema: dict[str, Any]) -> None:
    """Rewrite the keywords of a schema of strings to what xgrammar enforces, in place."""
    lengths = [name for name in LENGTHS if name in schema]
    others = [name for name in ("format", "pattern") if name in schema]
    if len(others) > 1 or (others and lengths):
        second = [*others, *lengths][1]
        raise unenforced(path, second, "leave one of them out", f" beside `{others[0]}`")
    if "pattern" in schema:
        schema["pattern"] = enforced_pattern(path, schema["pattern"])
    elif "format" in schema:
        _read_format(path, schema)
    elif lengths:
        least = count(path, schema, "minLength")
        most = count(path, schema, "maxLength") if "maxLength" in schema else ""
        if most != "" and least > most:
            raise refusal(f"`minLength` at {path} is {least}, above `maxLength`={most}; lower it")
        schema["pattern"] = enforced_pattern(path, f"{_ANY}{{{least},{most}}}")
        for name in lengths:
            del schema[name]


def _read_format(path: str, schema: dict[str, Any]) -> None:
    name = schema["format"]
    if name in KEPT_FORMATS:
        return
    if not isinstance(name, str) or name not in FORMATS:
        allowed = ", ".join(sorted([*FORMATS, *KEPT_FORMATS]))
        advice = f"leave it out, or use one of {allowed}"
        raise unenforced(path, "format", advice, f"={shown(name)}")
    schema["pattern"] = enforced_pattern(path, FORMATS[name])
    del schema["format"]


def enforced_pattern(path: str, pattern: Any) -> str:
    """Return a pattern of the same meaning, or of a narrower one, that xgrammar enforces.

    Args:
        path: where the pattern stands in the schema, for the error.
        pattern: regular expression of ECMA-262, that may match anywhere in a string.

    Returns:
        The pattern of the whole string.

    Raises:
        InvalidRequestError: the pattern has a construct that xgrammar does not enforce.
    """
    if not isinstance(pattern, str):
        raise refusal(f"`pattern` at {path} is no text; give it a regular expression")
    parts = []
    place = 0
    can_repeat = False
    while place < len(pattern):
        token = _TOKEN.match(pattern, place)
        if token is None:
            raise _unread(path, pattern[place], place, "write the pattern without it")
        if token[0] == "(" and pattern.startswith("(?", place):
            raise _unread(path, pattern[place : place + 3], place, "use ( or (?: for a group")
        text = token[0]
        is_set = bool(token["class"] or token["atom"])
        if token["anchor"]:
            is_outermost = place == 0 if text == "^" else token.end() == len(pattern)
            if not is_outermost:
                raise _unread(path, text, place, "use ^ and $ at the ends only, such as ^(a|b)$")
            text = ""
        elif token["repeat"] and not can_repeat:
            raise _unread(path, text, place, "repeat a character or a group, and only once")
        elif is_set:
            text = _written_out(token)
            if not text:
                raise _unread(path, token[0], place, "name characters that JSON does not escape")
        parts.append(text)
        can_repeat = is_set or text == ")"
        place = token.end()
    return "".join(parts) + _MARK


def _written_out(token: re.Match[str]) -> str:
    """Return the characters of an atom or a class that JSON does not escape, or nothing."""
    ranges: Ranges = []
    if token["atom"] == ".":
        ranges = _others(_ENDS_OF_LINES)
    elif token["atom"]:
        ranges = _ranges(token["atom"])
    else:
        for first, last in _ITEMS.findall(token["class"]):
            start, end = _ranges(first), _ranges(last)
            ranges += [(start[0][0], end[0][1])] if last else start
    if token["negated"]:
        ranges = _others(ranges)
    unescaped = _others([*_others(ranges), *_ESCAPED_IN_JSON])
    if len(unescaped) == 1 and unescaped[0][0] == unescaped[0][1]:
        return _literal(unescaped[0][0])
    # xgrammar takes a first ^ for a negation, escaped or not.
    characters = [(low, high) for low, high in unescaped if low != _CARET]
    from_caret = [high for low, high in unescaped if low == _CARET]
    for high in from_caret:
        if high > _CARET:
            characters.insert(0, (_CARET + 1, high))
        characters.append((_CARET, _CARET))
    written = "".join(f"{_literal(low)}-{_literal(high)}" for low, high in characters)
    return f"[{written}]" if written else ""


def _ranges(item: str) -> Ranges:
    """Return the code points of a character or an escape."""
    name = item[1:2] if item.startswith("\\") else ""
    if name in ("d", "w", "s"):
        return _ESCAPED_SETS[name]
    if name in ("D", "W", "S"):
        return _others(_ESCAPED_SETS[name.lower()])
    code = int(item[2:], 16) if name == "u" else ord(item[-1:] or "a")
    return [(code, code)]


def _others(ranges: Ranges) -> Ranges:
    """Return all other code points."""
    others, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            others.append((start, low - 1))
        start = max(start, high + 1)
    if start <= _LAST:
        others.append((start, _LAST))
    return others


def _literal(code: int) -> str:
    character = chr(code)
    is_plain = character.isalnum() or code > 0xFFFF
    return character if is_plain else f"\\u{code:04x}"


def _unread(path: str, text: str, place: int, advice: str) -> InvalidRequestError:
    where = f" with {text[:40]!r} at its character {place + 1}"
    return unenforced(path, "pattern", advice, where)


def pattern_of_other_names(path: str, names: Iterable[str]) -> str:
    """Return a pattern of all names of a property but `names`, spelled without escapes."""
    tree: dict[str, Any] = {}
    for name in names:
        if len(name) > MAX_NAME_CHARACTERS:
            where = f" beside a name of more than {MAX_NAME_CHARACTERS} characters"
            raise unenforced(path, "additionalProperties", "set it to false", where)
        node = tree
        for character in name:
            node = node.setdefault(character, {})
        # The name ends here.
        node[""] = {}
    pattern = _other_endings(tree)
    if len(pattern) > MAX_NAMES_PATTERN:
        where = " beside so many names"
        raise unenforced(path, "additionalProperties", "set it to false", where)
    return enforced_pattern(path, pattern)


def _other_endings(node: dict[str, Any]) -> str:
    # A name with another character is never spelled without an escape.
    following = [c for c in node if c >= " " and c not in '"\\']
    literals = [_literal(ord(character)) for character in following]
    branches = [f"[^{''.join(literals)}]{_ANY}*" if literals else f"{_ANY}+"]
    if "" not in node:
        branches.append("")
    for character, literal in zip(following, literals, strict=True):
        branches.append(literal + _other_endings(node[character]))
    return f"({'|'.join(branches)})"


def count(path: str, schema: dict[str, Any], keyword: str) -> int:
    """Return a keyword's whole number of 31 bits, 0 where it is missing; refuse any other value."""
    value = schema.get(keyword, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise refusal(f"`{keyword}` at {path} is {shown(value, 40)}; use a whole number of 31 bits")
    return value


def shown(value: Any, max_characters: int = 80) -> str:
    """Return the beginning of a value's JSON, for an error."""
    return json.dumps(value)[:max_characters]


def unenforced(path: str, keyword: str, advice: str, where: str = "") -> InvalidRequestError:
    """Return the error of a keyword that xgrammar does not enforce, at a path or only `where`."""
    return refusal(f"xgrammar does not enforce `{keyword[:80]}` at {path}{where}; {advice}")


def refusal(why: str) -> InvalidRequestError:
    """Return the error of a schema that is not taken."""
    return InvalidRequestError(f"the JSON schema cannot be enforced: {why}.")
