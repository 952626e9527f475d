import copy
import dataclasses
import itertools
import json
import operator
import pickle
import time

import pytest
from transformers.generation.continuous_batching import requests as transformers_requests

from cb_rollout.types import CancelResult, FinishReason, GenerationOutput, RequestStatus, SyncReport

FINAL = {RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED}


@pytest.mark.parametrize("status", RequestStatus)
def test_finished_cancelled_and_failed_are_the_final_statuses(status):
    assert status.is_final == (status in FINAL)
    assert GenerationOutput("a", status=status).is_finished() == (status in FINAL)


def test_statuses_reasons_and_results_are_their_names_in_lower_case():
    for member in (*RequestStatus, *FinishReason, *CancelResult):
        assert member == member.name.lower()
        assert json.dumps(member) == f'"{member.name.lower()}"'
    assert set(FinishReason) == {"stop", "length", "cancelled", "error"}


THEIRS = list(transformers_requests.RequestStatus)


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda status: status.name)
def test_a_status_equals_the_one_of_transformers_with_its_name(theirs):
    ours = RequestStatus[theirs.name]
    assert ours == theirs
    assert theirs == ours
    assert not operator.ne(ours, theirs)
    assert not operator.ne(theirs, ours)
    assert hash(ours) == hash(theirs)
    assert ours in {theirs}
    assert theirs in {ours}
    assert ours in [theirs]
    assert theirs in [ours]
    assert {theirs: "a"}[ours] == {ours: "a"}[theirs] == "a"
    assert len({ours, theirs}) == 1


def test_a_status_equals_no_other_of_transformers():
    for ours in RequestStatus:
        equal = [theirs.name for theirs in THEIRS if ours == theirs or theirs == ours]
        assert equal == [ours.name] * (ours is not RequestStatus.CANCELLED)
    assert not {RequestStatus.CANCELLED} & set(THEIRS)


def test_statuses_are_ordered_as_those_of_transformers():
    finished = transformers_requests.RequestStatus.FINISHED
    for ours in RequestStatus:
        # `is_finished` of transformers asks so.
        for of_both in (finished, RequestStatus.FINISHED):
            assert (ours >= of_both) == (of_both <= ours) == ours.is_final
            assert (ours < of_both) == (of_both > ours) == (not ours.is_final)
    for theirs, following in itertools.pairwise(THEIRS):
        assert RequestStatus[theirs.name] < following
        assert theirs < RequestStatus[following.name] <= following
    assert max(RequestStatus.PENDING, finished) is finished


def test_each_class_of_statuses_reads_the_other():
    for theirs in THEIRS:
        ours = RequestStatus(theirs)
        assert ours is RequestStatus[theirs.name]
        assert transformers_requests.RequestStatus(ours) is theirs
        assert int(ours) == int(theirs)
        assert "pr dfF"[ours] == "pr dfF"[theirs]
    with pytest.raises(ValueError, match="9 is not a valid RequestStatus"):
        RequestStatus(9)


def test_a_match_over_statuses_of_transformers_takes_ours():
    theirs = transformers_requests.RequestStatus
    taken = []
    for ours in RequestStatus:
        match ours:
            case theirs.FINISHED:
                taken.append("done")
            case theirs.FAILED:
                taken.append("failed")
            case _:
                taken.append("")
    assert taken == ["", "", "", "done", "", "failed"]


@pytest.mark.parametrize("status", RequestStatus)
def test_a_status_survives_pickling_copying_and_json(status):
    assert pickle.loads(pickle.dumps(status)) is status
    assert copy.deepcopy(status) is status
    assert RequestStatus(json.loads(json.dumps(status))) is status


def test_a_status_compares_with_nothing_else():
    for other in (FinishReason.STOP, "failed", 3.5, 2, None, object()):
        assert operator.ne(RequestStatus.FINISHED, other)
        assert other != RequestStatus.FINISHED
    for compare in (operator.lt, operator.le, operator.gt, operator.ge):
        with pytest.raises(TypeError):
            compare(RequestStatus.FINISHED, object())


def test_a_new_output_is_pending_and_empty():
    before = time.perf_counter()
    output = GenerationOutput("a")
    assert before <= output.created_time <= time.perf_counter()
    assert output == GenerationOutput(
        request_id="a",
        prompt_ids=[],
        generated_tokens=[],
        logprobs=[],
        status=RequestStatus.PENDING,
        finish_reason=None,
        error=None,
        created_time=output.created_time,
        timestamps=None,
        policy_versions=[],
    )
    assert not output.is_finished()


def test_outputs_share_no_lists():
    first, second = GenerationOutput("a"), GenerationOutput("b")
    for name in ("prompt_ids", "generated_tokens", "logprobs", "policy_versions"):
        assert getattr(first, name) is not getattr(second, name)


def test_an_output_takes_no_field_it_does_not_have():
    with pytest.raises(AttributeError):
        GenerationOutput("a").generated_text = "no"


def test_a_sync_report_is_frozen():
    report = SyncReport(policy_version=1, seconds=0.5, bytes_copied=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.policy_version = 2
