"""What the sequences of one group have said, and what was said after the same words last time.

Knows tokens only.

Guesses what running sequences say next, from what they and their group have said already.

Completions of one prompt resemble each other, and themselves. A guessed run of tokens is a *draft*:
its tokens run as further rows of the sequence's decode step, every row is sampled as ever, and the
first token that differs from the draft ends it. So a draft decides how many tokens a step brings,
and nothing about which. Knows tokens, never tensors.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

from cb_rollout.engine.request import Request

GRAMS = (4, 3, 2)
# How many tokens must have been said before for the next ones to be expected again; the longest
# that is known counts.

BITS = 32
# Of one token, or one place. Runs of tokens and places are kept as numbers: so many tuples would
# have the garbage collector look at everything there is.


class NgramIndex:
    """What the sequences of one group have said, and where each run of tokens was said last."""

    __slots__ = ("__weakref__", "_after", "_texts", "acceptance_rate")

    def __init__(self) -> None:
        """Know nothing."""
        self._texts: list[tuple[list[int], int]] = []
        self._after: dict[int, dict[int, int]] = {size: {} for size in GRAMS}
        self.acceptance_rate = 0.5
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


MOST_ROWS = 16
# Of a step with drafts: up to here a further row costs linear layers a small part of the first one,
# as the bench's `roofline` prints.

MOST_DRAFTED = 7
# Tokens of one draft, where nobody says another number.

LEARNING, RECOVERING = 0.25, 0.01
# How fast the acceptance_rate of a group follows its last draft, and rises where none is made.


class NgramProposer:
    """Drafts for one engine."""

    def __init__(self, most_drafted: int | None) -> None:
        """Draft at most so many tokens at once; None: `MOST_DRAFTED`."""
        self._most_drafted = MOST_DRAFTED if most_drafted is None else most_drafted
        self._groups: WeakValueDictionary[int, NgramIndex] = WeakValueDictionary()

    def listen(self, requests: Sequence[Request]) -> None:
        """Follow sequences that got their first token; those that are followed go on to be."""
        for request in requests:
            if request.ngram_index is not None or request.status.is_final:
                continue
            ngram_index = self._groups.get(request.group) if request.group is not None else None
            num_known = len(request.prompt_ids) if ngram_index else 0
            request.ngram_index = ngram_index = ngram_index or NgramIndex()
            if request.group is not None:
                self._groups[request.group] = ngram_index
            ngram_index.listen(request.token_ids, num_known)

    def most_drafted(self, num_rows: int) -> int:
        """Tokens of the longest draft that each of so many sequences may have."""
        return max(0, min(self._most_drafted, MOST_ROWS // num_rows - 1)) if num_rows else 0

    def drafts(self, running: Sequence[Request]) -> list[list[int]]:
        """What each sequence is expected to say; empty where none is to be tried.

        Args:
            running: all rows of the coming decode step.
        """
        most = self.most_drafted(len(running))
        if not most or any(r.is_adjusted or r.params.top_logprobs for r in running):
            return []
        drafts = [self._draft(request, most) for request in running]
        return drafts if any(drafts) else []

    def _draft(self, request: Request, most: int) -> list[int]:
        ngram_index = request.ngram_index
        if ngram_index is None or request.is_streaming:
            return []
        wanted = round(ngram_index.acceptance_rate * most)
        if not wanted:
            ngram_index.acceptance_rate = min(1.0, ngram_index.acceptance_rate + RECOVERING)
        # The last token of a sequence is sampled, never drafted.
        left = request.max_new_tokens - request.num_generated - 1
        return (
            ngram_index.expected(request.token_ids, min(wanted, left)) if min(wanted, left) else []
        )

    def note(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn how a draft fared."""
        if num_drafted and request.ngram_index is not None:
            ngram_index = request.ngram_index
            ngram_index.acceptance_rate += LEARNING * (
                num_accepted / num_drafted - ngram_index.acceptance_rate
            )
