import importlib.util
import json

import pytest
import torch
from tiny import byte_tokenizer, char_tokenizer, tiny_model

from cb_rollout import InvalidRequestError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.integrations import xgrammar
from cb_rollout.integrations.xgrammar import XGrammar, XGrammarMatcher, unpacked

needs_no_xgrammar = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is not None, reason="xgrammar is installed"
)


class EvenTokens:
    """Acts as an `xgrammar.GrammarMatcher` that allows even ids below a bound, three times."""

    def __init__(self, bound):
        self.bound, self.accepted = bound, []

    def fill_next_token_bitmask(self, bitmask, index=0):
        assert bitmask.dtype == torch.int32
        for token in range(bitmask.shape[1] * 32):
            is_allowed = token % 2 == 0 and token < self.bound
            word, bit = divmod(token, 32)
            value = (int(bitmask[index, word]) & 0xFFFFFFFF) & ~(1 << bit) | (is_allowed << bit)
            bitmask[index, word] = value - (1 << 32) if value >= 1 << 31 else value
        return True

    def accept_token(self, token_id):
        self.accepted.append(token_id)
        return token_id % 2 == 0

    def is_terminated(self):
        return len(self.accepted) == 3


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 100])
def test_a_bit_a_token_becomes_a_truth_value_a_token(num_tokens):
    words = torch.tensor([0b101, -1, -(2**31), 0], dtype=torch.int32)
    expected = [i in (0, 2) or 32 <= i < 64 or i == 95 for i in range(num_tokens)]
    assert unpacked(words, num_tokens).tolist() == expected


def test_the_matcher_fills_accepts_and_ends():
    matcher = XGrammarMatcher(EvenTokens(bound=70))
    mask_V = torch.zeros(100, dtype=torch.bool)
    matcher.fill_allowed_tokens(mask_V)
    assert mask_V.nonzero()[:, 0].tolist() == list(range(0, 70, 2))
    assert [matcher.accept_token(token) for token in (4, 5, 6)] == [True, False, True]
    assert matcher.is_terminated()


@needs_no_xgrammar
def test_without_xgrammar_the_error_says_which_extra_to_install():
    with pytest.raises(ImportError, match=r"pip install 'cb_rollout\[grammar\]'"):
        XGrammar.from_regex("[0-9]+", tokenizer=None, vocab_size=10)
    with pytest.raises(ImportError, match=r"pip install 'cb_rollout\[grammar\]'"):
        XGrammar(compiled=None)


