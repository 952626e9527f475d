"""Index the n-grams of token sequences, to look up what followed them.

Handles tokens, never tensors. Called by the thread that steps the engine.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cb_rollout.config.enums import DraftSource
from cb_rollout.engine.scheduler.completion_history import PromptHistory

# Lengths of the n-grams that are looked up; the longest match counts.
NGRAM_SIZES = (4, 3, 2)

# An n-gram is known by a 64-bit hash: tuples would slow down the garbage collector. Two n-grams of
# one hash cost a rejected draft.
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

# Bits of a position; the sequence's number is above them.
_POSITION_BITS = 32

# From so many new tokens on numpy hashes them faster than Python does.
_MANY = 32


# After so many lookups in a row without a match a group pauses, for as many again.
MISSES_BEFORE_PAUSE, LONGEST_PAUSE = 8, 256


class NgramIndex:
    """Token sequences, and the last position that followed each n-gram in them."""

    __slots__ = ("_next", "_texts", "_unfinished")

    def __init__(self) -> None:
        self._texts: list[Sequence[int]] = []
        self._unfinished: dict[int, int] = {}
        self._next: dict[int, dict[int, int]] = {size: {} for size in NGRAM_SIZES}

    def add(self, token_ids: Sequence[int], num_known: int, *, is_growing: bool = True) -> None:
        """Add a sequence; it is indexed at the next lookup.

        Args:
            token_ids: its tokens; a list that is growing is indexed further at each lookup.
            num_known: its leading tokens, such as a group's prompt, that are indexed already.
            is_growing: False: the sequence has ended.
        """
        self._unfinished[len(self._texts)] = num_known if is_growing else ~num_known
        self._texts.append(token_ids)

    def predict(self, tail: list[int], count: int, size: int) -> list[int]:
        """Return up to `count` tokens that followed the last occurrence of an n-gram.

        Args:
            tail: the last tokens of a sequence, as many as the longest n-gram has.
            count: most tokens to return.
            size: size of the n-gram; its continuation is looked up by the longest match.
        """
        found = self._lookup(tail, (size,))
        predicted: list[int] = []
        # A match that ends at the newest token is a loop; its continuation is looked up again.
        while found is not None and (wanted := count - len(predicted)) > 0:
            text, start = found
            predicted += text[start : start + wanted]
            found = self._lookup((tail + predicted)[-max(NGRAM_SIZES) :], NGRAM_SIZES)
        return predicted

    def update(self) -> None:
        """Index the tokens that were added since the last call."""
        for number, num_indexed in list(self._unfinished.items()):
            text = self._texts[number]
            has_ended = num_indexed < 0
            self._index(number, ~num_indexed if has_ended else num_indexed)
            if has_ended:
                del self._unfinished[number]
            else:
                self._unfinished[number] = len(text)

    def _index(self, number: int, num_indexed: int) -> None:
        text = self._texts[number]
        for size, following in self._next.items():
            first = max(size, num_indexed)
            if len(text) - first >= _MANY:
                hashes = _hashes(np.array(text[first - size : -1], dtype=np.uint64), size)
                base = number << _POSITION_BITS
                following.update(zip(hashes, range(base + first, base + len(text)), strict=True))
                continue
            for position in range(first, len(text)):
                ngram = _hash(text[position - size : position])
                following[ngram] = number << _POSITION_BITS | position

    def _lookup(self, tail: list[int], sizes: Sequence[int]) -> tuple[list[int], int] | None:
        """Return the sequence and the position that followed the longest n-gram at the end."""
        for size in sizes:
            found = self._next[size].get(_hash(tail[-size:])) if len(tail) >= size else None
            if found is not None:
                number, position = found >> _POSITION_BITS, found & ((1 << _POSITION_BITS) - 1)
                return self._texts[number], position  # pyright: ignore[reportReturnType]
        return None


def _hash(tokens: Sequence[int]) -> int:
    number = 0
    for token in tokens:
        number = (number * _MULTIPLIER + token + 1) & _MASK
    return number


def _hashes(tokens: np.ndarray, size: int) -> list[int]:
    """Return `_hash` of each run of `size` tokens."""
    count = len(tokens) - size + 1
    numbers = np.zeros(count, dtype=np.uint64)
    for offset in range(size):
        numbers = numbers * np.uint64(_MULTIPLIER) + tokens[offset : offset + count] + np.uint64(1)
    return numbers.tolist()


class Draft(NamedTuple):
    """Tokens proposed for a sequence."""

    tokens: list[int]
    source: DraftSource = DraftSource.GROUP


NO_DRAFT = Draft([])


class GroupDrafts:
    """N-grams that one group's drafts are looked up in, and how often drafts were right."""

    __slots__ = ("__weakref__", "_earlier", "_history", "_misses", "_pause", "_run", "own", "rates")

    def __init__(
        self, history: PromptHistory | None, run: NgramIndex, rates: dict[DraftSource, float]
    ) -> None:
        """Start with what the run knows.

        Args:
            history: earlier completions of the group's prompt; None: there are none.
            run: completions of other prompts.
            rates: acceptance rates of the run's latest drafts.
        """
        self.own = NgramIndex()
        self._earlier = NgramIndex() if history is not None and history.completions else None
        self._history, self._run = history, run
        self.rates = dict(rates)
        """Probability that a drafted token is accepted after accepted ones, by source."""
        self._misses = self._pause = 0

    def predict(self, token_ids: Sequence[int], count: int, min_rate: float) -> Draft:
        """Return up to `count` tokens that followed the longest n-gram at the end.

        Args:
            token_ids: the sequence.
            count: most tokens to return.
            min_rate: sources with a lower acceptance rate are left out.
        """
        if self._pause:
            self._pause -= 1
            return NO_DRAFT
        tail = list(token_ids[-max(NGRAM_SIZES) :])
        sources = [
            (source, index)
            for source, index in zip(DraftSource, self._indexes(), strict=True)
            if index is not None and self.rates[source] > min_rate
        ]
        for _, index in sources:
            index.update()
        for size in NGRAM_SIZES:
            for source, index in sources:
                if tokens := index.predict(tail, count, size):
                    self._misses = 0
                    return Draft(tokens, source)
        self._misses += 1
        if self._misses >= MISSES_BEFORE_PAUSE:
            self._pause = min(self._misses, LONGEST_PAUSE)
        return NO_DRAFT

    def _indexes(self) -> tuple[NgramIndex, NgramIndex | None, NgramIndex]:
        """Return the index of each source, in the order of `DraftSource`."""
        if self._history is not None and self._earlier is not None:
            # Filled at the first lookup: most sequences end before they get a draft.
            prompt_ids = self._history.prompt_ids
            for completion in self._history.completions:
                self._earlier.add([*prompt_ids, *completion], len(prompt_ids), is_growing=False)
            self._history = None
        return self.own, self._earlier, self._run
