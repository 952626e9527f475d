from cb_rollout.errors import IncompleteRolloutError
from cb_rollout.types import GenerationOutput, RequestStatus


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
