"""Single tokens as clients see them: their text, their bytes, their log-probabilities."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from cb_rollout.types import GenerationOutput

NUM_TOKENS_KEPT = 1 << 16
# Tokens whose text and bytes are remembered: all that a conversation uses.


class TokenTable:
    """Looks tokens up in one tokenizer, on one thread."""

    def __init__(self, tokenizer: Any) -> None:
        """Know no token yet."""
        self._tokenizer = tokenizer
        self._known = lru_cache(maxsize=NUM_TOKENS_KEPT)(self._look_up)

    def _look_up(self, token_id: int) -> tuple[str, list[int]]:
        """A token's text, and its bytes, which need not be whole characters."""
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text, _bytes_of(self._tokenizer.convert_ids_to_tokens(token_id) or "", text)

    def chat_logprobs(self, output: GenerationOutput, start: int = 0) -> dict[str, Any]:
        """Log-probabilities in the shape of a chat's answer, of the tokens from `start`."""
        content = []
        for index in range(start, len(output.generated_tokens)):
            entry = self._entry(output.generated_tokens[index], output.logprobs[index])
            top = output.top_logprobs[index] if output.top_logprobs is not None else []
            entry["top_logprobs"] = [self._entry(token, logprob) for token, logprob in top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def completion_logprobs(
        self, output: GenerationOutput, start: int = 0, num_characters: int = 0
    ) -> dict[str, Any]:
        """The same in the shape of a completion's answer.

        Args:
            output: the sequence.
            start: the first token told.
            num_characters: of the tokens before it.
        """
        texts = self.texts(output.generated_tokens[start:])
        offsets = []
        for text in texts:
            offsets.append(num_characters)
            num_characters += len(text)
        top = None
        if output.top_logprobs is not None:
            top = [
                {self._known(token)[0]: logprob for token, logprob in pairs}
                for pairs in output.top_logprobs[start:]
            ]
        return {
            "tokens": texts,
            "token_logprobs": output.logprobs[start:],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's text."""
        return [self._known(token)[0] for token in token_ids]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, utf8 = self._known(token_id)
        return {"token": text, "logprob": logprob, "bytes": utf8}


def _byte_of_letter() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()


def _bytes_of(token: str, text: str) -> list[int]:
    """A token's bytes; from how its vocabulary writes it, where it does not decode alone."""
    if "\N{REPLACEMENT CHARACTER}" in text:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return [int(token[3:5], 16)]
        if token and all(letter in _BYTE_OF_LETTER for letter in token):
            return [_BYTE_OF_LETTER[letter] for letter in token]
    return list(text.encode())
