"""Propose draft tokens from n-grams of what a sequence and its group sampled.

A draft's tokens run as further rows of the sequence's decode step, every row is sampled as usual,
and the first sampled token that differs from the draft ends it. So a draft changes the number of
tokens of a step, and no token. Handles tokens, never tensors, on the engine's thread.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakValueDictionary

from cb_rollout.engine.request import Request

# Rows of a step with drafts. Up to here a further row costs linear layers a small part of the
# first one, as `scripts/bench.py roofline` prints.
MAX_DRAFT_ROWS = 16

# Tokens of one draft, where `num_speculative_tokens` is not set.
MAX_DRAFT_TOKENS = 7


class StepCost(NamedTuple):
    """Time of decode steps, as a number of rows."""

    step: int
    """Time of a step without rows."""
    drafted: int
    """Time that a step with drafts adds beside its rows."""


# By type of device. A CPU: measured, of the demo's model and of the bench's. A GPU: of 0.6B on an
# H100, as `scripts/bench.py gpu_model` models it; a step with drafts is launched after the last
# one's tokens are read, and sampled outside its graph: an estimated 0.5 ms.
STEP_COSTS = {"cpu": StepCost(48, 0), "cuda": StepCost(180, 40)}

# Acceptance rate below which not even one token is drafted: the step's bookkeeping costs more.
MIN_RATE = 0.08

# Weight of the last draft in an acceptance rate, and its rise for each step without a draft.
LEARNING_RATE, RECOVERY, INITIAL_RATE = 0.25, 0.005, 0.5

# Lengths of the n-grams that are looked up; the longest match counts.
NGRAM_SIZES = (4, 3, 2)

# An n-gram is known by a 64-bit hash: tuples would slow down the garbage collector. Two n-grams of
# one hash cost a rejected draft.
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

# Bits of a position; the sequence's number is above them.
_POSITION_BITS = 32


class GroupDrafts:
    """The sequences of a group, the last position that followed each n-gram in them, and a rate."""

    __slots__ = ("__weakref__", "_next", "_num_indexed", "_texts", "rate")

    def __init__(self, rate: float = INITIAL_RATE) -> None:
        self.rate = rate
        """Probability that a drafted token is accepted after accepted ones."""
        self._texts: list[Sequence[int]] = []
        self._num_indexed: list[int] = []
        self._next: dict[int, dict[int, int]] = {size: {} for size in NGRAM_SIZES}

    def add(self, token_ids: Sequence[int], num_known: int = 0) -> None:
        """Add a sequence that may grow, whose `num_known` leading tokens are indexed already."""
        self._texts.append(token_ids)
        self._num_indexed.append(num_known)

    def predict(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the last occurrence of the longest n-gram."""
        self._update()
        tail = list(token_ids[-max(NGRAM_SIZES) :])
        predicted: list[int] = []
        # A match that ends at the newest token is a loop; the longest n-gram continues it.
        while (wanted := count - len(predicted)) > 0:
            match = self._lookup((tail + predicted)[-max(NGRAM_SIZES) :])
            if match is None:
                break
            text, start = match
            predicted += text[start : start + wanted]
        return predicted

    def _update(self) -> None:
        for number, text in enumerate(self._texts):
            for size, following in self._next.items():
                for position in range(max(size, self._num_indexed[number]), len(text)):
                    ngram = _hash(text[position - size : position])
                    following[ngram] = number << _POSITION_BITS | position
            self._num_indexed[number] = len(text)

    def _lookup(self, tail: list[int]) -> tuple[Sequence[int], int] | None:
        for size in NGRAM_SIZES:
            match = self._next[size].get(_hash(tail[-size:])) if len(tail) >= size else None
            if match is not None:
                number, position = match >> _POSITION_BITS, match & ((1 << _POSITION_BITS) - 1)
                return self._texts[number], position
        return None


def _hash(tokens: Sequence[int]) -> int:
    number = 0
    for token in tokens:
        number = (number * _MULTIPLIER + token + 1) & _MASK
    return number


