import pytest

from cb_rollout import generate_batch
from cb_rollout.errors import ConfigurationError, IncompleteRolloutError
from cb_rollout.server import ServerOptions
from cb_rollout.tools.dataset import generate_dataset
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


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ServerOptions(served_model_name="m"), "no field .* did you mean 'model_name'"),
        (lambda: generate_dataset("m", "in", "out", max_tokens=3), "did you mean 'max_new_tokens'"),
        (
            lambda: generate_batch(None, [], num_return_sequence=2),
            "generate_batch has no argument .* did you mean 'num_return_sequences'",
        ),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest_one(call, said):
    with pytest.raises(ConfigurationError, match=said):
        call()
