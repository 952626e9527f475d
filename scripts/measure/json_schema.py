"""Measure which keywords of JSON schema a grammar library enforces.

python scripts/measure/json_schema.py    # seconds
python scripts/measure/json_schema.py --suite jsonschema-4.26.0/json/tests/draft2020-12

Each case is a schema with JSON texts that obey it and texts that do not, among them spellings that
a model may find: an escaped name, a control character, a name that comes twice. A library enforces
a keyword if no wrong text passes. Compared are xgrammar as it is, xgrammar as cb_rollout uses it,
and, where it is installed, llguidance. `--suite` also runs a folder of the JSON-Schema-Test-Suite,
which `pip download --no-deps --no-binary :all: jsonschema==4.26.0` brings. Prints the tables of
`docs/sampling.md`.
"""

import argparse
import importlib.util
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xgrammar

from cb_rollout import InvalidRequestError
from cb_rollout.integrations.json_schema import enforceable
from cb_rollout.integrations.xgrammar import MAX_WHITESPACE

Accepts = Callable[[str], bool]

ABC = {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}
LETTER = {"type": "object", "required": ["k"], "properties": {"k": {"const": "x"}}}
OTHER_LETTER = {"type": "object", "required": ["k"], "properties": {"k": {"const": "y"}}}


@dataclass(frozen=True)
class Case:
    """A schema, and texts that obey it or do not."""

    keyword: str
    schema: Any
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def _string(keyword: str, right: Iterable[str], wrong: Iterable[str], **keywords: Any) -> Case:
    schema = {"type": "string", **keywords}
    texts = [json.dumps(text, ensure_ascii=False) for text in right]
    wrong_texts = [json.dumps(text, ensure_ascii=False) for text in wrong]
    return Case(keyword, schema, tuple(texts), tuple(wrong_texts))


def _object(keyword: str, right: Iterable[str], wrong: Iterable[str], **keywords: Any) -> Case:
    return Case(keyword, {"type": "object", **keywords}, tuple(right), tuple(wrong))


def _array(keyword: str, right: Iterable[str], wrong: Iterable[str], **keywords: Any) -> Case:
    return Case(keyword, {"type": "array", **keywords}, tuple(right), tuple(wrong))


def _number(
    keyword: str, kind: str, right: Iterable[str], wrong: Iterable[str], **keywords: Any
) -> Case:
    return Case(keyword, {"type": kind, **keywords}, tuple(right), tuple(wrong))


