"""Find stop strings in one sequence's text as it grows, at a constant cost for each token.

Owns the text of the newest tokens. Called by the thread that steps the engine.
"""

from collections.abc import Callable, Sequence

# A tokenizer decodes the first bytes of an incomplete character to this.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# Bytes of UTF-8, and so tokens, of one character at most.
LONGEST_CHARACTER = 4

# From token ids to their text, special tokens included.
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
        self._num_seen = 0

    def found_with(self, token_id: int) -> bool:
        """Append the sequence's next token; return whether it completes one of the strings."""
        self._tokens.append(token_id)
        # A token's text depends on the token before it (a leading space), not on earlier ones.
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
