"""Define every error that cb_rollout raises on purpose.

    RolloutError
    +-- ConfigurationError      (ValueError)       a setting that cannot be honoured
    +-- InvalidRequestError     (ValueError)       a request that could never be served
    +-- QueueFullError          (queue.Full)       `max_queue_size` requests are already waiting
    +-- IncompleteRolloutError  (RuntimeError)     some sequences failed; the rest are on `.outputs`
    +-- OutOfCacheMemoryError   (MemoryError)      the KV cache cannot hold what was asked
    +-- EngineDeadError         (RuntimeError)     the generation loop stopped; its cause is chained
    +-- WeightSyncError         (RuntimeError)     the rollout weights are not the trainer's
    +-- LogprobDriftError       (ArithmeticError)  log-probabilities differ from the trainer's
    +-- ToolTimeoutError        (TimeoutError)     a tool took longer than `tool_timeout_seconds`

A message says what happened, with its numbers, then which setting to change. The package's own bugs
are asserts.
"""

import queue
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cb_rollout.types import GenerationOutput

if TYPE_CHECKING:
    from cb_rollout.rollout.audit.report import AuditReport

# Maximum number of names in one error message.
MAX_NAMES = 20


def error_text(error: BaseException) -> str:
    """Return an exception as one line: its type and the first line of its message."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def abbreviated(names: Sequence[str], separator: str = ", ") -> str:
    """Join the first `MAX_NAMES` names into one text, followed by the number of names left out."""
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{separator.join(names[:MAX_NAMES])}{rest}"


class RolloutError(Exception):
    """Base of every error raised by cb_rollout."""


class ConfigurationError(RolloutError, ValueError):
    """A setting that is unknown, out of range, or cannot be honoured here."""


class InvalidRequestError(RolloutError, ValueError):
    """A request that can never be served; raised in the caller, before anything is queued."""


class QueueFullError(RolloutError, queue.Full):
    """`max_queue_size` requests are already waiting; the new one was not queued."""


class IncompleteRolloutError(RolloutError, RuntimeError):
    """Some sequences of a batch failed.

    Attributes:
        outputs: delivered outputs by request id, including the failed ones.
    """

    def __init__(self, message: str, outputs: Mapping[str, GenerationOutput]) -> None:
        super().__init__(message)
        self.outputs = dict(outputs)


class OutOfCacheMemoryError(RolloutError, MemoryError):
    """The device has no memory for a KV cache, or the cache is too small for a sequence."""


class EngineDeadError(RolloutError, RuntimeError):
    """The generation loop stopped on an exception, which is this error's `__cause__`."""


class WeightSyncError(RolloutError, RuntimeError):
    """The weights that generate differ from the weights that train."""


class ToolTimeoutError(RolloutError, TimeoutError):
    """A tool or an environment took too long; only its own conversation gets the error."""


class LogprobDriftError(RolloutError, ArithmeticError):
    """Sampled log-probabilities differ from the trainer's by more than `max_logprob_drift`.

    Attributes:
        report: the audit of the sequences that differ; None if there was no audit, or if another
            process made it.
    """

    def __init__(self, message: str, report: "AuditReport | None" = None) -> None:
        super().__init__(message)
        self.report = report
