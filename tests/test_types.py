import dataclasses
import json
import time

import pytest

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
