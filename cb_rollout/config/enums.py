"""The settings that are one word of a few."""

from enum import StrEnum


class SchedulerType(StrEnum):
    """Whether prompts wait for running sequences."""

    FIFO = "fifo"
    PREFILL_FIRST = "prefill_first"


class InFlight(StrEnum):
    """What becomes of unfinished sequences when the weights change."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    ABORT = "abort"


class WeightSync(StrEnum):
    """Which weights generate."""

    AUTO = "auto"
    SHARED = "shared"
    COPY = "copy"


class RolloutDtype(StrEnum):
    """What the rollout computes in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LogprobsMode(StrEnum):
    """Which distribution the log-probabilities are taken from."""

    POLICY = "policy"
    PROCESSED = "processed"


class OldLogps(StrEnum):
    """Where the trainer's old log-probabilities come from."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


class OnLogprobDrift(StrEnum):
    """What follows a drift beyond `max_logprob_drift`."""

    RAISE = "raise"
    RECOMPUTE = "recompute"


class SamplingMaskMode(StrEnum):
    """Whether the loss knows which tokens truncated sampling left to choose from."""

    IGNORE = "ignore"
    REPLAY = "replay"


class ReleaseCache(StrEnum):
    """When the KV memory is given back."""

    BETWEEN_STEPS = "between_steps"
    NEVER = "never"


class KvDtype(StrEnum):
    """What keys and values are kept in."""

    AUTO = "auto"
    FLOAT8_E4M3FN = "float8_e4m3fn"
