"""JSON schemas, as far as xgrammar 0.2.8 enforces them.

Owns the list of keywords and combinations that xgrammar enforces, as measured by
`scripts/measure/json_schema.py`. Where xgrammar enforces a keyword only partly, the schema is
rewritten if that helps: lengths, some formats, `oneOf`, and `additionalProperties` beside
`properties`. Any other keyword is refused, and so is a schema that no finite text obeys. Called on
any thread.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from cb_rollout.integrations.json_strings import (
    LENGTHS,
    count,
    enforced_pattern,
    pattern_of_other_names,
    read_string,
    refusal,
    shown,
    unenforced,
)

# Keywords that assert nothing. OpenAPI's `discriminator` only names the property by which branches
# differ.
ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "$schema", "$id", "$defs", "definitions", "discriminator",
}  # fmt: skip
LOWER_BOUNDS = {"minimum", "exclusiveMinimum"}
UPPER_BOUNDS = {"maximum", "exclusiveMaximum"}
BOUNDS = LOWER_BOUNDS | UPPER_BOUNDS
_PROPERTIES = {"properties", "additionalProperties", "patternProperties", "unevaluatedProperties"}
KEYWORDS_OF_TYPE = {
    "null": set(),
    "boolean": set(),
    "integer": BOUNDS | {"multipleOf"},
    "number": BOUNDS,
    "string": {*LENGTHS, "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"},
    "object": _PROPERTIES | {"required", "propertyNames", "minProperties", "maxProperties"},
}
# xgrammar reads the first of these that a schema has, and ignores its other keywords.
DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
KNOWN = ANNOTATIONS.union({"type"}, DECIDING, *KEYWORDS_OF_TYPE.values())

_BRANCHES = "write each case as a branch of `anyOf`"
_REFERENCE = "use a `$ref` such as #/$defs/NAME"
_LEAVE_OUT = "leave it out, and check the answer for it"
ADVICE = {
    "not": "name what is allowed instead",
    "if": _BRANCHES,
    "then": _BRANCHES,
    "else": _BRANCHES,
    "dependentRequired": _BRANCHES,
    "dependentSchemas": _BRANCHES,
    "dependencies": _BRANCHES,
    "additionalItems": "use `prefixItems`, and `items` for the rest",
    "nullable": 'add "null" to the `type`',
    "$anchor": _REFERENCE,
    "$dynamicRef": _REFERENCE,
    "$recursiveRef": _REFERENCE,
}

# Most decimals of a number with bounds: with more, xgrammar's arithmetic fails.
DECIMALS = 6

# The largest bound of a number, for the same reason.
MAX_NUMBER = 2**53

# Above this, xgrammar rounds an integer to a float, or fails.
MAX_INTEGER = 2**63 - 1

# The largest `multipleOf` of an integer, and the most values between its bounds.
MAX_DIVISOR = 1024
MAX_RANGE = 10_000

MAX_PATH_CHARACTERS = 200


@dataclass
class _Node:
    """A schema, and the schemas of which all, or any, must have a text so that it has one."""

    path: str
    schema: dict[str, Any]
    is_name: bool
    combine: Callable[[Iterable[bool]], bool] = all
    needed: list[int] = field(default_factory=list)


def enforceable(schema: Any) -> Any:
    """Return a JSON schema with the same meaning that xgrammar enforces completely.

    Args:
        schema: parsed JSON. It is not changed.

    Returns:
        A schema whose texts all obey `schema`. It may have fewer: a number with bounds has at most
        6 decimals, and an object has no property that `schema` does not allow by name, by pattern
        or by `additionalProperties`.

    Raises:
        InvalidRequestError: a keyword cannot be enforced, or no finite text obeys the schema.
    """
    try:
        root = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise refusal(f"it holds a value that JSON has not ({error}); leave it out") from error
    reader = _Reader(root)
    reader.read()
    reader.require_finite()
    return root


class _Reader:
    """Reads each schema that a root schema reaches once, and rewrites it in place."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._waiting: list[_Node] = []
        self._nodes: dict[int, _Node] = {}

    def read(self) -> None:
        """Read the root, and all that it reaches."""
        self._wait("#", self._root)
        while self._waiting:
            node = self._waiting.pop()
            first_node = self._nodes.get(id(node.schema))
            if first_node is None:
                self._nodes[id(node.schema)] = node
                self._read(node)
            elif first_node.is_name != node.is_name:
                paths = f"{first_node.path} and {node.path}"
                why = f"the schemas at {paths} are one, and only one is a name's"
                raise refusal(f"{why}; write it twice")

    def require_finite(self) -> None:
        """Refuse a schema that has no finite text, because each would contain another one."""
        finite: set[int] = set()
        num_before = -1
        while len(finite) > num_before:
            num_before = len(finite)
            # Most schemas are read before those that they need.
            for key, node in reversed(self._nodes.items()):
                if node.combine(other in finite for other in node.needed):
                    finite.add(key)
        for key, node in self._nodes.items():
            if key not in finite:
                why = f"the schema at {node.path} needs itself without end"
                raise refusal(f"{why}; let it end, by a branch or a property that is not required")

    def _wait(self, path: str, schema: Any, is_name: bool = False) -> list[int]:
        """Queue a schema; return its key, or nothing if it allows everything."""
        if len(path) > MAX_PATH_CHARACTERS:
            path = f"{path[:MAX_PATH_CHARACTERS]}..."
        if schema is True:
            return []
        if schema is False:
            raise refusal(f"the schema at {path} is false, which nothing obeys; leave it out")
        if not isinstance(schema, dict):
            raise refusal(f"{shown(schema)} at {path} is no schema; use an object")
        self._waiting.append(_Node(path, schema, is_name))
        return [id(schema)]

    def _read(self, node: _Node) -> None:
        path = node.path
        schema = node.schema
        for keyword in schema:
            if keyword not in KNOWN:
                raise unenforced(path, keyword, ADVICE.get(keyword, _LEAVE_OUT))
        if "$id" in schema and schema is not self._root:
            raise unenforced(path, "$id", "leave it out", " below the root")
        asserting = [keyword for keyword in schema if keyword not in ANNOTATIONS]
        deciding = _deciding_keyword(schema)
        if deciding is None:
            self._read_types(node, asserting)
            return
        others = [keyword for keyword in asserting if keyword != deciding]
        if deciding in ("const", "enum"):
            _read_values(node, deciding, others)
            return
        if node.is_name:
            raise unenforced(path, deciding, "use `pattern` or `enum`", " of a name")
        if others:
            raise unenforced(path, others[0], "move it into that schema", f" beside `{deciding}`")
        if deciding == "$ref":
            target_path, target = self._target(path, schema["$ref"])
            node.needed = self._wait(target_path, target)
        else:
            self._read_branches(node, deciding)

    def _target(self, path: str, reference: Any) -> tuple[str, Any]:
        """Return the target of a reference."""
        if not isinstance(reference, str):
            raise refusal(f"`$ref` at {path} is no text; use one such as #/$defs/NAME")
        names = reference.split("/")
        # xgrammar reads no escapes, and skips empty names.
        if names[0] != "#" or "" in names or "%" in reference or "~" in reference:
            where = f" of {shown(reference)}"
            raise unenforced(path, "$ref", _REFERENCE, where)
        target = self._root
        for name in names[1:]:
            if not isinstance(target, dict) or name not in target:
                raise refusal(f"`$ref` at {path} is {shown(reference)}, which leads nowhere")
            target = target[name]
        return reference, target

    def _read_branches(self, node: _Node, deciding: str) -> None:
        path = node.path
        branches = node.schema[deciding]
        if not isinstance(branches, list) or not branches:
            raise refusal(f"`{deciding}` at {path} has no branches; give it a list of schemas")
        if deciding == "allOf" and len(branches) > 1:
            raise unenforced(path, deciding, "merge them into one", " of several schemas")
        if deciding == "oneOf" and not self._are_apart(path, branches):
            advice = (
                "use `anyOf`, or give each branch a type or texts of its own, or a required "
                "property with texts of its own"
            )
            raise unenforced(path, deciding, advice, " of branches that may overlap")
        needed: list[int] = []
        has_free_branch = False
        for index, branch in enumerate(branches):
            keys = self._wait(f"{path}/{deciding}/{index}", branch)
            needed.extend(keys)
            if not keys:
                has_free_branch = True
        # A branch that allows everything has a finite text.
        if not has_free_branch:
            node.combine = any
            node.needed = needed
        if deciding == "oneOf":
            # xgrammar prints a warning if it cannot tell that they are disjoint.
            node.schema["anyOf"] = node.schema.pop("oneOf")

    def _are_apart(self, path: str, branches: list[Any]) -> bool:
        """Return whether the types or strings of two branches show that no text obeys both."""
        schemas = [self._resolved(path, branch) for branch in branches]
        if not all(isinstance(schema, dict) for schema in schemas):
            return False
        if _share_nothing(map(_type_names, schemas)):
            return True
        if _share_nothing(map(_texts, schemas)):
            return True
        required = schemas[0].get("required")
        if not isinstance(required, list):
            return False
        for name in required:
            if _share_nothing(_texts_of_property(schema, name) for schema in schemas):
                return True
        return False

    def _resolved(self, path: str, branch: Any) -> Any:
        """Return the schema that a branch's references lead to."""
        seen: set[int] = set()
        while isinstance(branch, dict) and "$ref" in branch and id(branch) not in seen:
            seen.add(id(branch))
            _, branch = self._target(path, branch["$ref"])
        return branch

    def _read_types(self, node: _Node, asserting: list[str]) -> None:
        path = node.path
        schema = node.schema
        if "type" not in schema:
            _add_type(node, asserting)
        types = _types(path, schema) if "type" in schema else []
        if node.is_name and types != ["string"]:
            raise unenforced(path, "type", 'use "string"', " of a name")
        _require_keywords_of(types, path, asserting)
        if "string" in types:
            read_string(path, schema)
        if "integer" in types or "number" in types:
            _read_number(path, schema, types)
        needed: list[int] = []
        if "array" in types:
            needed.extend(self._read_array(path, schema))
        if "object" in types:
            needed.extend(self._read_object(path, schema))
        # Any other type has a finite text.
        if types and set(types) <= {"array", "object"}:
            node.needed = needed

    def _read_array(self, path: str, schema: dict[str, Any]) -> list[int]:
        """Read an array's keywords; return the schemas that each of its texts must contain."""
        if schema.get("unevaluatedItems", False) is not False:
            raise unenforced(path, "unevaluatedItems", "use `items`")
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise refusal(f"`prefixItems` at {path} is no list; give it a list of schemas")
        if True in prefix:
            raise unenforced(path, "prefixItems", "use {}", " of true")
        needed: list[int] = []
        for index, item in enumerate(prefix):
            needed.extend(self._wait(f"{path}/prefixItems/{index}", item))
        least = count(path, schema, "minItems")
        most = count(path, schema, "maxItems")
        if "maxItems" in schema and least > most:
            raise refusal(f"`minItems` at {path} is {least}, above `maxItems`={most}; lower it")
        if "items" in schema and schema["items"] is not False:
            keys = self._wait(f"{path}/items", schema["items"])
            if least > len(prefix):
                needed.extend(keys)
        elif not prefix and ("minItems" in schema or "maxItems" in schema):
            raise refusal(f"the array at {path} has a length but no `items`; add `items`")
        return needed

    def _read_object(self, path: str, schema: dict[str, Any]) -> list[int]:
        """Read an object's keywords; return the schemas that each of its texts must contain."""
        if schema.get("unevaluatedProperties", False) is not False:
            raise unenforced(path, "unevaluatedProperties", "use `additionalProperties`")
        properties = _mapping(path, schema, "properties")
        required = schema.get("required", [])
        if not isinstance(required, list):
            raise refusal(f"`required` at {path} is no list; give it a list of names")
        for name in required:
            if not isinstance(name, str) or name not in properties:
                raise unenforced(path, "required", "add it to `properties`", f" of {shown(name)}")
        needed: list[int] = []
        for name, value in properties.items():
            keys = self._wait(f"{path}/properties/{name}", value)
            if name in required:
                needed.extend(keys)
        has_other_names = self._read_other_names(path, schema, properties)
        least = count(path, schema, "minProperties")
        most = count(path, schema, "maxProperties")
        if has_other_names and least > 1:
            where = " above 1, as a name may come twice"
            raise unenforced(path, "minProperties", "leave it out, or use `required`", where)
        if not has_other_names and least > len(properties):
            raise refusal(
                f"`minProperties` at {path} is {least}, but only {len(properties)} may be"
            )
        if "maxProperties" in schema and most < max(least, len(required)):
            raise refusal(f"`maxProperties` at {path} is {most}, below what must be; raise it")
        return needed

    def _read_other_names(
        self, path: str, schema: dict[str, Any], properties: dict[str, Any]
    ) -> bool:
        """Read the keywords for unnamed properties; return whether these are allowed."""
        patterns = _mapping(path, schema, "patternProperties")
        additional = schema.get("additionalProperties", False)
        if "propertyNames" in schema:
            if properties or patterns or schema.get("additionalProperties") is False:
                where = " beside named properties, or if no others are allowed"
                raise unenforced(path, "propertyNames", "leave it out", where)
            self._wait(f"{path}/propertyNames", schema["propertyNames"], is_name=True)
        if patterns:
            if len(patterns) > 1 or properties or additional is not False:
                where = " but for one pattern, without other properties"
                raise unenforced(path, "patternProperties", "leave those out", where)
            place = f"{path}/patternProperties"
            pattern, value = next(iter(patterns.items()))
            self._wait(f"{place}/{pattern}", value)
            schema["patternProperties"] = {enforced_pattern(place, pattern): value}
        if additional is not False:
            self._wait(f"{path}/additionalProperties", additional)
            if properties:
                # xgrammar reads an escaped spelling of a property's name as a different name.
                names = pattern_of_other_names(path, properties)
                schema["patternProperties"] = {names: additional}
                schema["additionalProperties"] = False
        return bool(patterns) or "propertyNames" in schema or additional is not False


