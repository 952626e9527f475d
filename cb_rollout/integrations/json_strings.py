"""Rewrite the strings of a JSON schema as patterns that xgrammar 0.2.8 enforces.

Owns the reading of patterns. xgrammar reads some patterns wrongly, and this module works around
each fault:

- It ignores an anchor in the middle. Such a pattern is refused here.
- It allows quotation marks, backslashes and control characters that JSON has to escape. Each set of
  characters is therefore written out, without these.
- Its automaton lets `x(ab+)?` match xb, and reads only ASCII. Each pattern therefore ends in a mark
  that is not ASCII and matches the empty text: xgrammar then reads it by its grammar, correctly.

xgrammar enforces lengths and some formats only partly, so they become patterns too. Called on any
thread.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from cb_rollout.errors import InvalidRequestError

LENGTHS = ("minLength", "maxLength")

# xgrammar's own patterns for these formats are correct.
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

# Most characters of a property's name: with more, compilation takes seconds.
MAX_NAME_CHARACTERS = 64

# Most characters of the pattern for all other names, for the same reason.
MAX_NAMES_PATTERN = 1 << 14

# xgrammar's automata read only ASCII.
_MARK = "\u00e9{0}"

# The first and the last code point of each range.
Ranges = list[tuple[int, int]]
_LAST_CODE_POINT = 0x10FFFF
_CARET = ord("^")
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
    """Rewrite the keywords of a string schema, in place, so that xgrammar enforces them."""
    keywords = [name for name in ("format", "pattern", *LENGTHS) if name in schema]
    # The two lengths may be combined, and no other keywords may.
    if len(keywords) > 1 and keywords != list(LENGTHS):
        where = f" beside `{keywords[0]}`"
        raise unenforced(path, keywords[1], "leave one of them out", where)
    if "pattern" in schema:
        schema["pattern"] = enforced_pattern(path, schema["pattern"])
    elif "format" in schema:
        _read_format(path, schema)
    elif keywords:
        _read_lengths(path, schema)


def _read_lengths(path: str, schema: dict[str, Any]) -> None:
    """Replace the length limits of a schema by an equivalent pattern."""
    least = count(path, schema, "minLength")
    repetitions = f"{{{least},}}"
    if "maxLength" in schema:
        most = count(path, schema, "maxLength")
        if least > most:
            raise refusal(f"`minLength` at {path} is {least}, above `maxLength`={most}; lower it")
        repetitions = f"{{{least},{most}}}"
    schema["pattern"] = enforced_pattern(path, _ANY + repetitions)
    for name in LENGTHS:
        schema.pop(name, None)


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
    """Return a pattern with the same or a narrower meaning that xgrammar enforces.

    Args:
        path: where the pattern stands in the schema, for the error.
        pattern: regular expression of ECMA-262, which may match anywhere in a string.

    Returns:
        The pattern of the whole string.

    Raises:
        InvalidRequestError: the pattern has a construct that xgrammar does not enforce.
    """
    if not isinstance(pattern, str):
        raise refusal(f"`pattern` at {path} is no text; give it a regular expression")
    enforced = ""
    position = 0
    can_repeat = False
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            raise _unread(path, pattern[position], position, "write the pattern without it")
        if token[0] == "(" and pattern.startswith("(?", position):
            group = pattern[position : position + 3]
            raise _unread(path, group, position, "use ( or (?: for a group")
        if token["repeat"] and not can_repeat:
            advice = "repeat a character or a group, and only once"
            raise _unread(path, token[0], position, advice)
        enforced += _enforced_token(path, token)
        can_repeat = _is_set(token) or token[0] == ")"
        position = token.end()
    return enforced + _MARK


def _is_set(token: re.Match[str]) -> bool:
    """Return whether a pattern's token matches one character of a set."""
    return bool(token["class"] or token["atom"])


def _enforced_token(path: str, token: re.Match[str]) -> str:
    """Return a token as xgrammar enforces it; nothing for a leading ^ or a final $."""
    text = token[0]
    if _is_set(token):
        characters = _written_out(token)
        if not characters:
            advice = "name characters that JSON does not escape"
            raise _unread(path, text, token.start(), advice)
        return characters
    if not token["anchor"]:
        return text
    is_at_its_end = token.start() == 0 if text == "^" else token.end() == len(token.string)
    if not is_at_its_end:
        advice = "use ^ and $ at the ends only, such as ^(a|b)$"
        raise _unread(path, text, token.start(), advice)
    return ""


