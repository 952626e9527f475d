"""What one engine may use at once.

One sequence on its way through the engine: what was asked, what is cached, what came out.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cb_rollout.config.grammar import GrammarMatcher
    from cb_rollout.config.sampling import SamplingParams
    from cb_rollout.engine.sampling.stop_strings import StopStrings
    from cb_rollout.engine.spec_decode.ngram import NgramIndex


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that never change while an engine runs."""

    block_size: int
    max_batch_tokens: int
    max_requests: int
    can_share_blocks: bool
    """Whether a group may share its prompt's whole blocks, or must copy them."""
    can_resume_prompts: bool
    """False where a layer is recurrent: no chunk or known prefix can be continued from its keys."""

    @property
    def can_match_prefixes(self) -> bool:
        """Whether blocks of one sequence may serve a later one."""
        return self.can_share_blocks and self.can_resume_prompts


NO_TABLE_ROW = -1
# While a sequence waits.


@dataclass(slots=True, eq=False)
class Request:
    """The mutable state of one sequence; owned by the thread that steps the engine."""

    request_id: str
    prompt_ids: list[int]
    """Never written to; a group's members may hold one list."""
    params: SamplingParams
    max_new_tokens: int
    stop_tokens: frozenset[int]
    seed: int
    """Seed of this sequence's own stream of uniform draws."""
    group: int | None = None
    """Queue neighbours of one number have one prompt; None: a prompt of its own."""
    is_streaming: bool = False
    records_timestamps: bool = False
    stop_strings: StopStrings | None = None
    """Looks for the strings that end this sequence; None: there are none."""
    matcher: GrammarMatcher | None = None
    """How far this sequence has come through its grammar; None: it has none."""

    ngram_index: NgramIndex | None = None
    """Where drafts are looked up; None: nowhere, as once it has ended."""

    is_adjusted: bool = field(init=False)
    """Whether its logits are changed before the temperature."""

    status: RequestStatus = RequestStatus.PENDING
    finish_reason: FinishReason | None = None
    error: str | None = None
    cause: Exception | None = None
    """What made it fail, where that was an exception."""
    token_ids: list[int] = field(init=False)
    """The prompt, then what was sampled; the prompt's own list until something was."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """With each sampled token, the most likely ones; empty unless asked for."""
    kept_token_ids: list[Sequence[int]] = field(default_factory=list)
    """With each sampled token, the ids that truncation left; empty unless they are kept."""
    timestamps: list[float] = field(default_factory=list)
    policy_versions: list[tuple[int, int]] = field(default_factory=list)
    created_time: float = field(default_factory=time.perf_counter)
    admitted_time: float | None = None
    """When it first left the queue."""
    first_token_time: float | None = None
    num_preemptions: int = 0

    table_row: int = NO_TABLE_ROW
    """Row of the block table and of the recurrent states."""
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens whose keys, values and states are in the cache."""
    prefix_node: int = 0
    """Where this sequence's last remembered block stands in the prefix index; 0 is the root."""
    num_remembered: int = 0
    """Leading blocks already offered to the prefix index."""
    has_old_keys: bool = False
    """Whether the cache holds keys of an older policy, which no other sequence may share."""

    def __post_init__(self) -> None:
        """Start from the prompt."""
        self.token_ids = self.prompt_ids
        self.is_adjusted = self.params.is_adjusted

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def min_generated(self) -> int:
        """Tokens to sample before anything but the length may end this sequence."""
        return max(self.params.min_new_tokens, self.params.min_length - len(self.prompt_ids))

    def append(
        self,
        token_id: int,
        logprob: float,
        policy_version: int,
        top_logprobs: list[tuple[int, float]] | None = None,
    ) -> None:
        """Take a sampled token, and finish if it was the last."""
        if self.token_ids is self.prompt_ids:
            self.token_ids = list(self.prompt_ids)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if top_logprobs is not None:
            self.top_logprobs.append(top_logprobs)
        if self.policy_versions and self.policy_versions[-1][0] == policy_version:
            self.policy_versions[-1] = (policy_version, self.policy_versions[-1][1] + 1)
        else:
            self.policy_versions.append((policy_version, 1))
        if self.records_timestamps:
            self.timestamps.append(time.perf_counter())
        is_last = token_id in self.stop_tokens
        if self.stop_strings is not None or self.matcher is not None:
            is_last |= self._is_text_done(token_id)
            if self.status.is_final:
                return
        if is_last:
            self.end(RequestStatus.FINISHED, FinishReason.STOP)
        elif self.num_generated >= self.max_new_tokens:
            self.end(RequestStatus.FINISHED, FinishReason.LENGTH)

    def _is_text_done(self, token_id: int) -> bool:
        """Whether a stop string or the grammar ends the sequence with this token."""
        is_done = False
        if self.stop_strings is not None:
            with self.failing_with("decoding for stop="):
                is_found = self.stop_strings.found_with(token_id)
                is_done = is_found and self.num_generated >= self.min_generated
        if self.matcher is not None:
            with self.failing_with("the grammar"):
                is_done |= self._is_grammar_done(self.matcher, token_id)
        return is_done

    def _is_grammar_done(self, matcher: GrammarMatcher, token_id: int) -> bool:
        is_accepted = matcher.accept_token(token_id)
        # A stop token that the grammar does not know still ends the sequence.
        if not is_accepted and token_id not in self.stop_tokens:
            raise ValueError(f"token id {token_id}, which its own mask allowed, was not accepted")
        return matcher.is_terminated()

    @contextmanager
    def failing_with(self, culprit: str) -> Iterator[None]:
        """Let an exception of somebody else's code end this sequence, and no other."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  it may be anything, and is told to the caller
            if not self.status.is_final:
                said = f"{culprit} raised {type(error).__name__}: {error}"
                self.end(RequestStatus.FAILED, FinishReason.ERROR, said)

    def end(self, status: RequestStatus, reason: FinishReason, error: str | None = None) -> None:
        """Reach a final status."""
        assert not self.status.is_final, f"{self.request_id} ended twice"
        self.status, self.finish_reason, self.error = status, reason, error
        # What is kept of an ended sequence is not to keep what its group has said.
        self.ngram_index = None

    def reset_cache(self) -> None:
        """Forget what was cached, keeping every token and log-probability."""
        self.table_row = NO_TABLE_ROW
        self.block_ids = []
        self.num_computed = self.prefix_node = self.num_remembered = 0
        self.has_old_keys = False
        self.status = RequestStatus.PENDING

    def output(self, with_logprobs: bool = True) -> GenerationOutput:
        """What a caller sees of this sequence now."""
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=list(self.prompt_ids),
            generated_tokens=self.token_ids[len(self.prompt_ids) :],
            logprobs=list(self.logprobs) if with_logprobs else [],
            status=self.status,
            finish_reason=self.finish_reason,
            error=self.error,
            created_time=self.created_time,
            timestamps=list(self.timestamps) if self.records_timestamps else None,
            policy_versions=list(self.policy_versions),
            top_logprobs=list(self.top_logprobs) if self.params.top_logprobs else None,
            kept_token_ids=self.kept_token_ids[: self.num_generated] or None,
        )


@dataclass(slots=True)
class Prefill:
    """A sequence whose tokens are being computed, with those that will be forked from it."""

    leader: Request
    followers: list[Request] = field(default_factory=list)
    num_scheduled: int = 0
    """Tokens that the coming forward computes."""

    @property
    def is_last_chunk(self) -> bool:
        """Whether the coming forward completes the prompt."""
        return self.leader.num_computed + self.num_scheduled == self.leader.num_tokens
