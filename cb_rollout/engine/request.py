"""Hold a sequence's state and an engine's sizes, for the thread that steps the engine."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cb_rollout.compat.rope import rope_side
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from cb_rollout.config.grammar import GrammarMatcher
    from cb_rollout.config.sampling import SamplingParams
    from cb_rollout.engine.images.prompt_images import PromptImages
    from cb_rollout.engine.sampling.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of an engine; fixed until its memory is planned again."""

    block_size: int
    max_batch_tokens: int
    """Maximum tokens of one prefill, including padding if it is padded."""
    max_requests: int
    """Maximum sequences that run together; rows of the block table."""
    can_share_blocks: bool
    """True if a group shares its prompt's whole blocks; False: it copies them."""
    can_resume_prompts: bool
    """False if a layer is recurrent: its state cannot be restored from keys."""
    is_packed: bool
    """True if a prefill has no padding; False: each row is padded to the longest."""
    rope_limits: tuple[int, ...] = ()
    """Lengths in tokens at which RoPE frequencies change and cached keys become invalid; see
    `compat/rope.py`."""
    max_used_blocks: int | None = None
    """Most blocks that may be in use when another sequence is admitted; None: no limit, but a block
    stays free for every running sequence."""

    def rope_side(self, num_tokens: int) -> int:
        """Return the same number for all lengths at which RoPE computes the same keys."""
        return rope_side(self.rope_limits, num_tokens)

    @property
    def can_match_prefixes(self) -> bool:
        return self.can_share_blocks and self.can_resume_prompts


def distinct_params(requests: Sequence[Request]) -> list[SamplingParams]:
    """Return the distinct sampling parameters; many requests share one object."""
    distinct: dict[int, SamplingParams] = {}
    for request in requests:
        params = request.params
        distinct[id(params)] = params
    return list(distinct.values())


