"""Jobs run once each, and keep what clients may ask for again within bounds."""

import gc
import weakref

import pytest

from cb_rollout.server.tinker import jobs as module
from cb_rollout.server.tinker.jobs import Failure, Job, Jobs


class Data:
    """What a client sent."""


@pytest.fixture
def jobs():
    made = Jobs(sample=lambda sampler, requests: [])
    yield made
    made.close()


def result_of(jobs, job_id, run):
    job = Job(job_id, run=run)
    jobs.submit(job)
    return job.result.result(timeout=10)


def test_a_job_that_ran_lets_go_of_what_the_client_sent(jobs):
    data = Data()
    watched = weakref.ref(data)
    assert result_of(jobs, "a", lambda data=data: type(data).__name__) == "Data"
    del data
    # The thread's own names of the job go with the next one.
    result_of(jobs, "b", lambda: None)
    gc.collect()
    assert watched() is None


def test_a_request_that_is_sent_twice_runs_once_even_when_its_result_is_forgotten(
    jobs, monkeypatch
):
    monkeypatch.setattr(module, "MAX_RESULTS", 2)
    runs = []
    for number in range(4):
        result_of(jobs, str(number), lambda number=number: runs.append(number))
    jobs.submit(Job("0", run=lambda: runs.append("again")))
    failure = jobs.get("0").result.result(timeout=10)
    assert isinstance(failure, Failure)
    assert "is forgotten" in failure.message
    assert jobs.get("3").result.result(timeout=10) is None
    assert jobs.get("never") is None
    assert runs == [0, 1, 2, 3]


def test_a_sample_that_is_cancelled_while_others_are_awaited_ends_no_thread(jobs, monkeypatch):
    gather = Jobs._gather

    def cancelled_meanwhile(self):
        self.cancel("sample")
        monkeypatch.setattr(Jobs, "_gather", gather)

    monkeypatch.setattr(Jobs, "_gather", cancelled_meanwhile)
    cancelled = Job("sample", sampler="any", sample=object(), answer=list)
    jobs.submit(cancelled)
    assert "was cancelled" in cancelled.result.result(timeout=10).message
    assert result_of(jobs, "next", lambda: 7) == 7


def test_large_results_are_kept_up_to_a_number_of_bytes(jobs, monkeypatch):
    monkeypatch.setattr(module, "MAX_RESULT_BYTES", 100)
    for name in "abc":
        result_of(jobs, name, lambda: bytes(60))
    # Seen when the next request comes: of three results of 60 bytes one is kept.
    result_of(jobs, "d", lambda: b"")
    kept = [name for name in "abc" if isinstance(jobs.get(name).result.result(), bytes)]
    assert kept == ["c"]
