import importlib.util
import json
import random

import pytest
from tiny import char_tokenizer

from cb_rollout import InvalidRequestError
from cb_rollout.integrations.json_schema import enforceable
from cb_rollout.integrations.xgrammar import XGrammar

needs_xgrammar = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None, reason="xgrammar is missing"
)

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
ARRAY = {"type": "array", "items": {"type": "boolean"}}
OBJECT = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
BOOLEANS = {"type": "boolean"}

# A schema, and the keyword that the error names.
UNENFORCED = {
    "several": ({"allOf": [INTEGER, {"minimum": 3}]}, "allOf"),
    "sibling of allOf": ({"allOf": [INTEGER], "minimum": 3}, "minimum"),
    "sibling of anyOf": ({"anyOf": [INTEGER, STRING], "minimum": 3}, "minimum"),
    "type beside anyOf": ({"type": "integer", "anyOf": [{}, STRING]}, "type"),
    "sibling of $ref": ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "minimum": 3}, "minimum"),
    "sibling of enum": ({"enum": ["a", "bb"], "minLength": 2}, "minLength"),
    "not": ({**INTEGER, "not": {"const": 5}}, "not"),
    "if": ({**INTEGER, "if": {"minimum": 5}, "then": {"maximum": 7}}, "if"),
    "unique": ({**ARRAY, "uniqueItems": True}, "uniqueItems"),
    "contains": ({**ARRAY, "contains": {"const": True}}, "contains"),
    "min contains": ({**ARRAY, "minContains": 2}, "minContains"),
    "additional items": ({**ARRAY, "additionalItems": False}, "additionalItems"),
    "unevaluated items": ({**ARRAY, "unevaluatedItems": BOOLEANS}, "unevaluatedItems"),
    "dependent": ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "dependent schemas": ({**OBJECT, "dependentSchemas": {"a": {}}}, "dependentSchemas"),
    "dependencies": ({**OBJECT, "dependencies": {"a": ["b"]}}, "dependencies"),
    "unevaluated": ({**OBJECT, "unevaluatedProperties": BOOLEANS}, "unevaluatedProperties"),
    "required": ({**OBJECT, "required": ["c"]}, "required"),
    "two patterns": (
        {"type": "object", "patternProperties": {"a": BOOLEANS, "b": INTEGER}},
        "patternProperties",
    ),
    "pattern and names": ({**OBJECT, "patternProperties": {"a": BOOLEANS}}, "patternProperties"),
    "pattern and others": (
        {"type": "object", "patternProperties": {"a": {}}, "additionalProperties": BOOLEANS},
        "patternProperties",
    ),
    "names beside names": ({**OBJECT, "propertyNames": {"pattern": "^a$"}}, "propertyNames"),
    "names of none": (
        {"type": "object", "propertyNames": {"pattern": "a"}, "additionalProperties": False},
        "propertyNames",
    ),
    "names of another type": ({"type": "object", "propertyNames": INTEGER}, "type"),
    "names by reference": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": STRING}},
        "$ref",
    ),
    "names twice": (
        {"type": "object", "additionalProperties": BOOLEANS, "minProperties": 2},
        "minProperties",
    ),
    "multiple of a number": ({**NUMBER, "multipleOf": 0.5}, "multipleOf"),
    "multiple in half a range": ({**INTEGER, "multipleOf": 7, "minimum": 3}, "multipleOf"),
    "large divisor": ({**INTEGER, "multipleOf": 2000}, "multipleOf"),
    "broken divisor": ({**INTEGER, "multipleOf": 1.5}, "multipleOf"),
    "large bound": ({**NUMBER, "minimum": 1e19}, "minimum"),
    "broken bound": ({**INTEGER, "maximum": 0.5}, "maximum"),
    "length of a pattern": ({**STRING, "pattern": "a*", "minLength": 3}, "minLength"),
    "format and pattern": ({**STRING, "format": "date", "pattern": "1"}, "pattern"),
    "format and length": ({**STRING, "format": "uuid", "maxLength": 3}, "maxLength"),
    "unknown format": ({**STRING, "format": "iri"}, "format"),
    "format of a number": ({**INTEGER, "format": "int32"}, "format"),
    "anchor": ({**STRING, "pattern": "^a$|^b$"}, "pattern"),
    "quotation mark": ({**STRING, "pattern": '^"$'}, "pattern"),
    "line": ({**STRING, "pattern": r"^\n$"}, "pattern"),
    "backslash": ({**STRING, "pattern": r"^\\$"}, "pattern"),
    "word": ({**STRING, "pattern": r"\bfoo"}, "pattern"),
    "flags": ({**STRING, "pattern": "(?i)foo"}, "pattern"),
    "ahead": ({**STRING, "pattern": "(?=a)b"}, "pattern"),
    "twice": ({**STRING, "pattern": "a{2}{3}"}, "pattern"),
    "nothing": ({**STRING, "pattern": r"[^\s\S]"}, "pattern"),
    "without a type": ({"minimum": 3}, "minimum"),
    "required without a type": ({"required": ["a"]}, "required"),
    "of another type": ({**STRING, "minimum": 3}, "minimum"),
    "overlap": ({"oneOf": [INTEGER, NUMBER]}, "oneOf"),
    "equal numbers": ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
    "remote": ({"$ref": "https://example.com/a"}, "$ref"),
    "anchored": ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "$ref"),
    "dynamic": ({"$dynamicRef": "#a"}, "$dynamicRef"),
    "escaped": ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {}}}, "$ref"),
    "inner $id": ({"type": "array", "items": {"$id": "https://a.b", **STRING}}, "$id"),
    "nullable": ({**INTEGER, "nullable": True}, "nullable"),
    "unknown": ({**INTEGER, "maxValue": 3}, "maxValue"),
}


