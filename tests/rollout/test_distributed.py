"""A process raises the failure of another, and reports its own; two watches share a store."""

import threading
from functools import partial

import pytest
import torch.distributed as dist

from cb_rollout import RolloutError
from cb_rollout.rollout.distributed import FailureWatch

# Longest wait of a test for another thread.
SECONDS = 30


class Processes:
    """Two watches on one store; what `end_process` was called with, by rank."""

    def __init__(self):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        self.ended = {}
        self.someone_ended = threading.Event()
        self.watches = [FailureWatch(self.store, rank) for rank in range(2)]
        for rank, watch in enumerate(self.watches):
            watch.end_process = partial(self.end, rank)

    def end(self, rank, text):
        self.ended[rank] = text
        self.someone_ended.set()


def fail(error):
    raise error


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr("cb_rollout.rollout.distributed.POLL_SECONDS", 0.01)
    monkeypatch.setattr("cb_rollout.rollout.distributed.GRACE_SECONDS", 0.0)


def test_a_process_at_work_is_ended_when_another_failed():
    processes = Processes()
    with processes.watches[0].watched():
        with pytest.raises(ValueError, match="no such verifier"):
            processes.watches[1].watched()(fail)(ValueError("no such verifier"))
        assert processes.someone_ended.wait(SECONDS)
    assert processes.ended == {0: "rank 1: ValueError: no such verifier"}


def test_an_error_that_follows_anothers_failure_names_that_failure(monkeypatch):
    monkeypatch.setattr("cb_rollout.rollout.distributed.GRACE_SECONDS", SECONDS)
    processes = Processes()

    def fail_after_the_other():
        with pytest.raises(ValueError, match="no such verifier"):
            processes.watches[1].watched()(fail)(ValueError("no such verifier"))
        fail(RuntimeError("Connection closed by peer"))

    with pytest.raises(RolloutError, match="rank 1: ValueError: no such verifier") as caught:
        processes.watches[0].watched()(fail_after_the_other)()
    assert "closed by peer" in str(caught.value.__cause__)
    assert not processes.ended


def test_ones_own_failure_stays_the_error_it_is_and_nests():
    watch = Processes().watches[0]
    with pytest.raises(KeyError):
        watch.watched()(watch.watched()(fail))(KeyError("x"))


def test_work_that_ends_well_leaves_no_note_and_no_thread():
    processes = Processes()
    before = set(threading.enumerate())
    assert [watch.watched()(lambda: 3)() for watch in processes.watches] == [3, 3]
    for thread in set(threading.enumerate()) - before:
        thread.join(SECONDS)
    assert not processes.ended
    assert not processes.store.check(["cb_rollout/failure/0"])


def test_a_failure_that_was_caught_does_not_reach_the_next_training():
    processes = Processes()
    for watch in processes.watches:
        with pytest.raises((ValueError, RolloutError)):
            watch.watched()(fail)(ValueError("once"))
    with processes.watches[0].watched(), processes.watches[1].watched():
        assert not processes.someone_ended.wait(0.1)


def test_a_store_that_went_away_ends_the_watch_and_hides_no_error():
    class Gone:
        def clone(self):
            return self

        def check(self, keys):
            fail(dist.DistStoreError("gone"))

        compare_set = check

    watch = FailureWatch(Gone(), 0)
    watch._store.compare_set = lambda *_: fail(dist.DistStoreError("gone"))
    with pytest.raises(ValueError, match="own"):
        watch.watched()(fail)(ValueError("own"))
