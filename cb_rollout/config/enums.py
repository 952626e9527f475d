"""Enumerate the allowed values of settings."""

from enum import StrEnum


class SchedulerType(StrEnum):
    """Order of admissions, and of prefill and decode steps."""

    FIFO = "fifo"
    PREFILL_FIRST = "prefill_first"


class InFlight(StrEnum):
    """Choose what happens to unfinished sequences when the weights change."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    ABORT = "abort"


class WeightSync(StrEnum):
    """Choose which module generates: the training module or a copy."""

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
    """Choose whether results may depend on the rest of the batch."""

    FAST = "fast"
    BITWISE = "bitwise"


class LogprobsMode(StrEnum):
    """Choose which distribution log-probabilities belong to."""

    POLICY = "policy"
    PROCESSED = "processed"


class OldLogps(StrEnum):
    """Source of the trainer's old log-probabilities."""

    AUTO = "auto"
    TRAINER = "trainer"
    ROLLOUT = "rollout"


class LossForward(StrEnum):
    """Choose which forward computes the loss's log-probabilities."""

    TRAINER = "trainer"
    PACKED = "packed"


class OnLogprobDrift(StrEnum):
    """Choose what to do if the drift exceeds `max_logprob_drift`."""

    RAISE = "raise"
    RECOMPUTE = "recompute"


class SamplingMaskMode(StrEnum):
    """Choose whether the loss uses the ids that top-k, top-p and min-p kept."""

    IGNORE = "ignore"
    REPLAY = "replay"


class ReleaseCache(StrEnum):
    """Choose which memory to release while training runs."""

    BETWEEN_STEPS = "between_steps"
    WITH_WEIGHTS = "with_weights"
    NEVER = "never"