@pytest.mark.parametrize(("schema", "keyword"), UNENFORCED.values(), ids=UNENFORCED)
def test_a_keyword_that_is_not_enforced_is_named_with_its_place_and_a_way_out(schema, keyword):
    said = r"does not enforce `{}` at #.*; \w".format(keyword.replace("$", r"\$"))
    with pytest.raises(InvalidRequestError, match=said):
        enforceable(schema)


NESTED = {
    "#/properties/a": {"type": "object", "properties": {"a": ...}},
    "#/items": {"type": "array", "items": ...},
    "#/prefixItems/1": {"type": "array", "prefixItems": [STRING, ...]},
    "#/anyOf/1": {"anyOf": [STRING, ...]},
    "#/oneOf/0": {"oneOf": [..., STRING]},
    "#/allOf/0": {"allOf": [...]},
    "#/additionalProperties": {"type": "object", "additionalProperties": ...},
    "#/patternProperties/^a": {"type": "object", "patternProperties": {"^a": ...}},
    "#/$defs/a": {"$ref": "#/$defs/a", "$defs": {"a": ...}},
    "#/definitions/a/items": {
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/a"}},
        "definitions": {"a": {"type": "array", "items": ...}},
    },
}


def filled(schema, hole):
    if schema is ...:
        return hole
    if isinstance(schema, dict):
        return {key: filled(value, hole) for key, value in schema.items()}
    return [filled(item, hole) for item in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("path", NESTED)
def test_a_keyword_is_found_wherever_a_schema_may_stand(path):
    schema = filled(NESTED[path], {**INTEGER, "multipleOf": 0.5})
    with pytest.raises(InvalidRequestError) as caught:
        enforceable(schema)
    assert f"`multipleOf` at {path} " in str(caught.value)


EMPTY = {
    "narrow": {**NUMBER, "minimum": 1e-7, "maximum": 2e-7},
    "open and narrow": {**NUMBER, "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6},
    "below zero": {**NUMBER, "minimum": -2e-7, "maximum": -1e-7},
    "reversed": {**NUMBER, "minimum": 2, "maximum": 1},
    "one side open": {**NUMBER, "minimum": 2, "exclusiveMaximum": 2},
    "no integer": {**INTEGER, "exclusiveMinimum": 2, "exclusiveMaximum": 3},
    "no multiple": {**INTEGER, "multipleOf": 7, "minimum": 8, "maximum": 13},
    "lengths": {**STRING, "minLength": 3, "maxLength": 2},
    "items": {**ARRAY, "minItems": 3, "maxItems": 2},
    "properties": {**OBJECT, "minProperties": 3},
    "required": {**OBJECT, "required": ["a", "b"], "maxProperties": 1},
    "no branch": {"anyOf": []},
    "no value": {"enum": []},
    "value of another type": {"type": "integer", "enum": [1, "a"]},
    "false": {"type": "object", "properties": {"a": False}},
    "itself": {"$ref": "#"},
    "each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#"}}},
    "endless object": {
        "type": "object",
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
    },
    "endless array": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "endless branch": {
        "anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}],
        "$defs": {"a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}]}},
    },
}


@pytest.mark.parametrize("schema", EMPTY.values(), ids=EMPTY)
def test_a_schema_that_no_finite_text_obeys_is_refused(schema):
    with pytest.raises(InvalidRequestError, match=r"the JSON schema cannot be enforced: .* at #"):
        enforceable(schema)


