"""Define the public records of requests, outputs and weight syncs: plain data, without torch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class RequestStatus(StrEnum):
    """State of a request; the last three are final."""

    PENDING = "pending"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Return whether the request has ended."""
        return self in _FINAL_STATUSES


_FINAL_STATUSES = frozenset({RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED})


class FinishReason(StrEnum):
    """Reason for the end of a request."""

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
    """One sequence: its prompt, sampled tokens and their log-probabilities."""

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    """Sampled token ids, the end-of-sequence token included."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithms, one per generated token; empty when `return_logprobs=False`."""
    status: RequestStatus = RequestStatus.PENDING
    finish_reason: FinishReason | None = None
    """None until the request ends."""
    error: str | None = None
    """Reason of the failure; None unless `status` is FAILED."""
    created_time: float = field(default_factory=time.perf_counter)
    """`time.perf_counter()` seconds at submission."""
    timestamps: list[float] | None = None
    """`time.perf_counter()` seconds of each token; None unless asked for."""
    policy_versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of `(policy_version, num_tokens)`, in order, that sum to the generated length."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """For each generated token the most likely tokens, as `(token id, natural logarithm)`, most
    likely first; None unless asked for."""
    kept_token_ids: list[Sequence[int]] | None = None
    """For each generated token the ids that top-k, top-p and min-p left to choose from, each an
    `array("i")`; None unless `sampling_mask="replay"` and truncation removed a token."""
    routed_experts: Any = field(default=None, compare=False)
    """The experts that each token took: a numpy array of uint8 or int16, `(tokens, layers, experts
    of a token)`, of the prompt and all generated tokens but the last, which ran through no layer.
    None unless `router_replay=True`."""
    temperature: float = 1.0
    """The temperature that the tokens were sampled with; 1 where they were decoded greedily."""
    images: Any = field(default=None, repr=False, compare=False)
    """The tensors of the prompt's images, for `packed_logprobs`; None: it has none."""

    def is_finished(self) -> bool:
        """Return whether the request reached a final status: finished, cancelled or failed."""
        return self.status.is_final


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Result of one `sync_weights()`."""

    policy_version: int
    """The version that every token sampled from now on is stamped with."""
    seconds: float
    bytes_copied: int
    """Zero when the engine runs the training module itself."""
