"""Which outputs the rows of a trainer were put together from, and what follows for each token."""

import pytest

from cb_rollout.integrations.trl.rows import rows_from
from cb_rollout.types import FinishReason, GenerationOutput


def output(request_id, tokens, versions, reason=FinishReason.STOP, prompt=(5, 6)):
    return GenerationOutput(
        request_id,
        list(prompt),
        list(tokens),
        [-1.0] * len(tokens),
        finish_reason=reason,
        policy_versions=list(versions),
    )


def rows(prompts, completions, outputs, masks=None):
    values = [[-1.0] * len(ids) for ids in completions]
    return rows_from((prompts, completions, masks, None, values, {}, None, []), outputs)


def test_equal_completions_are_of_different_requests():
    outputs = [output("a", [7, 1], [(1, 2)]), output("b", [7, 1], [(1, 1), (2, 1)])]
    first, second = rows([[5, 6]] * 2, [[7, 1]] * 2, outputs)
    assert (first.name, second.name) == ("a", "b")
    assert (first.token_versions, second.token_versions) == ([1, 1], [1, 2])


def test_a_completion_that_a_rollout_func_repeats_is_one_and_the_same():
    first, second = rows([[5, 6]] * 2, [[7, 1]] * 2, [output("a", [7, 1], [(3, 2)])])
    assert first.turns == second.turns != []


def test_a_tools_tokens_have_no_version():
    turns = [
        output("a", [7, 8], [(1, 2)]),
        output("b", [9, 1, 4], [(2, 3)], prompt=(5, 6, 7, 8, 3)),
    ]
    (row,) = rows([[5, 6]], [[7, 8, 3, 9, 1, 4]], turns, [[1, 1, 0, 1, 1, 1]])
    assert row.token_versions == [1, 1, None, 2, 2, 2]
    assert row.ended_itself


@pytest.mark.parametrize(
    ("tokens", "reason", "ended"),
    [
        ([7, 8, 9], FinishReason.STOP, True),
        ([7, 8, 9], FinishReason.LENGTH, False),
        ([7, 8, 9, 1], FinishReason.STOP, False),  # the trainer cut its last token off
        ([4, 4], FinishReason.STOP, False),  # of somebody else
    ],
)
def test_a_row_ended_itself_where_all_of_its_last_output_did(tokens, reason, ended):
    (row,) = rows([[5, 6]], [[7, 8, 9]], [output("a", tokens, [(1, len(tokens))], reason)])
    assert row.ended_itself is ended