MALFORMED = (
    {"properties": []},
    {"type": "object", "required": "a"},
    {**OBJECT, "required": [{}]},
    {"type": "array", "prefixItems": STRING},
    {"type": "array", "items": [STRING]},
    {"type": ["string", "string"]},
    {"type": [{}]},
    {"type": None},
    {"anyOf": STRING},
    {"$ref": 3},
    {"$ref": "#/$defs/a"},
    {**STRING, "pattern": 3},
    {**STRING, "minLength": "3"},
    {**STRING, "maxLength": 2**31},
    {**ARRAY, "maxItems": 2**32 + 1},
    {**ARRAY, "minItems": -1},
    {**STRING, "format": []},
    {**INTEGER, "minimum": True},
    {**INTEGER, "minimum": 2**63},
    {**NUMBER, "minimum": float("nan")},
    {"const": 2**63},
    {"const": {"a": [-(2**70)]}},
    {"const": {1, 2}},
    "string",
    None,
    [STRING],
    False,
)


@pytest.mark.parametrize("schema", MALFORMED, ids=repr)
def test_a_malformed_schema_is_an_invalid_request(schema):
    with pytest.raises(InvalidRequestError, match="the JSON schema cannot be enforced"):
        enforceable(schema)


def test_keywords_that_assert_nothing_are_taken_and_the_given_schema_is_not_changed():
    schema = {
        **OBJECT,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/a",
        "title": "A",
        "description": "uniqueItems",
        "default": {"not": 1},
        "examples": [{"allOf": []}],
        "$comment": "c",
        "deprecated": True,
        "readOnly": True,
        "writeOnly": False,
        "$defs": {"unused": {"uniqueItems": True}},
        "additionalProperties": {**STRING, "minLength": 1},
    }
    before = json.dumps(schema)
    enforceable(schema)
    assert json.dumps(schema) == before
    # A property, a value or a text of such a name asserts nothing.
    enforceable({"type": "object", "properties": {"not": STRING, "allOf": STRING}})
    enforceable({"const": {"not": {}, "uniqueItems": True}})


@needs_xgrammar
def test_no_wrong_text_passes_and_no_right_one_is_shut_out():
    from measure.json_schema import CASES, grammar_of_cb_rollout

    num_taken = 0
    for case in CASES:
        try:
            accepts = grammar_of_cb_rollout(case.schema)
        except InvalidRequestError:
            continue
        num_taken += 1
        assert [text for text in case.wrong if accepts(text)] == [], case
        assert [text for text in case.right if not accepts(text)] == [], case
    assert num_taken > 40


@needs_xgrammar
@pytest.mark.parametrize(
    ("keywords", "right", "wrong"),
    [
        ({"pattern": "^.{2}$"}, ["ab", "\u00e9\U0001f600"], ["a\t", 'a"', "a\\", "a\u2028"]),
        ({"pattern": "[ -~]"}, ["a", "!"], ['"', "\\", "\u00e9"]),
        ({"pattern": "^[^a]$"}, ["b", "\u00e9"], ["a", '"', "\n"]),
        ({"pattern": r"^\S\D$"}, ["ab", "1-"], [" b", "\u00a0b", "a1"]),
        ({"pattern": r"^[^\s]\s$"}, ["a ", "a\u00a0"], ["  ", "a\t"]),
        ({"pattern": "^[a\u00e9\U0001f600]+$"}, ["a\u00e9", "\U0001f600"], ["\u00e8"]),
        ({"pattern": r"^[\u00e0-\u00ff\]\^-]$"}, ["\u00e9", "]", "^", "-"], ["a", "\\"]),
        ({"pattern": "^a(b[0-9]{1,2})?Z$"}, ["aZ", "ab1Z"], ["a1Z", "abZ", "a12Z"]),
        ({"pattern": "(b|(b{1,2}|))"}, ["", "bb"], ["bbb"]),
        ({"pattern": "^[0-9](b[0-9]{2,})??$"}, ["1", "1b12"], ["112", "1b1"]),
        ({"pattern": "^.{0,1000}$"}, ["", "a" * 1000], ["a" * 1001]),
        ({"minLength": 2, "maxLength": 2}, ["ab", "\U0001f600b", "\u2028\u2028"], ["a\x01", 'a"']),
        ({"maxLength": 5000}, ["", "a" * 5000], ["a" * 5001]),
    ],
)
def test_a_pattern_means_the_same_to_xgrammar(keywords, right, wrong):
    from measure.json_schema import grammar_of_cb_rollout

    accepts = grammar_of_cb_rollout({"type": "string", **keywords})
    assert [text for text in right if not accepts(f'"{text}"')] == []
    assert [text for text in wrong if accepts(f'"{text}"')] == []


