"""Grammars, JSON schemas and regular expressions, compiled by xgrammar.

Owns the bounds of what is compiled: xgrammar 0.2 descends into parentheses and schemas without a
limit, which ends the process, and expands counted repetitions of a schema's patterns. Needs the
extra `grammar`: pip install 'cb_rollout[grammar]'.

V: logits.
"""

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Self

import torch

from cb_rollout.errors import InvalidRequestError, error_text
from cb_rollout.integrations.json_schema import enforceable

# Bits in one word of xgrammar's masks.
BITS = 32

ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}

# Most whitespace in a row between a JSON text's tokens: enough to indent, but no model can repeat
# it endlessly.
MAX_WHITESPACE = 16

# Deepest nesting of a schema's JSON, and of the groups of a regular expression or grammar.
MAX_NESTING = 64

# Most objects and arrays of a schema: with more, compilation takes seconds.
MAX_SCHEMA_NODES = 2048

# Most characters of one pattern of a schema.
MAX_PATTERN_CHARACTERS = 4096

# Most characters of all patterns of a schema together, counted repetitions written out.
MAX_PATTERN_STATES = 1 << 14

# Each compiler holds its tokenizer, and takes a pass over the vocabulary to make.
NUM_COMPILERS_KEPT = 2

# Most bytes of compiled grammars that a compiler keeps for their next use.
MAX_KEPT_BYTES = 1 << 28


class XGrammar:
    """A compiled grammar, for `SamplingParams.grammar`; may be shared by any number of requests.

    Its constructors take the model's transformers tokenizer and the number of its logits.

    Raises:
        ImportError: xgrammar is not installed.
        InvalidRequestError: the text is malformed, exceeds a bound of this module, or demands
            something that xgrammar does not enforce.
    """

    def __init__(self, compiled: Any) -> None:
        """Wrap a grammar that an `xgrammar.GrammarCompiler` compiled for this number of logits."""
        self._compiled = compiled

    @classmethod
    def from_json_schema(
        cls, schema: str | dict[str, Any], tokenizer: Any, vocab_size: int
    ) -> Self:
        """Allow JSON that obeys a JSON schema, given as text or as a dict.

        Every keyword is enforced, or refused: see `integrations.json_schema`.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
        except (ValueError, RecursionError) as error:
            raise _refusal("JSON schema", f"it is not JSON: {error_text(error)}") from error
        _require_bounded(parsed)
        text = json.dumps(enforceable(parsed))
        compiler = _compiler(tokenizer, vocab_size)
        return cls(
            _compiled(
                "JSON schema",
                compiler.compile_json_schema,
                text,
                max_whitespace_cnt=MAX_WHITESPACE,
            )
        )

    @classmethod
    def from_json(cls, tokenizer: Any, vocab_size: int) -> Self:
        """Allow any JSON object or array."""
        return cls(_compiler(tokenizer, vocab_size).compile_builtin_json_grammar())

    @classmethod
    def from_tool_calls(
        cls, parameters: Mapping[str, dict[str, Any] | None], tokenizer: Any, vocab_size: int
    ) -> Self:
        """Allow free text and tool calls whose arguments obey the schema of the tool they name.

        A call is `<tool_call>`, a JSON object with "name" and "arguments", and `</tool_call>`, each
        on a line of its own. No other text may follow `<tool_call>`.

        Args:
            parameters: the JSON schema of the arguments of each tool, by name; None: any object.
            tokenizer: the model's transformers tokenizer.
            vocab_size: the number of the model's logits.
        """
        schemas: dict[str, dict[str, Any]] = {}
        for name, schema in parameters.items():
            schemas[name] = ANY_OBJECT if schema is None else schema
        _require_bounded(list(schemas.values()))
        tags = [_tool_call_tag(name, schema) for name, schema in schemas.items()]
        calls = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
        structural_tag = json.dumps({"type": "structural_tag", "format": calls})
        compiler = _compiler(tokenizer, vocab_size)
        return cls(
            _compiled("JSON schema of a tool", compiler.compile_structural_tag, structural_tag)
        )

    @classmethod
    def from_regex(cls, regex: str, tokenizer: Any, vocab_size: int) -> Self:
        """Allow text that matches `regex` as a whole."""
        _require_shallow(regex, "regular expression")
        compiler = _compiler(tokenizer, vocab_size)
        return cls(_compiled("regular expression", compiler.compile_regex, regex))

    @classmethod
    def from_ebnf(cls, grammar: str, tokenizer: Any, vocab_size: int) -> Self:
        """Allow text of a grammar in xgrammar's EBNF."""
        # A string may hold any character.
        _require_shallow(_EBNF_STRING.sub('""', grammar), "grammar")
        compiler = _compiler(tokenizer, vocab_size)
        return cls(_compiled("grammar", compiler.compile_grammar, grammar))

    def matcher(self) -> "XGrammarMatcher":
        """Return a matcher at the start of a new sequence."""
        return XGrammarMatcher(_import_xgrammar().GrammarMatcher(self._compiled))