def _deciding_keyword(schema: dict[str, Any]) -> str | None:
    """Return the only keyword of a schema that xgrammar reads; None if it reads all."""
    for keyword in DECIDING:
        if keyword in schema:
            return keyword
    return None


def _add_type(node: _Node, asserting: list[str]) -> None:
    """Give a schema the type that xgrammar takes it to have."""
    if node.is_name:
        node.schema["type"] = "string"
    elif {"properties", "additionalProperties"} & set(asserting):
        node.schema["type"] = "object"
    elif {"items", "prefixItems"} & set(asserting):
        node.schema["type"] = "array"
    elif asserting:
        raise unenforced(node.path, asserting[0], "add one", " without a `type`")


def _require_keywords_of(types: list[str], path: str, keywords: list[str]) -> None:
    """Refuse a keyword that asserts nothing about these types."""
    allowed = {"type"}
    for name in types:
        allowed |= KEYWORDS_OF_TYPE[name]
    for keyword in keywords:
        if keyword not in allowed:
            raise unenforced(path, keyword, "leave it out", f" of {' or '.join(types)}")


def _types(path: str, schema: dict[str, Any]) -> list[str]:
    value = schema["type"]
    types = value if isinstance(value, list) else [value]
    if not types or any(name not in list(KEYWORDS_OF_TYPE) for name in types):
        allowed = ", ".join(KEYWORDS_OF_TYPE)
        raise refusal(f"`type` at {path} is {shown(value)}; use {allowed}")
    if len(set(types)) < len(types):
        raise refusal(f"`type` at {path} is {shown(value)}; name each type once")
    return types


