import pytest

from cb_rollout import InvalidRequestError
from cb_rollout.rollout.trajectories import Trajectory


def test_turns_that_go_on_are_one_sample_with_the_rest_masked():
    trajectory = Trajectory()
    assert trajectory.add_turn([1, 2], [3, 4], [-0.3, -0.4], [(0, 2)])
    assert trajectory.add_turn([1, 2, 3, 4, 5], [6], [-0.6], [[1, 1]])
    (sample,) = trajectory.samples
    assert sample.token_ids == [1, 2, 3, 4, 5, 6]
    assert sample.is_sampled == [False, False, True, True, False, True]
    assert sample.logprobs == [0, 0, -0.3, -0.4, 0, -0.6]
    assert sample.policy_versions == [-1, -1, 0, 0, -1, 1]
    assert trajectory.num_drifts == 0


@pytest.mark.parametrize("prompt", [[1, 2, 3, 9, 5], [1, 2, 3], [9]])
def test_rewritten_history_is_context_of_a_new_sample(prompt):
    trajectory = Trajectory()
    trajectory.add_turn([1, 2], [3, 4], [-0.3, -0.4], [(0, 2)])
    assert not trajectory.add_turn(prompt, [6], [-0.6], [(1, 1)])
    assert trajectory.num_drifts == 1
    assert trajectory.samples[0].token_ids == [1, 2, 3, 4]
    assert trajectory.samples[1].token_ids == [*prompt, 6]
    assert trajectory.samples[1].is_sampled == [False] * len(prompt) + [True]
    # The next turn extends the new sample.
    assert trajectory.add_turn([*prompt, 6, 7], [8], [-0.8], [(1, 1)])
    assert trajectory.num_drifts == 1


def test_lists_that_do_not_belong_together_are_refused():
    with pytest.raises(InvalidRequestError, match=r"1 tokens, 2 log-prob.* 1 policy versions"):
        Trajectory().add_turn([1], [2], [0.0, 0.0], [(0, 1)])
    with pytest.raises(InvalidRequestError, match="ask for them with logprobs=True"):
        Trajectory().add_response({"choices": [{"message": {}}]})


@pytest.mark.parametrize(("prompt", "tokens"), [([True], [3]), ([5], [3.0]), ([5], [False])])
def test_what_is_no_token_id_is_no_turn(prompt, tokens):
    with pytest.raises(InvalidRequestError, match="the turn does not hold token ids"):
        Trajectory().add_turn(prompt, tokens, [-0.5], [(1, 1)])