class XGrammarMatcher:
    """Position of one sequence in a grammar; a `cb_rollout.config.grammar.GrammarMatcher`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill_allowed_tokens(self, mask_V: torch.Tensor) -> None:
        num_words = math.ceil(len(mask_V) / BITS)
        # -1 allows all; the matcher leaves the mask unchanged where it allows all.
        words = torch.full((1, num_words), -1, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(words, 0)
        mask_V.copy_(unpacked(words[0], len(mask_V)))

    def accept_token(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()


def unpacked(words: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Unpack a mask of one bit a token (int32, lowest bit first) to bools."""
    bits = words[:, None] >> torch.arange(BITS, dtype=torch.int32)
    return (bits & 1).view(-1)[:num_tokens].bool()


_EBNF_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')

# An escaped character, a class (closed by the first bracket), a repetition.
_REGEX_TOKEN = re.compile(
    r"(?P<atom>\\.|\[(?:\\.|[^\]\\])*\])"
    r"|(?P<repeat>\{(?P<least>\d+)?(?P<comma>,)?(?P<most>\d+)?\})"
    r"|.",
    re.DOTALL,
)


def _require_bounded(schema: Any) -> None:
    """Refuse a schema that is too deep, too large, or whose patterns repeat too much."""
    # Level by level: a deep schema would exceed the recursion limit of the interpreter.
    level: list[Any] = [schema]
    depth = 0
    num_nodes = 0
    num_states = 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise _refusal("JSON schema", f"it nests more than {MAX_NESTING} deep")
        nodes = [node for node in level if isinstance(node, dict | list)]
        num_nodes += len(nodes)
        if num_nodes > MAX_SCHEMA_NODES:
            raise _refusal("JSON schema", f"more than {MAX_SCHEMA_NODES:,} objects and arrays")
        next_level: list[Any] = []
        for node in nodes:
            if isinstance(node, list):
                next_level.extend(node)
                continue
            for pattern in _patterns(node):
                num_states += _num_states(pattern)
            next_level.extend(node.values())
        if num_states > MAX_PATTERN_STATES:
            raise _refusal("JSON schema", "its patterns repeat too much; count less, or use *")
        level = next_level


def _patterns(node: dict[str, Any]) -> list[str]:
    """Return the patterns of an object, schema or not, because a reference may lead anywhere."""
    values = [node.get("pattern")]
    pattern_properties = node.get("patternProperties")
    if isinstance(pattern_properties, dict):
        values.extend(pattern_properties)
    return [value for value in values if isinstance(value, str)]


def _tool_call_tag(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return xgrammar's tag of the calls of a tool."""
    quoted_name = json.dumps(name, ensure_ascii=False)
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": {quoted_name}, "arguments": ',
        "content": {
            "type": "json_schema",
            "json_schema": enforceable(schema),
            "max_whitespace_cnt": MAX_WHITESPACE,
        },
        "end": "}\n</tool_call>",
    }


def _num_states(pattern: str) -> int:
    """Return the number of characters of a pattern, counted repetitions written out.

    Refuses one that is too long or too deep.
    """
    what = "JSON schema"
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise _refusal(what, f"a pattern has more than {MAX_PATTERN_CHARACTERS:,} characters")
    _require_shallow(pattern, what)
    # The states of the whole pattern so far, and of each open group.
    groups = [0]
    # The states of the newest character, class or group, which a repetition repeats.
    newest = 0
    for token in _REGEX_TOKEN.finditer(pattern):
        if token["repeat"]:
            repetitions = _most_repetitions(token)
            groups[-1] += newest * (repetitions - 1)
            newest *= repetitions
        elif token[0] == "(":
            groups.append(0)
        elif token[0] == ")" and len(groups) > 1:
            newest = groups.pop()
            groups[-1] += newest
        elif token[0] not in "*+?|^$":
            newest = 1
            groups[-1] += newest
    return sum(groups)


def _most_repetitions(token: re.Match[str]) -> int:
    """Return the larger count of a repetition, at least 1."""
    most = 1
    for digits in (token["least"], token["most"]):
        if digits:
            # Digits beyond any bound of xgrammar's are not read.
            most = max(most, int(digits[:10]))
    return most


def _require_shallow(text: str, what: str) -> None:
    depth = 0
    for token in _REGEX_TOKEN.finditer(text):
        if token[0] == "(":
            depth += 1
        elif token[0] == ")":
            depth -= 1
        if depth > MAX_NESTING:
            raise _refusal(what, f"its groups nest more than {MAX_NESTING} deep")


def _refusal(what: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the {what} cannot be compiled ({why}); make it simpler.")


def _compiled(what: str, compile_it: Callable[..., Any], text: str, **settings: Any) -> Any:
    try:
        return compile_it(text, **settings)
    except (RuntimeError, ValueError) as error:
        raise InvalidRequestError(
            f"the {what} cannot be compiled ({error_text(error)}); mend it, or leave out what "
            "xgrammar does not support."
        ) from error


@lru_cache(maxsize=NUM_COMPILERS_KEPT)
def _compiler(tokenizer: Any, vocab_size: int) -> Any:
    xgrammar = _import_xgrammar()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    return xgrammar.GrammarCompiler(info, cache_limit_bytes=MAX_KEPT_BYTES)


def _import_xgrammar() -> Any:
    try:
        return importlib.import_module("xgrammar")
    except ModuleNotFoundError as error:
        raise ImportError(
            "grammars need xgrammar, which is not installed: pip install 'cb_rollout[grammar]'."
        ) from error
