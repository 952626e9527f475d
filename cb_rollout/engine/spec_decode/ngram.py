"""Propose draft tokens from n-grams of what a sequence, its group and earlier rollouts sampled.

Completions of one prompt resemble each other, and themselves. A draft's tokens run as further rows
of the sequence's decode step, every row is sampled as usual, and the first sampled token that
differs from the draft ends it. So a draft changes the number of tokens of a step, and no token.
Handles tokens, never tensors. Called by the thread that steps the engine.
"""

from collections.abc import Sequence
from itertools import takewhile
from weakref import WeakValueDictionary

from cb_rollout.config.enums import DraftSource
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Request
from cb_rollout.engine.spec_decode.ngram_index import NO_DRAFT, Draft, GroupDrafts, NgramIndex

# Rows of a step with drafts. Up to here a further row costs linear layers a small part of the
# first one, as `scripts/bench.py roofline` prints.
MAX_DRAFT_ROWS = 16

# Tokens of one draft, where `num_speculative_tokens` is not set.
MAX_DRAFT_TOKENS = 7

# Time of a step without rows, as a number of rows: of the demo's model and of the bench's on a CPU.
ROWS_PER_STEP = 48

# Acceptance rate below which not even one token is drafted: the step's bookkeeping costs more.
MIN_RATE = 0.08

# Weight of the last draft in an acceptance rate, and its rise for each step without a draft.
LEARNING_RATE, RECOVERY, INITIAL_RATE = 0.25, 0.005, 0.5

# Tokens of other prompts that are indexed; from then on a new index begins.
MAX_RUN_TOKENS = 1 << 15


class NgramProposer:
    """Drafts tokens for the sequences of one engine."""

    def __init__(self, max_tokens: int | None, never_sampled: Sequence[int] = ()) -> None:
        """Draft at most `max_tokens` for a sequence; None: `MAX_DRAFT_TOKENS`.

        `never_sampled`: token ids of prompts that are not drafted.
        """
        self._never_sampled = frozenset(never_sampled)
        self._max_tokens = MAX_DRAFT_TOKENS if max_tokens is None else max_tokens
        self._groups: WeakValueDictionary[int, GroupDrafts] = WeakValueDictionary()
        self._run, self._num_run_tokens = NgramIndex(), 0
        self.rates = dict.fromkeys(DraftSource, INITIAL_RATE)
        """Acceptance rate of each source, over the run's latest drafts."""

    def track(self, requests: Sequence[Request]) -> None:
        """Index sequences that got their first token; those of one group share an index."""
        for request in requests:
            if request.drafts is not None or request.status.is_final:
                continue
            group = self._groups.get(request.group) if request.group is not None else None
            num_known = len(request.prompt_ids) if group else 0
            request.drafts = group = group or GroupDrafts(request.history, self._run, self.rates)
            if request.group is not None:
                self._groups[request.group] = group
            group.own.add(request.token_ids, num_known)

    def add_to_run(self, request: Request) -> None:
        """Index a sequence that has ended, for drafts of other prompts."""
        if self._num_run_tokens > MAX_RUN_TOKENS:
            self._run, self._num_run_tokens = NgramIndex(), 0
        text = request.token_ids[len(request.prompt_ids) :]
        self._run.add(text, 0, is_growing=False)
        self._num_run_tokens += len(text)

    def can_propose(self, num_sequences: int) -> bool:
        """Return whether a step of so many sequences may have drafts."""
        return 0 < num_sequences <= MAX_DRAFT_ROWS // 2 and self._max_tokens > 0

    def propose(self, running: Sequence[Request]) -> list[Draft]:
        """Return a draft for each sequence of the coming step; empty: no sequence gets one."""
        if not self.can_propose(len(running)):
            return []
        if any(r.is_adjusted or r.params.top_logprobs for r in running):
            return []
        # A further row is worth its time if it gives as many tokens as the step's time gives.
        worth = len(running) / (ROWS_PER_STEP + len(running))
        weights = _weights(running)
        num_spare = MAX_DRAFT_ROWS - len(running)
        drafts = [NO_DRAFT] * len(running)
        # The longest first: the rollout ends with them.
        for index in sorted(range(len(running)), key=weights.__getitem__, reverse=True):
            if num_spare <= 0:
                break
            longest = min(self._max_tokens, num_spare)
            drafts[index] = self._draft(running[index], longest, worth / weights[index])
            num_spare -= len(drafts[index].tokens)
        return drafts if any(draft.tokens for draft in drafts) else []

    def _draft(self, request: Request, longest: int, worth: float) -> Draft:
        group = request.drafts
        if group is None or request.is_streaming:
            return NO_DRAFT
        # The last token of a sequence is sampled, never drafted.
        longest = min(longest, request.max_new_tokens - request.num_generated - 1)
        min_rate = max(worth, MIN_RATE)
        for source, rate in group.rates.items():
            if rate <= min_rate:
                group.rates[source] = max(rate, min(INITIAL_RATE, rate + RECOVERY))
        if longest <= 0 or max(group.rates.values()) <= min_rate:
            return NO_DRAFT
        tokens, source = group.predict(request.token_ids, longest, min_rate)
        tokens = list(takewhile(lambda token: token not in self._never_sampled, tokens))
        num_worth, chance = 0, group.rates[source]
        while num_worth < len(tokens) and chance > worth:
            num_worth += 1
            chance *= group.rates[source]
        return Draft(tokens[:num_worth], source)

    def record(self, request: Request, draft: Draft, num_right: int) -> None:
        """Update the acceptance rates of a draft's source."""
        if not draft.tokens:
            return
        # The tokens after the first wrong one were not tried.
        share = num_right / min(len(draft.tokens), num_right + 1)
        for rates in (self.rates, None if request.drafts is None else request.drafts.rates):
            if rates is not None:
                rates[draft.source] += LEARNING_RATE * (share - rates[draft.source])


def _weights(running: Sequence[Request]) -> list[float]:
    """Return the tokens that each sequence is expected to lack, as a share of the longest's.

    1 for a prompt without earlier completions.
    """
    known = [
        None
        if r.expected_length is None
        # What is longer than expected goes on for long: so are lengths with a long tail.
        else max(r.expected_length - r.num_generated, 0.5 * r.num_generated, 1.0)
        for r in running
    ]
    longest = max((tokens for tokens in known if tokens is not None), default=1.0)
    return [1.0 if tokens is None else tokens / longest for tokens in known]


def can_draft(runner: ModelRunner, layout: CacheLayout, config: RolloutConfig) -> bool:
    """Return whether drafts are on, and a forward can take several rows of one sequence."""
    takes_rows = runner.batch_layout.takes_any_lengths and not layout.is_recurrent
    return takes_rows and config.num_speculative_tokens != 0