def _read_values(node: _Node, deciding: str, others: list[str]) -> None:
    path = node.path
    schema = node.schema
    values = [schema["const"]] if deciding == "const" else schema["enum"]
    if not isinstance(values, list) or not values:
        raise refusal(f"`enum` at {path} has no values; give it a list")
    surplus = [keyword for keyword in others if keyword != "type"]
    if surplus:
        advice = "leave it out, and name the values that obey it"
        raise unenforced(path, surplus[0], advice, f" beside `{deciding}`")
    types = _types(path, schema) if "type" in schema else list(KEYWORDS_OF_TYPE)
    for value in values:
        what = f"{shown(value)} of `{deciding}` at {path}"
        if not any(_has_type(value, name) for name in types):
            raise refusal(f"{what} is not {' or '.join(types)}; leave it out")
        if node.is_name and not isinstance(value, str):
            raise refusal(f"{what} is no name; use a text")
        if not _is_exact(value):
            raise refusal(f"{what} has an integer of more than 63 bits; use a text")


def _is_exact(value: Any) -> bool:
    """Return whether xgrammar writes a value unchanged."""
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list):
        return all(map(_is_exact, value))
    return not isinstance(value, int) or abs(value) <= MAX_INTEGER


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _has_type(value: Any, name: str) -> bool:
    if name == "integer":
        return _type_of(value) == "number" and value == int(value)
    return _type_of(value) == name


