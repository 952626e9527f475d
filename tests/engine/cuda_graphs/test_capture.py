"""The real `torch.cuda.graph`, over streams and graphs that only keep a record."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from cb_rollout.engine.cuda_graphs.capture import CudaCapture

DEVICE = torch.device("cuda", 0)


class Stream:
    """Knows the streams that it waited for."""

    device = DEVICE

    def __init__(self, device=None):
        self.waited_for = []

    def wait_stream(self, stream):
        self.waited_for.append(stream)


class Graph:
    """Records what a capture calls; its end may raise, as CUDA's does after a failed capture."""

    end_error: str | None = None

    def capture_begin(self, pool, **_):
        self.pool = pool

    def capture_end(self):
        if self.end_error:
            raise RuntimeError(self.end_error)

    def replay(self):
        self.num_replays = getattr(self, "num_replays", 0) + 1


@pytest.fixture
def streams(monkeypatch):
    """The thread's current stream, and all streams made."""
    state = SimpleNamespace(current=Stream(), made=[], sync_debug_mode=0)

    def make(device=None):
        state.made.append(Stream())
        return state.made[-1]

    def set_stream(stream):
        state.current = stream

    def set_mode(mode):
        state.sync_debug_mode = {"warn": 1}.get(mode, mode)

    spoken = {
        "Stream": make,
        "CUDAGraph": Graph,
        "current_stream": lambda device=None: state.current,
        "set_stream": set_stream,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: (0, 1),
        "get_sync_debug_mode": lambda: state.sync_debug_mode,
        "set_sync_debug_mode": set_mode,
    }
    for name, said in spoken.items():
        monkeypatch.setattr(torch.cuda, name, said)
    monkeypatch.setattr(torch.cuda.streams, "_get_device_index", lambda *_: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "_get_device_index", lambda *_: 0)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    monkeypatch.setattr(Graph, "end_error", None)
    return state


def test_the_thread_is_on_its_own_stream_after_a_capture_that_failed(streams, monkeypatch):
    before = streams.current
    monkeypatch.setattr(Graph, "end_error", "operation failed due to a previous error")
    with pytest.raises(RuntimeError, match="previous error"):
        CudaCapture(DEVICE)(lambda: torch.zeros(1))
    assert streams.current is before


def test_all_captures_run_on_one_stream_which_waits_for_the_threads_and_is_waited_for(streams):
    capture, ran_on = CudaCapture(DEVICE), []

    def step():
        ran_on.append(streams.current)
        return torch.zeros(1)

    for _ in range(3):
        capture(step)
    assert len(streams.made) == 1
    assert set(ran_on) == set(streams.made)
    assert streams.made[0].waited_for == [streams.current] * 3
    assert streams.current.waited_for == streams.made * 3


def test_a_step_that_waits_for_the_device_is_refused_before_a_capture_begins(streams, monkeypatch):
    begun = []
    monkeypatch.setattr(Graph, "capture_begin", lambda *_, **__: begun.append(True))

    def waits():
        if streams.sync_debug_mode:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="waits for the device"):
        CudaCapture(DEVICE)(waits)
    assert not begun
    assert streams.sync_debug_mode == 0


def test_a_step_that_waits_in_its_first_run_only_is_captured(streams):
    runs = []

    def step():
        runs.append(streams.sync_debug_mode)
        if streams.sync_debug_mode and len(runs) == 1:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return torch.zeros(1)

    CudaCapture(DEVICE)(step)
    assert runs == [0, 1, 0]


def test_a_captured_step_neither_reads_nor_leaves_a_cast_in_the_cache_of_autocast(streams):
    """A model's own forward may autocast with a cache, as accelerate wraps it."""
    weight, results = torch.nn.Parameter(torch.ones(2, 2)), []

    def step():
        results.append(torch.mm(torch.ones(1, 2), weight))
        return results[-1]

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        step()
        # Torch does not count this write, and autocast's cache never does.
        weight.data.mul_(2)
        CudaCapture(DEVICE)(step)
        assert results[-1].tolist() == [[4, 4]]
        weight.data.mul_(2)
        assert step().tolist() == [[8, 8]]