# The `table_row` of a waiting sequence.
NO_TABLE_ROW = -1


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of a sequence."""

    request_id: str
    """Unique id among the unfinished requests."""
    prompt_ids: list[int]
    """Prompt tokens, never written to; members of a group may share the list."""
    params: SamplingParams
    max_new_tokens: int
    stop_tokens: frozenset[int]
    """Token ids that end the sequence, EOS included."""
    seed: int
    """Seed of the sequence's own stream of uniform draws."""
    group: int | None = None
    """Number shared by queue neighbours with the same prompt; None: no other sequence shares it."""
    images: PromptImages | None = None
    """Images of the prompt, shared by its group; None: it has none."""
    is_streaming: bool = False
    records_timestamps: bool = False
    stop_strings: StopStrings | None = None
    """Detector of the strings that end the sequence; None: there are none."""
    matcher: GrammarMatcher | None = None
    """State of the sequence in its grammar; None: it has no grammar."""
    is_adjusted: bool = field(init=False)
    """True if its logits are changed before the temperature."""

    status: RequestStatus = RequestStatus.PENDING
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Message of the failure; its exception is in `cause`."""
    cause: Exception | None = None
    token_ids: list[int] = field(init=False)
    """Prompt and sampled tokens; `prompt_ids` itself until a token is sampled."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each sampled token, as a natural logarithm."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Most likely tokens at each sampled token; empty unless asked for."""
    kept_token_ids: list[Sequence[int]] = field(default_factory=list)
    """Token ids that truncation kept at each sampled token; empty unless it is replayed."""
    routed_experts: Any = None
    """Experts of its first tokens, an array `[tokens, L, K]`, saved when it lost its blocks; None:
    not recorded."""
    timestamps: list[float] = field(default_factory=list)
    """Time of each sampled token, by `time.perf_counter`."""
    policy_starts: list[tuple[int, int]] = field(default_factory=list)
    """Each policy version that sampled it, and the number of tokens sampled before."""
    created_time: float = field(default_factory=time.perf_counter)
    """By `time.perf_counter`; so are the next three, which are None until they happen."""
    admitted_time: float | None = None
    first_token_time: float | None = None
    ended_time: float | None = None
    num_preemptions: int = 0
    requeues: list[tuple[float, str]] = field(default_factory=list)
    """Each time that it lost its blocks and waited again, with the reason: "preempted", or
    "recomputed" because weights, keys or memory changed."""
    resumed_times: list[float] = field(default_factory=list)
    """`time.perf_counter()` of each readmission, one per requeue."""
    observed: Any = None
    """Record that the observer made at submission; None: no observer was set."""
    num_cached_tokens: int = 0
    """Prompt tokens found in a cached prefix or the sequence's group when its prefill began."""

    table_row: int = NO_TABLE_ROW
    """Row of the block table and of the recurrent states."""
    block_ids: list[int] = field(default_factory=list)
    """Blocks that hold its tokens, in order."""
    num_computed: int = 0
    """Leading tokens whose keys, values and states are in the cache."""
    prefix_node: int = 0
    """Prefix cache node of its last stored block; 0 is the root."""
    num_remembered: int = 0
    """Leading blocks that were offered to the prefix cache."""
    rope_side: int = 0
    """`Limits.rope_side` of the length for which the keys in the cache were computed."""
    has_old_keys: bool = False
    """True if the cache holds keys of an older policy, which no other sequence may share."""

    def __post_init__(self) -> None:
        self.token_ids = self.prompt_ids
        self.is_adjusted = self.params.is_adjusted

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def policy_versions(self) -> list[tuple[int, int]]:
        """Runs of (version, number of sampled tokens)."""
        if not self.policy_starts:
            return []
        ends = [start for _, start in self.policy_starts[1:]]
        ends.append(self.num_generated)
        runs: list[tuple[int, int]] = []
        for (version, start), end in zip(self.policy_starts, ends, strict=True):
            runs.append((version, end - start))
        return runs

    @property
    def lifespan(self) -> tuple[float, float]:
        """Start and end times; -1: not yet. A sequence that never ran starts when it ends."""
        ended = -1.0 if self.ended_time is None else self.ended_time
        if self.admitted_time is None:
            return ended, ended
        return self.admitted_time, ended

    @property
    def num_image_tokens(self) -> int:
        """Tokens up to the end of the last image; 0 without images."""
        return 0 if self.images is None else self.images.num_tokens

    @property
    def position_offset(self) -> int:
        """Position of a token after the images, minus its index in the sequence."""
        if self.images is None:
            return 0
        assert self.images.position_offset is not None, "no forward has seen the images"
        return self.images.position_offset

    def cache_keys(self, start: int, stop: int) -> Sequence[Hashable]:
        """Return the prefix cache's keys of tokens `[start, stop)`: ids, and hashes of images."""
        if self.images is None:
            return self.token_ids[start:stop]
        return self.images.cache_keys(self.token_ids, start, stop)

    @property
    def min_generated(self) -> int:
        """Minimum tokens to sample; until then, only the length limit can end this sequence."""
        return max(self.params.min_new_tokens, self.params.min_length - len(self.prompt_ids))

    def append(
        self,
        token_id: int,
        logprob: float,
        policy_version: int,
        top_logprobs: list[tuple[int, float]] | None = None,
    ) -> None:
        # Called for every token, so it creates nothing and calls no property without need.
        token_ids = self.token_ids
        if token_ids is self.prompt_ids:
            self.token_ids = token_ids = list(self.prompt_ids)
        starts = self.policy_starts
        if not starts or starts[-1][0] != policy_version:
            starts.append((policy_version, len(token_ids) - len(self.prompt_ids)))
        token_ids.append(token_id)
        self.logprobs.append(logprob)
        if top_logprobs is not None:
            self.top_logprobs.append(top_logprobs)
        if self.records_timestamps:
            self.timestamps.append(time.perf_counter())
        is_last = token_id in self.stop_tokens
        if self.stop_strings is not None or self.matcher is not None:
            is_last |= self._is_text_done(token_id)
            if self.status.is_final:
                return
        if is_last:
            self.end(RequestStatus.FINISHED, FinishReason.STOP)
        elif len(token_ids) - len(self.prompt_ids) >= self.max_new_tokens:
            self.end(RequestStatus.FINISHED, FinishReason.LENGTH)

    def _is_text_done(self, token_id: int) -> bool:
        is_done = False
        if self.stop_strings is not None:
            with self.failing_with("decoding for stop="):
                is_found = self.stop_strings.found_with(token_id)
                is_done = is_found and self.num_generated >= self.min_generated
        if self.matcher is not None:
            with self.failing_with("the grammar"):
                is_accepted = self.matcher.accept_token(token_id)
                # A stop token that is not in the grammar still ends the sequence.
                if not is_accepted and token_id not in self.stop_tokens:
                    raise ValueError(
                        f"token id {token_id}, which its own mask allowed, was not accepted"
                    )
                is_done |= self.matcher.is_terminated()
        return is_done

    @contextmanager
    def failing_with(self, culprit: str) -> Iterator[None]:
        """Fail only this sequence if the user's code inside the block raises."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  the output reports it
            if not self.status.is_final:
                self.fail(f"{culprit} raised {type(error).__name__}: {error}")

    def fail(self, message: str, cause: Exception | None = None) -> None:
        self.end(RequestStatus.FAILED, FinishReason.ERROR, message)
        self.cause = cause

    def end(self, status: RequestStatus, reason: FinishReason, error: str | None = None) -> None:
        assert not self.status.is_final, f"{self.request_id} ended twice"
        self.status = status
        self.finish_reason = reason
        self.error = error
        self.ended_time = time.perf_counter()

    def reset_cache(self) -> None:
        self.num_computed = 0
        self.prefix_node = 0
        self.num_remembered = 0
        self.has_old_keys = False
        self.status = RequestStatus.PENDING

    def output(self, with_logprobs: bool = True) -> GenerationOutput:
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=list(self.prompt_ids),
            generated_tokens=self.token_ids[len(self.prompt_ids) :],
            logprobs=list(self.logprobs) if with_logprobs else [],
            status=self.status,
            finish_reason=self.finish_reason,
            error=self.error,
            created_time=self.created_time,
            lifespan=self.lifespan,
            timestamps=list(self.timestamps) if self.records_timestamps else None,
            policy_versions=self.policy_versions,
            top_logprobs=list(self.top_logprobs) if self.params.top_logprobs else None,
            kept_token_ids=self.kept_token_ids[: self.num_generated] or None,
            routed_experts=self.routed_experts if self.status.is_final else None,
            temperature=1.0 if self.params.is_greedy else self.params.temperature,
            adapter=self.params.adapter,
            images=self.images,
        )


@dataclass(slots=True)
class Prefill:
    """A sequence that is being prefilled, and the sequences that will be forked from it."""

    leader: Request
    followers: list[Request] = field(default_factory=list)
    num_scheduled: int = 0
    """Tokens that the coming forward computes."""


def members(prefills: Iterable[Prefill]) -> list[Request]:
    """Return the sequences of prefills, each leader before its followers."""
    requests: list[Request] = []
    for prefill in prefills:
        requests.append(prefill.leader)
        requests.extend(prefill.followers)
    return requests
