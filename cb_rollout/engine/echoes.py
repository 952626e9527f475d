"""What the sequences of one group have said, and what was said after the same words last time.

Knows tokens only.
"""

from collections.abc import Sequence

GRAMS = (4, 3, 2)
# How many tokens must have been said before for the next ones to be expected again; the longest
# that is known counts.

BITS = 32
# Of one token, or one place. Runs of tokens and places are kept as numbers: so many tuples would
# have the garbage collector look at everything there is.


class Echoes:
    """What the sequences of one group have said, and where each run of tokens was said last."""

    __slots__ = ("__weakref__", "_after", "_texts", "luck")

    def __init__(self) -> None:
        """Know nothing."""
        self._texts: list[tuple[list[int], int]] = []
        self._after: dict[int, dict[int, int]] = {size: {} for size in GRAMS}
        self.luck = 0.5
        """Share of drafted tokens that came, lately."""

    def listen(self, token_ids: list[int], num_known: int) -> None:
        """Follow one more sequence; its first `num_known` tokens are another's too."""
        self._texts.append((token_ids, num_known))

    def expected(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the last time that a sequence stood like this."""
        self._read()
        tail = list(token_ids[-max(GRAMS) :])
        known = len(tail)
        # What repeats itself ends at the newest token, and is expected to go on.
        while (wanted := count - len(tail) + known) > 0 and (found := self._following(tail)):
            text, start = found
            tail += text[start : start + wanted]
        return tail[known:]

    def _following(self, tail: list[int]) -> tuple[list[int], int] | None:
        """The sequence and the place where what ends like `tail` went on last."""
        for size in GRAMS:
            found = self._after[size].get(_number(tail[-size:])) if len(tail) >= size else None
            if found is not None:
                return self._texts[found >> BITS][0], found & ((1 << BITS) - 1)
        return None

    def _read(self) -> None:
        """Note what was said since the last time."""
        for index, (text, num_read) in enumerate(self._texts):
            for size, after in self._after.items():
                for place in range(max(size, num_read), len(text)):
                    after[_number(text[place - size : place])] = index << BITS | place
            self._texts[index] = text, len(text)


def _number(tokens: Sequence[int]) -> int:
    number = 0
    for token in tokens:
        number = number << BITS | token
    return number
