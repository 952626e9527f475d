"""Find stop strings in one sequence's text as it grows, at a constant cost for each token.

Owns the text of the newest tokens. Called by the thread that steps the engine.
"""

from collections.abc import Callable, Sequence

# A tokenizer decodes the first bytes of an incomplete character to this.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# Most bytes, and so most tokens, of one character in UTF-8.
LONGEST_CHARACTER = 4

# Decodes token ids to their text, special tokens included.
Decode = Callable[[Sequence[int]], str]


class StopStrings:
    """The stop strings of one sequence; a string may span tokens or end inside one."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = strings
        self._decode = decode
        self._num_kept = max(map(len, strings)) - 1
        self._tail = ""
        self._tokens: list[int] = []
        self._num_context = 0
        self._context = ""
        self._num_pending_seen = 0
        """Characters of the pending tokens that were searched already."""

    def found_with(self, token_id: int) -> bool:
        """Append the sequence's next token; return whether it completes one of the strings."""
        self._tokens.append(token_id)
        # A token's text depends on the token before it (a leading space), not on earlier ones.
        new_text = self._decode(self._tokens)[len(self._context) :]
        text = self._tail + new_text
        num_seen = len(self._tail) + self._num_pending_seen
        is_found = any(self._ends_after(num_seen, string, text) for string in self._strings)
        num_pending = 0
        if new_text.endswith(INCOMPLETE):
            # Only the last 3 tokens can be the first bytes of an incomplete character.
            num_new = len(self._tokens) - self._num_context
            num_pending = min(num_new, LONGEST_CHARACTER - 1)
        self._keep_pending(num_pending)
        return is_found

    def _keep_pending(self, num_pending: int) -> None:
        """Leave the last `num_pending` tokens to be decoded again with the next one.

        The text of the tokens before them joins the tail.
        """
        num_done = len(self._tokens) - num_pending
        if num_done > self._num_context:
            text = self._tail + self._decode(self._tokens[:num_done])[len(self._context) :]
            self._tail = text[-self._num_kept :] if self._num_kept else ""
            self._tokens = self._tokens[self._num_context :]
            self._num_context = num_done - self._num_context
            self._context = self._decode(self._tokens[: self._num_context])
        pending = self._decode(self._tokens)[len(self._context) :] if num_pending else ""
        self._num_pending_seen = len(pending.rstrip(INCOMPLETE))

    @staticmethod
    def _ends_after(num_seen: int, string: str, text: str) -> bool:
        """Return whether a string is in a text and ends after its first `num_seen` characters."""
        start = max(0, num_seen - len(string) + 1)
        return string in text[start:]
