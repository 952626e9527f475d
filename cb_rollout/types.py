"""Define the public records of requests, outputs and weight syncs: plain data, without torch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn, Self


class RequestStatus(StrEnum):
    """State of a request; the last three are final.

    Compatible with transformers' `RequestStatus` (5.17 to 5.24, an `IntEnum`): a member equals
    transformers' member, has the same hash, and is ordered by the same number. It also equals its
    own value, such as "finished". To look it up by value in a set or a dict, use `status.value`.
    """

    PENDING = "pending", 0
    PREFILLING = "prefilling", 1
    DECODING = "decoding", 2
    FINISHED = "finished", 3
    CANCELLED = "cancelled", 5
    """Not in transformers, whose numbers end at FAILED."""
    FAILED = "failed", 4

    number: int

    def __new__(cls, word: str, number: int) -> Self:
        """Create a member from its word and its number in transformers."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.number = number
        return member

    @classmethod
    def _missing_(cls, value: object) -> "RequestStatus | None":
        """Look up a member by number, such as a member of transformers' enum."""
        for member in cls:
            if isinstance(value, int) and member.number == value:
                return member
        return None

    @property
    def is_final(self) -> bool:
        """True once the request has ended."""
        return self.number >= _FIRST_FINAL_NUMBER

    def __index__(self) -> int:
        return self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.number == other
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: object) -> bool:
        if isinstance(other, int | RequestStatus):
            return self.number < int(other)
        return NotImplemented

    def __le__(self, other: object) -> bool:
        if isinstance(other, int | RequestStatus):
            return self.number <= int(other)
        return NotImplemented

    def __gt__(self, other: object) -> bool:
        if isinstance(other, int | RequestStatus):
            return self.number > int(other)
        return NotImplemented

    def __ge__(self, other: object) -> bool:
        if isinstance(other, int | RequestStatus):
            return self.number >= int(other)
        return NotImplemented


_FIRST_FINAL_NUMBER = RequestStatus.FINISHED.number


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class CancelResult(StrEnum):
    """State of a request when `cancel_request` was called."""

    LIVE = "live"
    FINISHED = "finished"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class GenerationOutput:
    """Result of one request: its prompt, its sampled tokens and their log-probabilities."""

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    """Sampled token ids, including the end-of-sequence token."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithms, one per generated token; empty when `return_logprobs=False`."""
    status: RequestStatus = RequestStatus.PENDING
    finish_reason: FinishReason | None = None
    """None until the request ends."""
    error: str | None = None
    """Reason for the failure; None unless `status` is FAILED."""
    created_time: float = field(default_factory=time.perf_counter)
    """`time.perf_counter()` seconds at submission."""
    lifespan: tuple[float, float] = (-1.0, -1.0)
    """`time.perf_counter()` seconds at which the request began to run and ended; -1: not yet."""
    timestamps: list[float] | None = None
    """`time.perf_counter()` seconds of each token; None unless requested."""
    policy_versions: list[tuple[int, int]] = field(default_factory=list)
    """`(policy_version, num_tokens)` for each run of tokens with one version, in order. The numbers
    of tokens sum to the generated length."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """Per generated token, the most likely tokens as `(token id, natural logarithm)`, most likely
    first; None unless requested."""
    kept_token_ids: list[Sequence[int]] | None = None
    """Per generated token, the ids that top-k, top-p and min-p kept, as an `array("i")`; None
    unless `sampling_mask="replay"` and truncation removed a token."""
    routed_experts: Any = field(default=None, compare=False)
    """Experts of each token, as a numpy array of uint8 or int16, `(tokens, layers, experts per
    token)`. It covers the prompt and all generated tokens except the last, which no layer has
    computed. None unless `router_replay=True`."""
    temperature: float = 1.0
    """Temperature at which the tokens were sampled; 1 after greedy decoding."""
    adapter: str | None = None
    """Name of the adapter that sampled the tokens; None: the adapters that were active."""
    images: Any = field(default=None, repr=False, compare=False)
    """Tensors of the prompt's images, for `packed_logprobs`; None if there are no images."""
    prompt_logprobs: list[float | None] | None = None
    """Natural logarithms, one per prompt token; the first is None. None unless requested."""
    prompt_top_logprobs: list[list[tuple[int, float]] | None] | None = None
    """Per prompt token, the most likely tokens at its position, as in `top_logprobs`; the first is
    None. None unless requested with `prompt_logprobs` above 0."""

    def __getitem__(self, key: Any) -> NoReturn:
        """Raise `TypeError`: an output is one record, neither a pair nor a dict."""
        # Python asks for item 0 where an object without `__iter__` is iterated or unpacked.
        if isinstance(key, str):
            raise TypeError(f"a GenerationOutput is not a dict; read the attribute output.{key}.")
        raise TypeError(
            "a GenerationOutput is one result, not (id, request) pairs; read output.request_id and "
            "output.generated_tokens. `for output in manager:` yields every result, and "
            "get_result() returns one, or None."
        )

    def is_finished(self) -> bool:
        """Return whether the request reached a final status: finished, cancelled or failed."""
        return self.status.is_final


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText:
    """Result of scoring one text: its tokens and their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float | None]
    """Natural logarithms, one per token; None for the first token, which nothing predicts."""
    top_logprobs: list[list[tuple[int, float]] | None] | None
    """Per token, the most likely tokens at its position, as `(token id, natural logarithm)`, most
    likely first; None for the first token. The field itself is None if the call's `top_k` is 0."""
    policy_version: int
    """Version of the weights that scored the text."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Result of one `sync_weights()`."""

    policy_version: int
    """Version of every token that is sampled after the sync."""
    seconds: float
    bytes_copied: int
    """0 if the engine runs the training module itself."""
