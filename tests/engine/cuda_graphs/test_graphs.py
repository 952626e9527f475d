import numpy as np
import pytest
import torch

from cb_rollout.engine.cuda_graphs import graphs
from cb_rollout.engine.cuda_graphs.graphs import PendingStep, padded_rows
from cb_rollout.engine.memory import device as devices


@pytest.mark.parametrize(
    ("rows", "padded"),
    [(1, 1), (5, 8), (129, 192), (256, 256), (257, 320), (900, 960), (1024, 1024), (1025, 1088)],
)
def test_rows_are_rounded_up_to_the_next_size_and_beyond_256_to_a_multiple_of_64(rows, padded):
    assert padded_rows(rows) == padded


def test_sizes_up_to_1024_rows_waste_little_and_are_few():
    sizes = {padded_rows(rows) for rows in range(1, 1025)}
    assert len(sizes) == 26
    assert all((padded_rows(rows) - rows) / rows < 0.25 for rows in range(257, 1025))


def test_an_interval_of_ones_own_is_kept():
    assert padded_rows(11, interval=10) == 20


class Unreached:
    """An event behind a kernel that never ends, or that ends after some questions."""

    def __init__(self, num_questions=None):
        self.num_questions = num_questions

    def query(self):
        if self.num_questions is None:
            return False
        self.num_questions -= 1
        return self.num_questions < 0


DEVICE = torch.device("cuda", 5)


def pending_step(event, monkeypatch):
    monkeypatch.setattr(devices, "record_event", lambda device: event)
    monkeypatch.setattr(devices, "_HUNG", set())
    return PendingStep([], np.arange(0), torch.zeros(0, 6), DEVICE, is_plain=True)


def test_a_step_that_never_ends_is_an_error_that_says_what_to_set(monkeypatch):
    step = pending_step(Unreached(), monkeypatch)
    monkeypatch.setattr(graphs, "STEP_LIMIT_SECONDS", 0.0)
    with pytest.raises(devices.HungDeviceError, match=r"did not finish in 0 s.*use_cuda_graph=Fal"):
        step.read([])


def test_nothing_waits_for_a_device_that_missed_the_limit(monkeypatch):
    """An engine that gives up must come to an end itself."""

    def waits(*_):
        raise AssertionError("it waits for ever")

    step = pending_step(Unreached(), monkeypatch)
    monkeypatch.setattr(graphs, "STEP_LIMIT_SECONDS", 0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", waits)
    monkeypatch.setattr(torch.cuda, "empty_cache", waits)
    with pytest.raises(devices.HungDeviceError):
        step.read([])
    devices.finish(DEVICE)
    devices.empty_cache(DEVICE)


def test_a_step_that_ends_late_is_read(monkeypatch):
    assert pending_step(Unreached(num_questions=3), monkeypatch).read([]).tokens == []
