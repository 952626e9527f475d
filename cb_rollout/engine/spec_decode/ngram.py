"""Propose draft tokens from n-grams of a sequence and of its group.

Completions of one prompt resemble each other, and themselves. A draft's tokens run as further rows
of the sequence's decode step, every row is sampled as usual, and the first sampled token that
differs from the draft ends it. So a draft changes the number of tokens of a step, and no token.
Handles tokens, never tensors. Called by the thread that steps the engine.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Request

# Lengths of the n-grams that are looked up; the longest match counts.
NGRAM_SIZES = (4, 3, 2)

# Bits of a token id, and of a position. n-grams and positions are packed into integers: as tuples
# they would slow down the garbage collector.
BITS = 32

# Rows of a step with drafts. Up to here a further row costs linear layers a small part of the first
# one, as the bench's `roofline` prints.
MAX_DRAFT_ROWS = 16

# Tokens of one draft, where `num_speculative_tokens` is not set.
MAX_DRAFT_TOKENS = 7

# Weight of the last draft in a group's acceptance rate, and its rise for each step without one.
LEARNING_RATE, RECOVERY = 0.25, 0.01


class NgramIndex:
    """Tokens of one group's sequences, and the last position that followed each n-gram."""

    __slots__ = ("__weakref__", "_next", "_texts", "acceptance_rate")

    def __init__(self) -> None:
        self._texts: list[tuple[list[int], int]] = []
        self._next: dict[int, dict[int, int]] = {size: {} for size in NGRAM_SIZES}
        self.acceptance_rate = 0.5
        """Share of drafted tokens that were accepted, as a moving average."""

    def add(self, token_ids: list[int], num_known: int) -> None:
        """Index a growing sequence, whose first `num_known` tokens are indexed already."""
        self._texts.append((token_ids, num_known))

    def predict(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the last occurrence of the last n-gram."""
        self._update()
        tail = list(token_ids[-max(NGRAM_SIZES) :])
        num_given = len(tail)
        # A match that ends at the newest token is a loop; its continuation is looked up again.
        while (wanted := count - len(tail) + num_given) > 0 and (found := self._lookup(tail)):
            text, start = found
            tail += text[start : start + wanted]
        return tail[num_given:]

    def _lookup(self, tail: list[int]) -> tuple[list[int], int] | None:
        """Return the sequence and the position that followed the longest n-gram at the end."""
        for size in NGRAM_SIZES:
            found = self._next[size].get(_packed(tail[-size:])) if len(tail) >= size else None
            if found is not None:
                return self._texts[found >> BITS][0], found & ((1 << BITS) - 1)
        return None

    def _update(self) -> None:
        """Index the tokens that were appended since the last call."""
        for index, (text, num_indexed) in enumerate(self._texts):
            for size, following in self._next.items():
                for position in range(max(size, num_indexed), len(text)):
                    ngram = _packed(text[position - size : position])
                    following[ngram] = index << BITS | position
            self._texts[index] = text, len(text)


def _packed(tokens: Sequence[int]) -> int:
    number = 0
    for token in tokens:
        number = number << BITS | token
    return number


class NgramProposer:
    """Drafts tokens for the sequences of one engine."""

    def __init__(self, max_tokens: int | None) -> None:
        """Draft at most `max_tokens` for a sequence; None: `MAX_DRAFT_TOKENS`."""
        self._max_tokens = MAX_DRAFT_TOKENS if max_tokens is None else max_tokens
        self._groups: WeakValueDictionary[int, NgramIndex] = WeakValueDictionary()

    def track(self, requests: Sequence[Request]) -> None:
        """Index sequences that got their first token; those of one group share an index."""
        for request in requests:
            if request.ngram_index is not None or request.status.is_final:
                continue
            index = self._groups.get(request.group) if request.group is not None else None
            num_known = len(request.prompt_ids) if index else 0
            request.ngram_index = index = index or NgramIndex()
            if request.group is not None:
                self._groups[request.group] = index
            index.add(request.token_ids, num_known)

    def max_draft_tokens(self, num_sequences: int) -> int:
        """Return the length of the longest draft, if so many sequences run."""
        if not num_sequences:
            return 0
        return max(0, min(self._max_tokens, MAX_DRAFT_ROWS // num_sequences - 1))

    def propose(self, running: Sequence[Request]) -> list[list[int]]:
        """Return a draft for each sequence of the coming step; empty: no sequence gets one."""
        longest = self.max_draft_tokens(len(running))
        if not longest or any(r.is_adjusted or r.params.top_logprobs for r in running):
            return []
        drafts = [self._draft(request, longest) for request in running]
        return drafts if any(drafts) else []

    def _draft(self, request: Request, longest: int) -> list[int]:
        index = request.ngram_index
        if index is None or request.is_streaming:
            return []
        wanted = round(index.acceptance_rate * longest)
        if not wanted:
            index.acceptance_rate = min(1.0, index.acceptance_rate + RECOVERY)
        # The last token of a sequence is sampled, never drafted.
        wanted = min(wanted, request.max_new_tokens - request.num_generated - 1)
        return index.predict(request.token_ids, wanted) if wanted else []

    def record(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Update the acceptance rate of a sequence's group."""
        index = request.ngram_index
        if num_drafted and index is not None:
            error = num_accepted / num_drafted - index.acceptance_rate
            index.acceptance_rate += LEARNING_RATE * error


def can_draft(runner: ModelRunner, layout: CacheLayout, config: RolloutConfig) -> bool:
    """Return whether drafts are on, and a forward can take several rows of one sequence."""
    takes_rows = runner.batch_layout.takes_any_lengths and not layout.is_recurrent
    return takes_rows and config.num_speculative_tokens != 0
