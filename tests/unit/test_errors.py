import queue

import pytest

from cb_rollout.errors import (
    ConfigurationError,
    EngineDeadError,
    IncompleteRolloutError,
    InvalidRequestError,
    LogprobDriftError,
    OutOfCacheMemoryError,
    QueueFullError,
    RolloutError,
    WeightSyncError,
)
from cb_rollout.types import GenerationOutput, RequestStatus


@pytest.mark.parametrize(
    ("error", "standard"),
    [
        (ConfigurationError, ValueError),
        (InvalidRequestError, ValueError),
        (QueueFullError, queue.Full),
        (OutOfCacheMemoryError, MemoryError),
        (EngineDeadError, RuntimeError),
        (WeightSyncError, RuntimeError),
        (LogprobDriftError, ArithmeticError),
    ],
)
def test_an_error_is_caught_as_ours_and_as_its_standard_class(error, standard):
    with pytest.raises(standard, match="what happened"):
        raise error("what happened")
    with pytest.raises(RolloutError, match="what happened"):
        raise error("what happened")


def test_an_incomplete_rollout_carries_what_was_delivered():
    finished = GenerationOutput("a", generated_tokens=[3], status=RequestStatus.FINISHED)
    delivered = {"a": finished}
    error = IncompleteRolloutError("b failed: too long", delivered)
    assert isinstance(error, RuntimeError)
    assert str(error) == "b failed: too long"
    assert error.outputs == {"a": finished}


def test_an_incomplete_rollout_keeps_its_own_dictionary():
    delivered = {"a": GenerationOutput("a")}
    error = IncompleteRolloutError("b failed", delivered)
    delivered.clear()
    assert list(error.outputs) == ["a"]
