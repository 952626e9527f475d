"""The state of one rollout: its rows, the outputs they consist of, and its metrics."""

from itertools import count

import pytest

from cb_rollout.integrations.trl.parts import RolloutContext
from cb_rollout.integrations.trl.rows.loss_rows import loss_rows
from cb_rollout.metrics.registry import _LOGGED_COUNTERS
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


def rows(prompts, completions, outputs, masks=None, is_in_order=False):
    values = [[-1.0] * len(ids) for ids in completions]
    generated = (prompts, completions, masks, None, values, {}, None, [])
    return loss_rows(generated, outputs, count(), is_in_order=is_in_order)


def test_equal_completions_are_of_different_requests():
    outputs = [output("a", [7, 1], [(1, 2)]), output("b", [7, 1], [(1, 1), (2, 1)])]
    first, second = rows([[5, 6]] * 2, [[7, 1]] * 2, outputs)
    assert (first.name, second.name) == ("a", "b")
    assert (first.versions, second.versions) == ([1, 1], [1, 2])


def test_outputs_in_order_are_not_searched_for():
    outputs = [output("a", [7, 1], [(1, 2)]), output("b", [7, 1], [(2, 2)])]
    prompts, completions = [[5, 6]] * 2, [[7, 1], [7]]
    first, second = rows(prompts, completions, outputs, is_in_order=True)
    assert (first.name, second.name) == ("a", "b")
    assert (first.is_stopped, second.is_stopped) == (True, False)
    assert second.versions == [2]


def test_a_completion_that_a_rollout_func_repeats_is_one_and_the_same():
    first, second = rows([[5, 6]] * 2, [[7, 1]] * 2, [output("a", [7, 1], [(3, 2)])])
    assert (first.name, first.versions) == (second.name, second.versions) == ("a", [3, 3])


def test_a_tools_tokens_have_no_version():
    turns = [
        output("a", [7, 8], [(1, 2)]),
        output("b", [9, 1, 4], [(2, 3)], prompt=(5, 6, 7, 8, 3)),
    ]
    (row,) = rows([[5, 6]], [[7, 8, 3, 9, 1, 4]], turns, [[1, 1, 0, 1, 1, 1]])
    assert row.versions == [1, 1, None, 2, 2, 2]
    assert row.is_stopped


@pytest.mark.parametrize(
    ("tokens", "reason", "ended"),
    [
        ([7, 8, 9], FinishReason.STOP, True),
        ([7, 8, 9], FinishReason.LENGTH, False),
        ([7, 8, 9, 1], FinishReason.STOP, False),  # the trainer cut its last token off
        ([4, 4], FinishReason.STOP, False),  # of somebody else
    ],
)
def test_a_row_is_stopped_where_all_of_its_last_output_did(tokens, reason, ended):
    (row,) = rows([[5, 6]], [[7, 8, 9]], [output("a", tokens, [(1, len(tokens))], reason)])
    assert row.is_stopped is ended


def test_the_metrics_of_turns_are_added_weighted_or_the_largest():
    added = set(_LOGGED_COUNTERS) - {"kv_blocks_peak"}
    turns = [
        {"rollout/tokens": 10, "rollout/seconds": 1, "rollout/log_kept_mass": -0.5, "peak": 3},
        {"rollout/tokens": 30, "rollout/seconds": 3, "rollout/log_kept_mass": -0.1, "peak": 2},
    ]
    turns = [turn | {f"rollout/{name}": 1 for name in added} for turn in turns]
    metrics = RolloutContext("train", turn_metrics=turns).metrics()
    assert metrics["rollout/tokens"] == 40
    assert metrics["rollout/tokens_per_second"] == 10
    assert metrics["rollout/log_kept_mass"] == pytest.approx(-0.2)
    assert {metrics[f"rollout/{name}"] for name in added} == {2}
    assert metrics["peak"] == 3
    assert RolloutContext("train").metrics() == {}
