"""Convert token ids to text, bytes and log-probabilities, on the server's asyncio thread."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from cb_rollout.types import GenerationOutput

# The tokenizer's output for a character whose last bytes are missing.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# Maximum number of tokens that are decoded again with each new token, while the bytes are not valid
# UTF-8.
MAX_OPEN_TOKENS = 64

# Number of tokens whose text and bytes are cached.
NUM_TOKENS_KEPT = 1 << 16

# GPT-2's table of the letters with which byte-level vocabularies write bytes.
BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}

# SentencePiece's token of a single byte.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Token ids to text, without special tokens.
Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """The text of a growing sequence, without the stop string that ends it.

    The cost per token does not grow with the sequence. `tokenizers.decoders.DecodeStream` is not
    used, because it raises on bytes that are not UTF-8, which a model may sample.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
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
        num_certain = len(self._held) - num_partial_match(self._held, self._stops)
        end = min(num_certain, stop_at)
        certain = self._held[:end]
        self._held = self._held[end:]
        self._num_before_last = max(0, self._num_before_last - end)
        return certain

    def finish(self, *, is_stopped: bool) -> str:
        """Return the rest of the text, up to the stop string that ended the sequence."""
        text = self._held + self._decode(self._window)[self._num_seen :]
        if not is_stopped:
            return text
        return text[: first_stop(text, self._num_before_last, self._stops)]

    def _text_of(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        is_open = text.endswith(INCOMPLETE) or len(text) == self._num_seen
        if is_open and len(self._window) - self._num_context < MAX_OPEN_TOKENS:
            return ""
        new = text[self._num_seen :]
        # A token's text depends on the text before it (a leading space), but one token of context
        # is enough.
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_seen = len(self._decode(self._window))
        return new


def first_stop(text: str, num_before_last: int, stops: Sequence[str]) -> int:
    """Return the start of the stop string that the last token completed; else the text's length.

    `num_before_last` is the number of characters before the last token.
    """
    first = len(text)
    for stop in stops:
        place = text.find(stop, max(0, num_before_last - len(stop) + 1))
        if place >= 0:
            first = min(first, place)
    return first


def num_partial_match(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of a string."""
    most = min(len(text), max(map(len, strings), default=1) - 1)
    first_characters = {string[0] for string in strings}
    for start in range(len(text) - most, len(text)):
        # At most places no string can begin: compare the end of the text only where one can.
        if text[start] not in first_characters:
            continue
        end = text[start:]
        if any(string.startswith(end) and string != end for string in strings):
            return len(end)
    return 0


class TokenTable:
    """The text and bytes of a tokenizer's tokens, and log-probabilities in OpenAI's format."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known = lru_cache(maxsize=NUM_TOKENS_KEPT)(self._look_up)

    def _look_up(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text, and its bytes, which may be part of a character."""
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text, _bytes_of(self._tokenizer.convert_ids_to_tokens(token_id) or "", text)

    def chat_logprobs(self, output: GenerationOutput, start: int, as_ids: bool) -> dict[str, Any]:
        """Return a chat choice's log-probabilities from `start`.

        With `as_ids`, tokens are written as `token_id:7`.
        """

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            _, utf8 = self._known(token_id)
            return {"token": self._name(token_id, as_ids), "logprob": logprob, "bytes": utf8}

        return {"content": logprob_entries(output, start, entry), "refusal": None}

    def completion_logprobs(
        self, output: GenerationOutput, start: int, num_characters: int, as_ids: bool
    ) -> tuple[dict[str, Any], int]:
        """Return a completion choice's log-probabilities for the tokens from `start`.

        `num_characters` is the number of characters before these tokens; also returns the number up
        to their end. With `as_ids`, the likeliest tokens include the sampled token.
        """
        tokens = output.generated_tokens[start:]
        logprobs = output.logprobs[start:]
        offsets = []
        for token in tokens:
            text, _ = self._known(token)
            offsets.append(num_characters)
            num_characters += len(text)
        top_logprobs = None
        if as_ids or output.top_logprobs is not None:
            top_logprobs = []
            likeliest = _likeliest_tokens(output, start)
            for token, logprob, top in zip(tokens, logprobs, likeliest, strict=True):
                by_name = {self._name(other, as_ids): value for other, value in top}
                if as_ids:
                    by_name[self._name(token, as_ids)] = logprob
                top_logprobs.append(by_name)
        choice = {
            "tokens": [self._name(token, as_ids) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }
        return choice, num_characters

    def _name(self, token_id: int, as_ids: bool) -> str:
        if as_ids:
            return f"token_id:{token_id}"
        text, _ = self._known(token_id)
        return text


def logprob_entries(
    output: GenerationOutput, start: int, entry: Callable[[int, float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return an entry for each token from `start`, with nested entries for the likeliest tokens."""
    tokens = output.generated_tokens[start:]
    logprobs = output.logprobs[start:]
    likeliest = _likeliest_tokens(output, start)
    entries = []
    for token, logprob, top in zip(tokens, logprobs, likeliest, strict=True):
        with_top = dict(entry(token, logprob))
        with_top["top_logprobs"] = [entry(other, value) for other, value in top]
        entries.append(with_top)
    return entries


def _likeliest_tokens(
    output: GenerationOutput, start: int
) -> Sequence[Sequence[tuple[int, float]]]:
    """Return the likeliest tokens and their log-probabilities, for each token from `start`."""
    if output.top_logprobs:
        return output.top_logprobs[start:]
    return [()] * (len(output.generated_tokens) - start)


def _bytes_of(token: str, text: str) -> list[int]:
    """Return a token's bytes, from its vocabulary entry if it is only part of a character."""
    if INCOMPLETE in text:
        byte = BYTE_TOKEN.fullmatch(token)
        if byte:
            return [int(byte[1], 16)]
        if token and all(letter in BYTE_OF_LETTER for letter in token):
            return [BYTE_OF_LETTER[letter] for letter in token]
    return list(text.encode())
