"""Enumerate the values of settings that take one word of a few."""

from enum import StrEnum


class SchedulerType(StrEnum):
    """Order of admissions, and of prefill and decode steps."""

    FIFO = "fifo"
    PREFILL_FIRST = "prefill_first"


class InFlight(StrEnum):
    """Treatment of unfinished sequences when the weights change."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    ABORT = "abort"


class WeightSync(StrEnum):
    """Module that generates: the training module or a copy."""

    AUTO = "auto"
    SHARED = "shared"
    COPY = "copy"


class RolloutDtype(StrEnum):
    """Dtype of the rollout's forward."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Numerics(StrEnum):
    """Order of the sums of forwards."""

    FAST = "fast"
    BITWISE = "bitwise"


class LogprobsMode(StrEnum):
    """Distribution that log-probabilities are taken from."""

    POLICY = "policy"
    PROCESSED = "processed"


class OldLogps(StrEnum):
    """Source of the trainer's old log-probabilities."""

    AUTO = "auto"
    TRAINER = "trainer"
    ROLLOUT = "rollout"


class LossForward(StrEnum):
    """Forward that computes the loss's log-probabilities."""

    TRAINER = "trainer"
    PACKED = "packed"


class OnLogprobDrift(StrEnum):
    """Action on a drift beyond `max_logprob_drift`."""

    RAISE = "raise"
    RECOMPUTE = "recompute"


class SamplingMaskMode(StrEnum):
    """Use of the sampled token sets of top-k, top-p and min-p in the loss."""

    IGNORE = "ignore"
    REPLAY = "replay"


class ReleaseCache(StrEnum):
    """Memory that is released while training runs."""

    BETWEEN_STEPS = "between_steps"
    WITH_WEIGHTS = "with_weights"
    NEVER = "never"
