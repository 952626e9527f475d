"""Finds stop strings in one sequence's text as it grows, at a cost that does not grow with it.

Owns the text of the newest tokens. Called by the thread that steps the engine.
"""

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# What a tokenizer decodes the first bytes of a character to, before the rest has come.

LONGEST_CHARACTER = 4
# Bytes of UTF-8, and so tokens, that one character can take.

Decode = Callable[[Sequence[int]], str]
# From token ids to their text, special tokens included.


class StopStrings:
    """Watches one sequence; strings may span tokens, and tokens may go on after a string."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        """Start with no text.

        Args:
            strings: what to look for; none empty.
            decode: the tokenizer's.
        """
        self._strings = strings
        self._decode = decode
        self._num_kept = max(map(len, strings)) - 1
        self._tail = ""
        self._tokens: list[int] = []
        self._num_context = 0
        self._context = ""
        self._num_seen = 0

    def found_with(self, token_id: int) -> bool:
        """Whether this token, the sequence's next, completes one of the strings."""
        self._tokens.append(token_id)
        # A token's text depends on the one before it (a leading space), never on more.
        new_text = self._decode(self._tokens)[len(self._context) :]
        text, num_seen = self._tail + new_text, len(self._tail) + self._num_seen
        is_found = any(
            text.find(string, max(0, num_seen - len(string) + 1)) >= 0 for string in self._strings
        )
        is_waiting = len(self._tokens) - self._num_context < LONGEST_CHARACTER
        if new_text.endswith(INCOMPLETE) and is_waiting:
            self._num_seen = len(new_text.rstrip(INCOMPLETE))
        else:
            self._tail = text[-self._num_kept :] if self._num_kept else ""
            self._tokens = self._tokens[self._num_context :]
            self._num_context, self._num_seen = len(self._tokens), 0
            self._context = self._decode(self._tokens)
        return is_found