class NgramProposer:
    """Drafts tokens for the sequences of an engine."""

    def __init__(
        self, max_tokens: int | None, never_sampled: Sequence[int] = (), device_type: str = "cpu"
    ) -> None:
        """Draft at most `max_tokens` for a sequence, without `never_sampled`; None: the default."""
        self._never_sampled = frozenset(never_sampled)
        self._max_tokens = MAX_DRAFT_TOKENS if max_tokens is None else max_tokens
        self.cost = STEP_COSTS.get(device_type, STEP_COSTS["cpu"])
        self._proposed: list[tuple[Request, int, list[int]]] = []
        """Latest drafts, run or not, each with its sequence and the tokens of this at that time."""
        self._groups: WeakValueDictionary[int, GroupDrafts] = WeakValueDictionary()
        self.rate = INITIAL_RATE
        """Acceptance rate of the run's latest drafts."""

    def track(self, requests: Sequence[Request]) -> None:
        """Index sequences that got their first token; those of a group share an index."""
        for request in requests:
            if request.drafts is not None or request.status.is_final:
                continue
            group = self._groups.get(request.group) if request.group is not None else None
            num_known = len(request.prompt_ids) if group else 0
            request.drafts = group = group or GroupDrafts(self.rate)
            if request.group is not None:
                self._groups[request.group] = group
            group.add(request.token_ids, num_known)

    def propose(self, running: Sequence[Request]) -> list[list[int]]:
        """Return a draft for each sequence of the coming step; empty: no draft is worth its time.

        The last proposal is compared with what was sampled since, whether or not it ran.
        """
        for request, num_tokens, draft in self._proposed:
            pairs = list(zip(draft, request.token_ids[num_tokens:], strict=False))
            num_right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self.record(request, len(pairs), num_right)
        self._proposed = []
        if not 0 < len(running) <= MAX_DRAFT_ROWS // 2 or not self._max_tokens:
            return []
        if any(r.is_adjusted or r.params.top_logprobs for r in running):
            return []
        # A further row is worth its time if it gives as many tokens as the step's time gives.
        worth = len(running) / (self.cost.step + len(running))
        num_spare, gain = MAX_DRAFT_ROWS - len(running), -worth * self.cost.drafted
        drafts: list[list[int]] = []
        for request in running:
            draft = self._draft(request, min(self._max_tokens, num_spare), worth)
            drafts.append(draft)
            if draft and request.drafts is not None:
                self._proposed.append((request, request.num_tokens, draft))
                rate, num_spare = request.drafts.rate, num_spare - len(draft)
                gain += sum(rate**count - worth for count in range(1, len(draft) + 1))
        return drafts if gain > 0 else []

    def reject(self) -> None:
        """Count the latest drafts as wrong: their forward raised."""
        for request, _, draft in self._proposed:
            self.record(request, len(draft), 0)
        self.forget()

    def forget(self) -> None:
        """Compare the latest drafts with nothing, and hold their sequences no longer."""
        self._proposed = []

    def _draft(self, request: Request, longest: int, worth: float) -> list[int]:
        group = request.drafts
        if group is None or request.is_streaming:
            return []
        # The last token of a sequence is sampled, never drafted.
        longest = min(longest, request.max_new_tokens - request.num_generated - 1)
        min_rate = max(worth, MIN_RATE)
        if group.rate <= min_rate:
            group.rate = max(group.rate, min(INITIAL_RATE, group.rate + RECOVERY))
        if longest <= 0 or group.rate <= min_rate:
            return []
        tokens = group.predict(request.token_ids, longest)
        tokens = list(takewhile(lambda token: token not in self._never_sampled, tokens))
        num_worth, chance = 0, group.rate
        while num_worth < len(tokens) and chance > worth:
            num_worth += 1
            chance *= group.rate
        return tokens[:num_worth]

    def record(self, request: Request, num_drafted: int, num_right: int) -> None:
        if not num_drafted:
            return
        # The tokens after the first wrong one were not tried.
        share = num_right / min(num_drafted, num_right + 1)
        for holder in filter(None, (self, request.drafts)):
            holder.rate += LEARNING_RATE * (share - holder.rate)