@needs_xgrammar
def test_a_class_of_any_characters_means_the_same_to_xgrammar():
    from measure.json_schema import grammar_of_cb_rollout

    characters = [chr(code) for code in range(32, 127) if chr(code) not in '"\\']
    rng = random.Random(0)
    classes = [{character} for character in characters]
    classes += [set(rng.sample(characters, rng.randint(2, 4))) for _ in range(40)]
    classes += [{"^", "_"}, {"^", "a"}, {"^", "]"}, {"-", "^"}]
    for members in classes:
        inside = "".join(f"\\u{ord(character):04x}" for character in sorted(members))
        for pattern, expected in ((f"[{inside}]", members), (f"[^{inside}]", None)):
            accepts = grammar_of_cb_rollout({"type": "string", "pattern": pattern})
            accepted = {character for character in characters if accepts(f'"{character}"')}
            assert accepted == (expected or set(characters) - members), pattern


@needs_xgrammar
def test_other_names_than_the_properties_are_kept_apart():
    from measure.json_schema import grammar_of_cb_rollout

    names = ["", "ab", "abc", "b\u00e9", "x/y", "q-[^]", '"', "\\", "\n", "\U0001f600"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "additionalProperties": BOOLEANS,
    }
    accepts = grammar_of_cb_rollout(schema)
    for name in names:
        assert not accepts(json.dumps({name: True}, ensure_ascii=False)), name
        assert not accepts(json.dumps({name: True})), name
    for name in ("a", "abcd", "b", "b\u00e8", "x", "q-[^]]", "\U0001f601", "zz"):
        assert accepts(json.dumps({name: True}, ensure_ascii=False)), name
        assert not accepts(json.dumps({name: None}, ensure_ascii=False)), name


TAKEN = {
    "pydantic": {
        "$defs": {
            "Cat": {"type": "object", "properties": {"k": {"const": "cat"}}, "required": ["k"]},
            "Dog": {"type": "object", "properties": {"k": {"enum": ["dog"]}}, "required": ["k"]},
        },
        "type": "object",
        "properties": {
            "pet": {
                "discriminator": {"propertyName": "k"},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            },
            "pair": {
                "type": "array",
                "prefixItems": [BOOLEANS, {"type": "null"}],
                "minItems": 2,
                "maxItems": 2,
            },
            "size": {"anyOf": [{**INTEGER, "minimum": 0, "maximum": 3}, {"type": "null"}]},
        },
        "required": ["pet", "pair", "size"],
    },
    "tree": {
        "type": "object",
        "properties": {"v": BOOLEANS, "n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["v", "n"],
    },
    "numbers": {
        "type": "array",
        "items": {"type": ["number", "null"], "minimum": 0.25, "exclusiveMaximum": 0.5},
        "minItems": 2,
        "maxItems": 3,
    },
    "names": {
        "type": "object",
        "propertyNames": {"minLength": 1, "maxLength": 2},
        "additionalProperties": {"enum": [1, 2.5, "x"]},
        "maxProperties": 2,
    },
    "texts": {
        "type": "array",
        "prefixItems": [
            {**STRING, "format": name}
            for name in ("date", "time", "date-time", "email", "ipv4", "hostname", "uuid")
        ],
    },
}


def drawn(grammar, tokenizer, rng):
    """Draw a text from a grammar, which prefers to close what is open."""
    import torch

    matcher, tokens = grammar.matcher(), []
    mask_V = torch.zeros(len(tokenizer), dtype=torch.bool)
    closing = set(tokenizer.convert_tokens_to_ids(list('"]},:')))
    spaces = set(tokenizer.convert_tokens_to_ids([" ", "\n"]))
    while True:
        mask_V.zero_()
        matcher.fill_allowed_tokens(mask_V)
        allowed = set(mask_V.nonzero()[:, 0].tolist())
        assert allowed, tokenizer.decode(tokens)
        if tokenizer.eos_token_id in allowed:
            return tokenizer.decode(tokens)
        allowed = allowed - spaces or allowed
        if allowed & closing and rng.random() < 0.5:
            allowed &= closing
        tokens.append(rng.choice(sorted(allowed)))
        assert matcher.accept_token(tokens[-1])


@needs_xgrammar
@pytest.mark.parametrize("name", TAKEN)
def test_texts_drawn_from_a_schema_obey_it(name, capfd):
    jsonschema = pytest.importorskip("jsonschema_rs")
    tokenizer, rng = char_tokenizer(), random.Random(0)
    grammar = XGrammar.from_json_schema(TAKEN[name], tokenizer, len(tokenizer))
    texts = {drawn(grammar, tokenizer, rng) for _ in range(30)}
    validator = jsonschema.Draft202012Validator(TAKEN[name], validate_formats=True)
    for text in texts:
        validator.validate(json.loads(text))
    assert len(texts) > 3
    assert capfd.readouterr() == ("", "")
