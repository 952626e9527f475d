"""Grammars, JSON schemas and regular expressions, compiled by xgrammar.

Owns the conversion of an xgrammar `CompiledGrammar` to a `cb_rollout.config.grammar.Grammar`. Needs
the extra `grammar`: pip install 'cb_rollout[grammar]'.

V: logits.
"""

import importlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Self

import torch

from cb_rollout.errors import InvalidRequestError, error_text

# Of one word of xgrammar's masks.
BITS = 32

# In a row between a JSON text's tokens: enough to indent, and no model repeats it endlessly.
MAX_WHITESPACE = 16

# Each holds its tokenizer and its compiled grammars; making one takes a pass over the vocabulary.
NUM_COMPILERS_KEPT = 2


class XGrammar:
    """A compiled grammar, for `SamplingParams.grammar`; may be shared by any number of requests.

    grammar = XGrammar.from_json_schema(schema, tokenizer, vocab_size=model.config.vocab_size)
    SamplingParams(grammar=grammar)
    """

    def __init__(self, compiled: Any) -> None:
        """Wrap a grammar compiled by an `xgrammar.GrammarCompiler` for the model's vocabulary size.

        Raises:
            ImportError: xgrammar is not installed.
        """
        self._xgrammar = _import_xgrammar()
        self._compiled = compiled

    @classmethod
    def from_json_schema(
        cls, schema: str | dict[str, Any], tokenizer: Any, vocab_size: int
    ) -> Self:
        """Allow JSON that obeys `schema`.

        Args:
            schema: a JSON schema, as text or as a dict.
            tokenizer: the model's transformers tokenizer.
            vocab_size: number of the model's logits.

        Raises:
            InvalidRequestError: it is not a schema, or xgrammar does not support it.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        compiler = _compiler(tokenizer, vocab_size)
        return cls(
            _compiled(
                lambda: compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE),
                "JSON schema",
            )
        )

    @classmethod
    def from_json(cls, tokenizer: Any, vocab_size: int) -> Self:
        """Allow any JSON object or array."""
        return cls(_compiler(tokenizer, vocab_size).compile_builtin_json_grammar())

    @classmethod
    def from_framed_json(
        cls, frames: Sequence[tuple[str, str, str]], tokenizer: Any, vocab_size: int
    ) -> Self:
        """Allow one of several texts that each hold JSON: a text before, its schema, a text after.

        Raises:
            InvalidRequestError: one is not a schema, or xgrammar does not support it.
        """
        compiler, grammar = _compiler(tokenizer, vocab_size), _import_xgrammar().Grammar

        def literal(text: str) -> Any:
            return grammar.from_ebnf(f"root ::= {json.dumps(text, ensure_ascii=False)}")

        def framed(before: str, schema: str, after: str) -> Any:
            inside = grammar.from_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
            return grammar.concat(literal(before), inside, literal(after))

        def compiled() -> Any:
            return compiler.compile_grammar(grammar.union(*(framed(*frame) for frame in frames)))

        return cls(_compiled(compiled, "JSON schema"))

    @classmethod
    def from_regex(cls, regex: str, tokenizer: Any, vocab_size: int) -> Self:
        """Allow text that matches `regex` as a whole."""
        compiler = _compiler(tokenizer, vocab_size)
        return cls(_compiled(lambda: compiler.compile_regex(regex), "regular expression"))

    @classmethod
    def from_ebnf(cls, grammar: str, tokenizer: Any, vocab_size: int) -> Self:
        """Allow text of a grammar in xgrammar's EBNF."""
        compiler = _compiler(tokenizer, vocab_size)
        return cls(_compiled(lambda: compiler.compile_grammar(grammar), "grammar"))

    def matcher(self) -> "XGrammarMatcher":
        """Return a matcher at the start of a new sequence."""
        return XGrammarMatcher(self._xgrammar.GrammarMatcher(self._compiled))


class XGrammarMatcher:
    """Position of one sequence in a grammar; a `cb_rollout.config.grammar.GrammarMatcher`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill_allowed_tokens(self, mask_V: torch.Tensor) -> None:
        """Set the mask to True for every token that may come next."""
        num_words = -(-len(mask_V) // BITS)
        # -1 allows all; the matcher leaves the mask unchanged where it allows all.
        words = torch.full((1, num_words), -1, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(words, 0)
        mask_V.copy_(unpacked(words[0], len(mask_V)))

    def accept_token(self, token_id: int) -> bool:
        """Advance by one sampled token; return False where the grammar does not allow it."""
        return self._matcher.accept_token(token_id)

    def is_terminated(self) -> bool:
        """Return True if no token may follow."""
        return self._matcher.is_terminated()


def unpacked(words: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Unpack a mask of one bit a token (int32, lowest bit first) to bools."""
    bits = words[:, None] >> torch.arange(BITS, dtype=torch.int32)
    return (bits & 1).view(-1)[:num_tokens].bool()


def _compiled(compile_it: Callable[[], Any], what: str) -> Any:
    try:
        return compile_it()
    except (RuntimeError, ValueError) as error:
        raise InvalidRequestError(
            f"the {what} cannot be compiled ({error_text(error)}); mend it, or leave out what "
            "xgrammar does not support."
        ) from error


@lru_cache(maxsize=NUM_COMPILERS_KEPT)
def _compiler(tokenizer: Any, vocab_size: int) -> Any:
    xgrammar = _import_xgrammar()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    return xgrammar.GrammarCompiler(info)


def _import_xgrammar() -> Any:
    try:
        return importlib.import_module("xgrammar")
    except ModuleNotFoundError as error:
        raise ImportError(
            "grammars need xgrammar, which is not installed: pip install 'cb_rollout[grammar]'."
        ) from error