CASES = [
    Case("type", {"type": "integer"}, ("0", "-12"), ("1.5", '"1"', "01")),
    Case("type", {"type": ["null", "boolean"]}, ("null", "true"), ("0", "[]")),
    Case("const", {"const": {"a": [1, "x"]}}, ('{"a":[1,"x"]}',), ('{"a":[1]}', "1")),
    Case("const", {"const": 2**70}, (str(2**70),), (str(2**70 + 1), "1")),
    Case("enum", {"enum": ["a", 1, None]}, ('"a"', "1", "null"), ('"b"', "2")),
    Case("enum beside type", {"type": "string", "enum": ["a", "b"]}, ('"a"',), ("1", '"c"')),
    Case("enum beside another type", {"type": "string", "enum": ["a", 1]}, ('"a"',), ("1",)),
    Case("enum beside minLength", {"enum": ["a", "bb"], "minLength": 2}, ('"bb"',), ('"a"',)),
    _string("minLength, maxLength", ["ab", "a\u00e9c"], ["a", "abcd"], minLength=2, maxLength=3),
    Case("minLength, maxLength", {"type": "string", "minLength": 1}, ('"a"',), ('"\t"', '"\x01"')),
    _string("pattern", ["abba"], ["abc", ""], pattern="^[ab]+$"),
    _string("pattern", ["x", "xab"], ["xb", "xa"], pattern="^x(ab{1,2})?$"),
    Case("pattern", {"type": "string", "pattern": '^[^a"]$'}, ('"b"',), ('"a"', '"\\"', '"""')),
    Case("pattern", {"type": "string", "pattern": '^"$'}, ('"\\""',), ('"""', '"a"')),
    _string("pattern with anchors inside", ["a", "b"], ["ab"], pattern="^a$|^b$"),
    _string("pattern that looks ahead", ["b1"], ["bb"], pattern="^(?=.*1)[a-z0-9]+$"),
    _string("pattern beside minLength", ["aaa"], ["a", "bbb"], pattern="^a*$", minLength=3),
    _string("format: date", ["2024-02-29"], ["2023-02-30", "2024-1-1"], format="date"),
    _string("format: time", ["12:30:00Z"], ["12:30:60Z", "24:00:00Z"], format="time"),
    _string(
        "format: date-time",
        ["2024-02-29T01:02:03Z"],
        ["2024-02-30T01:02:03Z", "2024-02-29"],
        format="date-time",
    ),
    _string("format: duration", ["P1DT2H"], ["P", "1D"], format="duration"),
    _string("format: email", ["a.b@c.de"], ["a", "a@", "@b"], format="email"),
    _string("format: hostname", ["a-b.example"], ["-a", "a..b"], format="hostname"),
    _string("format: ipv4", ["127.0.0.1"], ["127.0.0", "027.0.0.1", "256.1.1.1"], format="ipv4"),
    _string("format: ipv6", ["::1", "fe80::1"], ["::1::", "12345::"], format="ipv6"),
    _string("format: uri", ["https://a.b/c?d=e"], ["a b", "//a"], format="uri"),
    _string(
        "format: uuid",
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567", "123e4567e89b12d3a456426614174000"],
        format="uuid",
    ),
    Case(
        "format: json-pointer",
        {"type": "string", "format": "json-pointer"},
        ('"/a/b"',),
        ('"a"', '"/\x01"'),
    ),
    _string("format: iri", ["http://a.b/"], ["", "\\x"], format="iri"),
    _string("format: regex", ["a+"], ["(", "*"], format="regex"),
    _string("format beside maxLength", ["::1"], ["1111:2222::"], format="ipv6", maxLength=4),
    _number(
        "bounds of integers",
        "integer",
        ["-5", "17"],
        ["-6", "18"],
        minimum=-5,
        maximum=17,
    ),
    _number(
        "exclusive bounds of integers",
        "integer",
        ["6"],
        ["5", "7"],
        exclusiveMinimum=5,
        exclusiveMaximum=7,
    ),
    _number(
        "bounds of numbers",
        "number",
        ["0.5", "-1", "0.25"],
        ["0.51", "-1.1", "2e0"],
        minimum=-1,
        maximum=0.5,
    ),
    _number(
        "exclusive bounds of numbers",
        "number",
        ["0.1"],
        ["0", "1", "-0.0", "1.0"],
        exclusiveMinimum=0,
        exclusiveMaximum=1,
    ),
    _number(
        "a narrow range of numbers",
        "number",
        ["1.5e-7"],
        ["", "0", "1e-6"],
        minimum=1e-7,
        maximum=2e-7,
    ),
    _number("multipleOf of integers", "integer", ["0", "14"], ["15"], multipleOf=7),
    _number(
        "multipleOf of integers",
        "integer",
        ["14"],
        ["15", "0"],
        multipleOf=7,
        minimum=3,
        maximum=30,
    ),
    _number("multipleOf beside one bound", "integer", ["14"], ["15", "0"], multipleOf=7, minimum=3),
    _number("multipleOf of numbers", "number", ["0.5", "1"], ["0.3"], multipleOf=0.5),
    _array("items", ["[]", "[true,false]"], ["[1]", "[true,null]"], items={"type": "boolean"}),
    _array(
        "minItems, maxItems",
        ["[1]", "[1,2]"],
        ["[]", "[1,2,3]"],
        items={"type": "integer"},
        minItems=1,
        maxItems=2,
    ),
    _array(
        "prefixItems",
        ["[true,1]"],
        ["[1,true]"],
        prefixItems=[{"type": "boolean"}, {"type": "integer"}],
    ),
    _array(
        "uniqueItems", ["[1,2]"], ["[1,1]", "[1,1.0]"], items={"type": "number"}, uniqueItems=True
    ),
    _array("contains", ["[1,true]"], ["[]", "[1]"], items={}, contains={"type": "boolean"}),
    _array(
        "contains, maxContains",
        ["[true]"],
        ["[true,true]"],
        items={"type": "boolean"},
        contains={"const": True},
        maxContains=1,
    ),
    _array(
        "unevaluatedItems",
        ["[true]"],
        ["[true,true]"],
        prefixItems=[{"type": "boolean"}],
        unevaluatedItems=False,
    ),
    _object("properties", ['{"a":null}'], ['{"a":1}'], properties=ABC),
    _object(
        "required",
        ['{"a":null,"c":null}'],
        ['{"b":null,"c":null}', "{}"],
        properties=ABC,
        required=["a"],
    ),
    _object(
        "required without properties",
        ['{"a":1}'],
        ["{}", '{"b":1}'],
        required=["a"],
        additionalProperties=True,
    ),
    _object(
        "additionalProperties: false",
        ['{"a":null}'],
        ['{"d":null}'],
        properties=ABC,
        additionalProperties=False,
    ),
    _object(
        "additionalProperties: {...}",
        ['{"x":true}'],
        ['{"x":1}'],
        additionalProperties={"type": "boolean"},
    ),
    _object(
        "additionalProperties beside properties",
        ['{"a":null,"x":true}', '{"ab":true}'],
        ['{"a":true}', '{"a":null,"x":1}', '{"a":null,"\\u0061":true}'],
        properties=ABC,
        additionalProperties={"type": "boolean"},
    ),
    _object(
        "patternProperties",
        ['{"ab":true}', "{}"],
        ['{"ab":1}'],
        patternProperties={"^[ab]+$": {"type": "boolean"}},
    ),
    _object(
        "patternProperties that overlap",
        ['{"a":true}'],
        ['{"b":1}', '{"b":true}'],
        patternProperties={"^[ab]$": {"type": "boolean"}, "^[bc]$": {"type": "integer"}},
    ),
    _object(
        "patternProperties beside additionalProperties",
        ['{"a":true,"c":1}'],
        ['{"a":1}', '{"c":true}'],
        patternProperties={"^a$": {"type": "boolean"}},
        additionalProperties={"type": "integer"},
    ),
    _object(
        "propertyNames",
        ['{"a":true}'],
        ['{"c":true}', '{"a":1}'],
        propertyNames={"pattern": "^[ab]$"},
        additionalProperties={"type": "boolean"},
    ),
    _object("propertyNames of enum", ['{"x":1}'], ['{"z":1}'], propertyNames={"enum": ["x", "y"]}),
    _object(
        "propertyNames beside properties",
        ['{"a":null}'],
        ['{"zz":null}'],
        propertyNames={"pattern": "^[ab]$"},
        properties={"a": {"type": "null"}, "zz": {"type": "null"}},
    ),
    _object(
        "minProperties, maxProperties",
        ['{"a":null,"c":null}'],
        ['{"a":null}', '{"a":null,"b":null,"c":null}'],
        properties=ABC,
        minProperties=2,
        maxProperties=2,
    ),
    _object(
        "minProperties of any names",
        ['{"x":true,"y":true}'],
        ['{"x":true}', '{"x":true,"x":true}'],
        additionalProperties={"type": "boolean"},
        minProperties=2,
    ),
    _object(
        "dependentRequired",
        ["{}", '{"a":null,"b":null}'],
        ['{"a":null}'],
        properties=ABC,
        dependentRequired={"a": ["b"]},
    ),
    _object(
        "dependentSchemas",
        ["{}", '{"a":null,"b":null}'],
        ['{"a":null}'],
        properties=ABC,
        dependentSchemas={"a": {"required": ["b"]}},
    ),
    _object(
        "unevaluatedProperties",
        ['{"a":null}'],
        ['{"d":null}'],
        properties=ABC,
        unevaluatedProperties=False,
    ),
    Case("anyOf", {"anyOf": [{"type": "null"}, {"type": "boolean"}]}, ("null", "true"), ("1", "")),
    Case(
        "anyOf beside other keywords",
        {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]},
        ("6", "0"),
        ("3", "null"),
    ),
    Case(
        "oneOf of branches apart",
        {"oneOf": [LETTER, OTHER_LETTER]},
        ('{"k":"x"}', '{"k":"y"}'),
        ('{"k":"z"}', "{}"),
    ),
    Case(
        "oneOf of branches that overlap",
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        ("1.5",),
        ("1",),
    ),
    Case("allOf of one schema", {"allOf": [{"type": "integer"}]}, ("1",), ("1.5", "null")),
    Case("allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}]}, ("3",), ("2", "null")),
    Case("not", {"type": "integer", "not": {"const": 5}}, ("4",), ("5",)),
    Case(
        "if, then, else",
        {"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}, "else": {"const": 0}},
        ("6", "0"),
        ("8", "1"),
    ),
    Case("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, ("null",), ("1",)),
    Case("$ref to itself", {"type": "array", "items": {"$ref": "#"}}, ("[]", "[[]]"), ("[1]",)),
    Case(
        "$ref without end",
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        (),
        ("[]", "[[]]"),
    ),
    Case(
        "$ref beside other keywords",
        {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}},
        ("3",),
        ("2",),
    ),
    Case(
        "$anchor",
        {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}},
        ("null",),
        ("1",),
    ),
    Case(
        "$dynamicRef",
        {"$dynamicRef": "#x", "$defs": {"a": {"$dynamicAnchor": "x", "type": "null"}}},
        ("null",),
        ("1",),
    ),
    Case("keywords without type", {"minimum": 3}, ("3", "null"), ("2",)),
    Case("false", {"type": "object", "properties": {"a": False}}, ("{}",), ('{"a":1}',)),
]


