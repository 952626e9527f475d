"""Tokens to text, as they come: whole characters only, and no stop string's beginning.

Owns what a client may see of a sequence so far. One asyncio thread calls it.
"""

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# What a tokenizer decodes the first bytes of a character to, before the rest has come.

LONGEST_CHARACTER = 4
# Bytes of UTF-8, and so tokens, that one character can take.

LONGEST_WINDOW = 16
# Tokens decoded again with each one, where bytes come that are not text at all.

Decode = Callable[[Sequence[int]], str]
# From token ids to text, special tokens left out.


class TextStream:
    """One sequence's text as it grows, at a cost for each token that does not grow with it."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        """Start with no text.

        Args:
            decode: the tokenizer's.
            stops: strings that end the sequence, and that no client sees.
        """
        self._decode, self._stops = decode, stops
        self._window: list[int] = []
        self._num_context = 0
        self._num_seen = 0
        self._held = ""
        self._num_before_last = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; returns the text that is certain now."""
        for token in tokens:
            self._num_before_last = len(self._held)
            self._held += self._text_of(token)
        end = len(self._held) - self._num_doubtful()
        certain, self._held = self._held[:end], self._held[end:]
        self._num_before_last = max(0, self._num_before_last - end)
        return certain

    def finish(self, *, is_stopped: bool) -> str:
        """The rest of the text; up to the stop string, where one ended the sequence."""
        if not is_stopped or not self._stops:
            return self._held + self._rest()
        return cut(self._held + self._rest(), self._num_before_last, self._stops)

    def _num_doubtful(self) -> int:
        """Characters from the first that may yet turn out to be a stop string's, or are one's."""
        begun = doubtful(self._held, self._stops)
        found = _first_stop(self._held, self._num_before_last, self._stops)
        return max(begun, len(self._held) - found)

    def _text_of(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        num_open = min(len(text) - len(text.rstrip(INCOMPLETE)), LONGEST_CHARACTER - 1)
        if not num_open:
            new, self._num_seen = text[self._num_seen :], 0
            # A token's text depends on the one before it (a leading space), never on more.
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_seen = len(self._decode(self._window))
            return new
        if len(self._window) - self._num_context <= LONGEST_CHARACTER:
            return ""
        closed = len(text) - num_open
        new, self._num_seen = text[self._num_seen : closed], max(self._num_seen, closed)
        if len(self._window) > LONGEST_WINDOW:
            self._window = self._window[-LONGEST_WINDOW // 2 :]
            self._num_context = 0
            self._num_seen = len(self._decode(self._window)) - num_open
        return new

    def _rest(self) -> str:
        return self._decode(self._window)[self._num_seen :]


def cut(text: str, num_before_last: int, stops: Sequence[str]) -> str:
    """Text up to the stop string that its last token completed.

    Args:
        text: with the stop string in it, or not: a stop token leaves none.
        num_before_last: characters of the text that the tokens before the last one gave.
        stops: the strings.
    """
    return text[: _first_stop(text, num_before_last, stops)]


def doubtful(text: str, strings: Sequence[str]) -> int:
    """How many characters at the text's end may be the beginning of one of the strings."""
    sizes = [
        size
        for string in strings
        for size in range(min(len(string) - 1, len(text)), 0, -1)
        if text.endswith(string[:size])
    ]
    return max(sizes, default=0)


def _first_stop(text: str, num_before_last: int, stops: Sequence[str]) -> int:
    found = [text.find(stop, max(0, num_before_last - len(stop) + 1)) for stop in stops]
    return min((at for at in found if at >= 0), default=len(text))