needs_xgrammar = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None, reason="xgrammar is missing"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Bob"]},
        "ages": {"type": "array", "items": {"enum": [1, 20, 300]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


@needs_xgrammar
def test_a_regular_expression_is_obeyed():
    tokenizer = char_tokenizer()
    matcher = XGrammar.from_regex("[0-9]{2}", tokenizer, len(tokenizer)).matcher()
    mask_V = torch.zeros(len(tokenizer), dtype=torch.bool)
    matcher.fill_allowed_tokens(mask_V)
    assert tokenizer.decode(mask_V.nonzero()[:, 0].tolist()) == "0123456789"


@needs_xgrammar
def test_a_random_model_writes_json_that_obeys_its_schema():
    tokenizer = char_tokenizer()
    # More logits than the tokenizer has tokens, as checkpoints have.
    model = tiny_model(vocab_size=120)
    grammar = XGrammar.from_json_schema(SCHEMA, tokenizer, vocab_size=120)
    params = SamplingParams(grammar=grammar, max_new_tokens=300)
    with RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=tokenizer) as generator:
        outputs = generator.generate_batch(["x", "yz"], sampling_params=params)
        outputs |= generator.generate_batch(["z"] * 6, sampling_params=params)
    for output in outputs.values():
        assert output.finish_reason == "stop"
        value = json.loads(tokenizer.decode(output.generated_tokens, skip_special_tokens=True))
        assert set(value) == {"name", "ages"}
        assert value["name"] in ("Ada", "Bob")
        assert 1 <= len(value["ages"]) <= 3
        assert set(value["ages"]) <= {1, 20, 300}
    assert len({tuple(output.generated_tokens) for output in outputs.values()}) > 2


@needs_xgrammar
def test_what_cannot_be_compiled_is_an_invalid_request():
    tokenizer = char_tokenizer()
    for broken in ("not JSON", {"type": "nonsense"}, {"$ref": "#/nowhere"}):
        with pytest.raises(InvalidRequestError, match=r"JSON schema cannot be (compiled|enforced)"):
            XGrammar.from_json_schema(broken, tokenizer, len(tokenizer))
    with pytest.raises(InvalidRequestError, match="regular expression cannot be compiled"):
        XGrammar.from_regex("[0-9", tokenizer, len(tokenizer))
    with pytest.raises(InvalidRequestError, match="grammar cannot be compiled"):
        XGrammar.from_ebnf("root ::= nothing", tokenizer, len(tokenizer))


def nested(opening, inside, closing, depth):
    return opening * depth + inside + closing * depth


DEEP = 30_000
TOO_MUCH = {
    "nested pattern": {"pattern": nested("(", "a", ")", DEEP // 8)},
    "long pattern": {"pattern": nested("(", "a", ")", DEEP)},
    "nested key": {"patternProperties": {nested("(?:", "a", ")*", 100): {}}},
    "nested name": {"propertyNames": {"pattern": nested("(", "a", ")", 100)}},
    "nested JSON": nested('{"items":', "{}", "}", 100),
    "very nested JSON": nested('{"items":', "{}", "}", DEEP),
    "nested literal": {"const": json.loads(nested("[", "", "]", 100))},
    "nodes": {"anyOf": [{"items": {"const": number}} for number in range(3000)]},
    "counts": {"pattern": "(.{1,1000}){1,1000}"},
    "many counts": {"pattern": ".{1,1000}" * 64},
    "patterns": {"anyOf": [{"pattern": "a" * 4000}] * 10},
    "assertion": {"pattern": "(?=a)b"},
    "anchors": {"pattern": "$" * 1000},
    "escape sequence": {"pattern": "\x1b[31ma$b"},
    "reference into a literal": {
        "const": {"pattern": nested("(", "a", ")", 100)},
        "$ref": "#/const",
    },
}


@needs_xgrammar
@pytest.mark.parametrize("schema", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_schema_that_would_end_or_hold_the_process_is_refused(schema, capfd):
    tokenizer = char_tokenizer()
    with pytest.raises(InvalidRequestError, match=r"JSON schema cannot be (compiled|enforced)"):
        XGrammar.from_json_schema(schema, tokenizer, len(tokenizer))
    assert capfd.readouterr() == ("", "")


@needs_xgrammar
def test_a_regular_expression_or_grammar_that_nests_too_deeply_is_refused():
    tokenizer = char_tokenizer()
    for depth in (100, DEEP):
        group = nested("(", "a", ")", depth)
        with pytest.raises(InvalidRequestError, match="groups nest more than 64 deep"):
            XGrammar.from_regex(group, tokenizer, len(tokenizer))
        with pytest.raises(InvalidRequestError, match="groups nest more than 64 deep"):
            XGrammar.from_ebnf(f"root ::= {group}", tokenizer, len(tokenizer))


@needs_xgrammar
def test_schemas_within_the_bounds_are_compiled():
    tokenizer = char_tokenizer()
    for schema in (
        {"type": "string", "pattern": nested("(", "a", ")", 60)},
        {"type": "string", "pattern": r"^(?:[a-z0-9]+(?:-[a-z0-9]+)*)(?:\.[a-z0-9]+)*$"},
        {"type": "string", "pattern": r"^[(\[]{1,40}\([0-9]{3}\)[)]$"},
        {"type": "string", "pattern": r"^(\d{1,3}\.){3}\d{1,3}$"},
        {"properties": {"pattern": {"type": "string"}, "patternProperties": {"type": "null"}}},
        json.loads(nested('{"items":', "{}", "}", 60)),
        {"enum": ["(" * 1000]},
    ):
        XGrammar.from_json_schema(schema, tokenizer, len(tokenizer))
    XGrammar.from_ebnf(f'root ::= "{"(" * 1000}" [(]', tokenizer, len(tokenizer))


@needs_xgrammar
def test_compiled_grammars_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(xgrammar, "MAX_KEPT_BYTES", 100_000)
    tokenizer = char_tokenizer()
    for number in range(60):
        schema = {"type": "object", "properties": {f"a{number}": {"type": "string"}}}
        XGrammar.from_json_schema(schema, tokenizer, len(tokenizer))
    kept = xgrammar._compiler(tokenizer, len(tokenizer)).get_cache_size_bytes()
    assert 0 < kept <= 100_000


PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}, "days": {"type": "integer"}},
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["Ulm", "K\u00f6ln"]}},
}


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("", True),
        ("No call, and a < b.", True),
        ("<tool_cal", True),
        (call("find", '{"place": "K\u00f6ln", "days": 3}'), True),
        ("I look. " + call("find", '{ "place": "Ulm",\n "days": -3 }') + " Done.", True),
        (call("find", '{"place": "Ulm", "days": 3}') + call("any", '{"x": [{"y": null}]}'), True),
        (call("any", "{}"), True),
        (call(r"say \"hi\"", "{}"), True),
        (call("find", '{"place": "Rom", "days": 3}'), False),
        (call("find", '{"place": "Ulm"}'), False),
        (call("find", '{"place": "Ulm", "days": 3, "x": 1}'), False),
        (call("any", "[]"), False),
        (call("other", "{}"), False),
        ('<tool_call>\n{"arguments": {}, "name": "any"}\n</tool_call>', False),
        ("<tool_call>text</tool_call>", False),
        (call("any", "{" + " " * 20 + "}"), False),
    ],
)
def test_text_is_free_and_a_tool_call_obeys_the_schema_of_its_tool(text, is_allowed):
    pytest.importorskip("xgrammar")
    tokenizer = byte_tokenizer()
    parameters = {"find": PLACE, "any": None, 'say "hi"': None}
    matcher = XGrammar.from_tool_calls(parameters, tokenizer, len(tokenizer)).matcher()
    tokens = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    assert all(matcher.accept_token(token) for token in tokens) == is_allowed
    assert matcher.is_terminated() == is_allowed


def test_the_schemas_of_tools_are_bounded_together():
    pytest.importorskip("xgrammar")
    tokenizer = byte_tokenizer()
    names = {f"tool{number}": {"type": "object", "properties": {}} for number in range(2000)}
    with pytest.raises(InvalidRequestError, match="more than 2,048 objects and arrays"):
        XGrammar.from_tool_calls(names, tokenizer, len(tokenizer))