def _share_nothing(sets: Iterable[set[str] | None]) -> bool:
    """Return whether no two sets have a common element; None is a set that may hold anything."""
    seen: set[str] = set()
    for names in sets:
        if names is None or names & seen:
            return False
        seen |= names
    return True


def _type_names(schema: dict[str, Any]) -> set[str] | None:
    """Return the types of a schema's values; None if the schema does not say."""
    if "const" in schema:
        return {_type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return set(map(_type_of, schema["enum"]))
    if "type" not in schema:
        return None
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if name == "integer" else str(name) for name in names}


def _texts(schema: dict[str, Any]) -> set[str] | None:
    """Return a schema's values if it lists them and all are strings, else None."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return set(values)
    return None


def _texts_of_property(schema: dict[str, Any], name: Any) -> set[str] | None:
    """Return the strings that a required property may have; None if it may have any."""
    required = schema.get("required")
    properties = schema.get("properties")
    if not isinstance(required, list) or name not in required:
        return None
    if not isinstance(properties, dict) or not isinstance(name, str):
        return None
    value = properties.get(name)
    return _texts(value) if isinstance(value, dict) else None


def _mapping(path: str, schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise refusal(f"`{keyword}` at {path} is {shown(value)}; give it schemas by name")
    return value


def _bounds(
    path: str, schema: dict[str, Any], step: Decimal, largest: int
) -> tuple[Decimal | None, Decimal | None]:
    """Return the smallest and largest multiple of `step` within a schema's bounds."""
    lows: list[Decimal] = []
    highs: list[Decimal] = []
    for keyword, value in schema.items():
        if keyword not in BOUNDS:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal(f"`{keyword}` at {path} is {shown(value)}; use a number")
        if abs(value) > largest:
            raise unenforced(path, keyword, _LEAVE_OUT, f" beyond {largest:,}")
        # The text of a float is the number that the schema names.
        bound = Decimal(repr(value))
        is_exclusive = keyword.startswith("exclusive")
        if keyword in LOWER_BOUNDS:
            low = bound.quantize(step, ROUND_CEILING)
            if is_exclusive and low == bound:
                low += step
            lows.append(low)
        else:
            high = bound.quantize(step, ROUND_FLOOR)
            if is_exclusive and high == bound:
                high -= step
            highs.append(high)
    return max(lows, default=None), min(highs, default=None)