def grammar_of_xgrammar(schema: Any) -> Accepts:
    """Compile a schema; return whether a text obeys it. Raises where xgrammar refuses it."""
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([]), cache_enabled=False)
    compiled = compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=MAX_WHITESPACE)

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_terminated()

    return accepts


def grammar_of_cb_rollout(schema: Any) -> Accepts:
    """As `grammar_of_xgrammar`, of what cb_rollout lets xgrammar compile."""
    return grammar_of_xgrammar(enforceable(schema))


def grammar_of_llguidance(schema: Any) -> Accepts:
    """As `grammar_of_xgrammar`, of llguidance."""
    llguidance = importlib.import_module("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if is_error:
        raise ValueError(messages[0])

    def accepts(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()

    return accepts


LIBRARIES = {
    "xgrammar": grammar_of_xgrammar,
    "cb_rollout": grammar_of_cb_rollout,
    "llguidance": grammar_of_llguidance,
}


@dataclass
class Count:
    """Schemas, and those refused; texts of the others, and those answered wrongly."""

    schemas: int = 0
    refused: int = 0
    right: int = 0
    shut_out: int = 0
    wrong: int = 0
    passed: int = 0

    def add(self, case: Case, compile_it: Callable[[Any], Accepts]) -> None:
        """Compile a case's schema, and match its texts."""
        self.schemas += 1
        try:
            accepts = compile_it(case.schema)
        except (InvalidRequestError, RuntimeError, ValueError):
            self.refused += 1
            return
        self.right += len(case.right)
        self.shut_out += sum(not accepts(text) for text in case.right)
        self.wrong += len(case.wrong)
        self.passed += sum(map(accepts, case.wrong))

    def __str__(self) -> str:
        if self.refused == self.schemas:
            return "refused"
        if self.passed:
            return f"{self.passed} of {self.wrong} wrong pass"
        return "partly refused" if self.refused else "enforced"


def cases_of_suite(folder: Path) -> list[Case]:
    """Return the tests of a folder of the JSON-Schema-Test-Suite."""
    cases = []
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            texts = defaultdict(list)
            for test in group["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
                texts[test["valid"]].append(text)
            cases.append(Case(path.stem, group["schema"], tuple(texts[True]), tuple(texts[False])))
    return cases


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", type=Path, help="a folder of the JSON-Schema-Test-Suite")
    args = parser.parse_args()
    names = [name for name in LIBRARIES if name == "cb_rollout" or importlib.util.find_spec(name)]
    print(f"| keyword | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for keyword in dict.fromkeys(case.keyword for case in CASES):
        counts = {name: Count() for name in names}
        for case in CASES:
            if case.keyword == keyword:
                for name, count in counts.items():
                    count.add(case, LIBRARIES[name])
        print(f"| {keyword} | {' | '.join(str(count) for count in counts.values())} |")
    if args.suite is None:
        return
    cases = cases_of_suite(args.suite)
    print("\n| library | schemas | refused | wrong texts that pass | right texts shut out |")
    print("|---|---|---|---|---|")
    for name in names:
        count = Count()
        for case in cases:
            count.add(case, LIBRARIES[name])
        passed = f"{count.passed} of {count.wrong}"
        print(
            f"| {name} | {count.schemas} | {count.refused} | {passed} "
            f"| {count.shut_out} of {count.right} |"
        )


if __name__ == "__main__":
    main()
