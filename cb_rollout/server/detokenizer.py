"""Token ids to whole characters, bytes and log-probabilities, on the server's asyncio thread."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from cb_rollout.types import GenerationOutput

# The tokenizer's output for a character whose last bytes are missing.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# Most tokens decoded again with each new one, while the bytes are not valid UTF-8.
MAX_OPEN_TOKENS = 64

# Tokens whose text and bytes are cached.
NUM_TOKENS_KEPT = 1 << 16

# GPT-2's table: the letters that byte-level vocabularies write bytes with.
BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}

# SentencePiece's token of a single byte.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Token ids to text, without special tokens.
Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """The text of a growing sequence, without the strings that end it.

    The cost of a token does not grow with the sequence. `tokenizers.decoders.DecodeStream` raises
    on bytes that are not UTF-8, which a model may sample.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._window: list[int] = []
        self._num_context = 0
        self._num_seen = 0
        self._held = ""
        self._num_before_last = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens; return the new text that no later token can change."""
        for token in tokens:
            self._num_before_last = len(self._held)
            self._held += self._text_of(token)
        stop_at = first_stop(self._held, self._num_before_last, self._stops)
        end = min(len(self._held) - num_partial_match(self._held, self._stops), stop_at)
        certain, self._held = self._held[:end], self._held[end:]
        self._num_before_last = max(0, self._num_before_last - end)
        return certain

    def finish(self, *, is_stopped: bool) -> str:
        """Return the rest of the text, up to the stop string that ended the sequence."""
        text = self._held + self._decode(self._window)[self._num_seen :]
        return text[: first_stop(text, self._num_before_last, self._stops)] if is_stopped else text

    def _text_of(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        is_open = text.endswith(INCOMPLETE) or len(text) == self._num_seen
        if is_open and len(self._window) - self._num_context < MAX_OPEN_TOKENS:
            return ""
        new = text[self._num_seen :]
        # A token's text depends on the text before it (a leading space), of which one token is
        # enough, and on no more.
        self._window = self._window[self._num_context :]
        self._num_context, self._num_seen = len(self._window), len(self._decode(self._window))
        return new


def first_stop(text: str, num_before_last: int, stops: Sequence[str]) -> int:
    """Return where the stop string begins that a text's last token completed; else its length.

    `num_before_last` is the number of characters before that token's.
    """
    found = [text.find(stop, max(0, num_before_last - len(stop) + 1)) for stop in stops]
    return min((at for at in found if at >= 0), default=len(text))


def num_partial_match(text: str, strings: Sequence[str]) -> int:
    """Return the length of the text's longest end with which a string begins, and goes on."""
    most = min(len(text), max(map(len, strings), default=1) - 1)
    # Most places begin none of them: a long end is looked at only where one may begin.
    firsts = {string[0] for string in strings}
    starts = (at for at in range(len(text) - most, len(text)) if text[at] in firsts)
    ends = (text[at:] for at in starts)
    return next(
        (len(end) for end in ends if any(s.startswith(end) and s != end for s in strings)), 0
    )


class TokenTable:
    """The text and bytes of single tokens of a tokenizer, and log-probabilities with them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known = lru_cache(maxsize=NUM_TOKENS_KEPT)(self._look_up)

    def _look_up(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text, and its bytes, which may be part of a character."""
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text, _bytes_of(self._tokenizer.convert_ids_to_tokens(token_id) or "", text)

    def chat_logprobs(self, output: GenerationOutput, start: int, as_ids: bool) -> dict[str, Any]:
        """Return a chat choice's log-probabilities from `start`, `as_ids` of `token_id:7`."""

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            name, utf8 = self._name(token_id, as_ids), self._known(token_id)[1]
            return {"token": name, "logprob": logprob, "bytes": utf8}

        return {"content": logprob_entries(output, start, entry), "refusal": None}

    def completion_logprobs(
        self, output: GenerationOutput, start: int, num_characters: int, as_ids: bool
    ) -> tuple[dict[str, Any], int]:
        """Return a completion choice's log-probabilities from `start`, after `num_characters`.

        Returns the number of characters after these tokens too. With `as_ids`, the likeliest tokens
        include the sampled token.
        """
        tokens, logprobs = output.generated_tokens[start:], output.logprobs[start:]
        texts = [self._known(token)[0] for token in tokens]
        *offsets, num_characters = accumulate(map(len, texts), initial=num_characters)
        tops: Sequence[Any] = (output.top_logprobs or [()] * len(output.generated_tokens))[start:]
        if as_ids:
            own = zip(tokens, logprobs, strict=True)
            tops = [(*top, pair) for top, pair in zip(tops, own, strict=True)]
        top_logprobs = [{self._name(token, as_ids): value for token, value in top} for top in tops]
        choice = {
            "tokens": [self._name(token, as_ids) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": top_logprobs if as_ids or output.top_logprobs is not None else None,
            "text_offset": offsets,
        }
        return choice, num_characters

    def _name(self, token_id: int, as_ids: bool) -> str:
        return f"token_id:{token_id}" if as_ids else self._known(token_id)[0]


def logprob_entries(
    output: GenerationOutput, start: int, entry: Callable[[int, float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return an entry of each token from `start`, which holds those of the likeliest tokens."""
    tops = output.top_logprobs or [()] * len(output.generated_tokens)
    return [
        {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in top]}
        for token, logprob, top in zip(
            output.generated_tokens[start:], output.logprobs[start:], tops[start:], strict=True
        )
    ]


def _bytes_of(token: str, text: str) -> list[int]:
    """Return a token's bytes, from its vocabulary entry if it is no whole character."""
    if INCOMPLETE in text:
        if byte := BYTE_TOKEN.fullmatch(token):
            return [int(byte[1], 16)]
        if token and all(letter in BYTE_OF_LETTER for letter in token):
            return [BYTE_OF_LETTER[letter] for letter in token]
    return list(text.encode())