def _read_number(path: str, schema: dict[str, Any], types: list[str]) -> None:
    if "number" in types:
        if "multipleOf" in schema:
            raise unenforced(path, "multipleOf", _LEAVE_OUT, " of numbers")
        low, high = _bounds(path, schema, Decimal(10) ** -DECIMALS, MAX_NUMBER)
        if low is not None and high is not None and low > high:
            raise refusal(
                f"no number of {DECIMALS} decimals, which is all that xgrammar writes, lies "
                f"between the bounds at {path}; widen them, or use `enum`"
            )
    if "integer" in types:
        for keyword in BOUNDS & set(schema):
            value = schema[keyword]
            if isinstance(value, float) and value != int(value):
                raise unenforced(path, keyword, "use a whole number", f"={value} for integers")
        low, high = _bounds(path, schema, Decimal(1), MAX_INTEGER)
        if low is not None and high is not None and low > high:
            raise refusal(f"no integer lies between the bounds at {path}; widen them")
        if "multipleOf" in schema:
            _read_divisor(path, schema["multipleOf"], low, high)


def _read_divisor(path: str, divisor: Any, low: Decimal | None, high: Decimal | None) -> None:
    is_whole = isinstance(divisor, int) and not isinstance(divisor, bool)
    if not is_whole or not 1 <= divisor <= MAX_DIVISOR:
        raise unenforced(path, "multipleOf", _LEAVE_OUT, f" but for 1 to {MAX_DIVISOR:,}")
    if low is None and high is None:
        return
    if low is None or high is None or high - low >= MAX_RANGE:
        advice = f"give both, at most {MAX_RANGE:,} values apart"
        raise unenforced(path, "multipleOf", advice, " beside bounds")
    if int(high) // divisor * divisor < low:
        raise refusal(f"no multiple of {divisor} lies between the bounds at {path}; widen them")