def _written_out(token: re.Match[str]) -> str:
    """Return an atom's or a class's characters that JSON does not escape, or nothing."""
    if token["atom"] == ".":
        ranges = _complement(_ENDS_OF_LINES)
    elif token["atom"]:
        ranges = _ranges(token["atom"])
    else:
        ranges = _ranges_of_class(token["class"])
    if token["negated"]:
        ranges = _complement(ranges)
    unescaped = _complement([*_complement(ranges), *_ESCAPED_IN_JSON])
    if not unescaped:
        return ""
    first, last = unescaped[0]
    if len(unescaped) == 1 and first == last:
        return _literal(first)
    written = ""
    for first, last in _without_leading_caret(unescaped):
        written += f"{_literal(first)}-{_literal(last)}"
    return f"[{written}]"


def _without_leading_caret(ranges: Ranges) -> Ranges:
    """Move a ^ at the start of a range to the end: xgrammar reads a leading ^ as negation.

    It does so even where the ^ is escaped.
    """
    for index, (first, last) in enumerate(ranges):
        if first == _CARET:
            others = ranges[:index] + ranges[index + 1 :]
            if last > _CARET:
                others.insert(0, (_CARET + 1, last))
            return [*others, (_CARET, _CARET)]
    return ranges


def _ranges_of_class(text: str) -> Ranges:
    """Return the code points that a class lists between its brackets."""
    ranges: Ranges = []
    for first_item, last_item in _ITEMS.findall(text):
        ranges_of_first = _ranges(first_item)
        if last_item:
            first_code_point = ranges_of_first[0][0]
            last_code_point = _ranges(last_item)[0][1]
            ranges.append((first_code_point, last_code_point))
        else:
            ranges.extend(ranges_of_first)
    return ranges


def _ranges(item: str) -> Ranges:
    """Return the code points of a character or an escape."""
    if not item.startswith("\\"):
        return [(ord(item), ord(item))]
    name = item[1]
    if name in ("d", "w", "s"):
        return _ESCAPED_SETS[name]
    if name in ("D", "W", "S"):
        return _complement(_ESCAPED_SETS[name.lower()])
    code = int(item[2:], 16) if name == "u" else ord(name)
    return [(code, code)]


def _complement(ranges: Ranges) -> Ranges:
    """Return all code points outside the ranges."""
    complement: Ranges = []
    start = 0
    for first, last in sorted(ranges):
        if first > start:
            complement.append((start, first - 1))
        start = max(start, last + 1)
    if start <= _LAST_CODE_POINT:
        complement.append((start, _LAST_CODE_POINT))
    return complement


def _literal(code: int) -> str:
    character = chr(code)
    if character.isalnum() or code > 0xFFFF:
        return character
    return f"\\u{code:04x}"


def _unread(path: str, text: str, position: int, advice: str) -> InvalidRequestError:
    where = f" with {text[:40]!r} at its character {position + 1}"
    return unenforced(path, "pattern", advice, where)


def pattern_of_other_names(path: str, names: Iterable[str]) -> str:
    """Return a pattern for all property names except `names`, spelled without escapes."""
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
    """Return a pattern for all texts except those that lead from a node to the end of a name."""
    literal_of: dict[str, str] = {}
    for character in node:
        # A name with another character is never spelled without an escape.
        if character >= " " and character not in '"\\':
            literal_of[character] = _literal(ord(character))
    branches = [f"{_ANY}+"]
    if literal_of:
        branches = [f"[^{''.join(literal_of.values())}]{_ANY}*"]
    if "" not in node:
        branches.append("")
    for character, literal in literal_of.items():
        branches.append(literal + _other_endings(node[character]))
    return f"({'|'.join(branches)})"


def count(path: str, schema: dict[str, Any], keyword: str) -> int:
    """Return a keyword's 31-bit integer, or 0 if it is missing; refuse any other value."""
    value = schema.get(keyword, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise refusal(f"`{keyword}` at {path} is {shown(value, 40)}; use a whole number of 31 bits")
    return value


def shown(value: Any, max_characters: int = 80) -> str:
    """Return the beginning of a value's JSON, for an error."""
    return json.dumps(value)[:max_characters]


def unenforced(path: str, keyword: str, advice: str, where: str = "") -> InvalidRequestError:
    """Return the error for a keyword that xgrammar does not enforce, at a path or only `where`."""
    return refusal(f"xgrammar does not enforce `{keyword[:80]}` at {path}{where}; {advice}")


def refusal(why: str) -> InvalidRequestError:
    """Return the error for a schema that is refused."""
    return InvalidRequestError(f"the JSON schema cannot be enforced: {why}.")
