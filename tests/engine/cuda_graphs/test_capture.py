"""The real `torch.cuda.graph`, over streams and graphs that only keep a record."""

import gc
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from cb_rollout.engine.cuda_graphs import capture as capture_module
from cb_rollout.engine.cuda_graphs.capture import CaptureFailedError, CudaCapture

DEVICE = torch.device("cuda", 0)


class Stream:
    """Knows the streams that it waited for."""

    device = DEVICE

    def __init__(self, device=None):
        self.waited_for = []

    def wait_stream(self, stream):
        self.waited_for.append(stream)


class Generator:
    """A device's random numbers: one that is in a capture draws only inside of it (torch 2.11)."""

    def __init__(self, offset=8, *, is_capturing=False):
        self.offset = offset
        self.is_capturing = is_capturing

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset

    def clone_state(self):
        return Generator(self.offset)

    def graphsafe_set_state(self, other):
        self.offset, self.is_capturing = other.offset, other.is_capturing

    def draw(self):
        if self.is_capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.offset += 4


class Graph:
    """Records what a capture calls; its end may raise, as CUDA's does after a failed capture."""

    end_error: str | None = None
    events: ClassVar[list[str]] = []
    recording_pools: ClassVar[list[tuple[int, int]]] = []
    """Where the allocator takes captures as under way."""
    generator: ClassVar = Generator()

    def __init__(self):
        self.events.append("made")

    def __del__(self):
        self.events.append("freed")

    def capture_begin(self, pool, **_):
        self.events.append("begin")
        self.recording_pools.append(pool)
        self.generator.is_capturing = True

    def capture_end(self):
        self.events.append("end")
        if self.end_error:
            raise RuntimeError(self.end_error)
        self.recording_pools.clear()
        self.generator.is_capturing = False

    @classmethod
    def end_allocate(cls, index, pool):
        if pool not in cls.recording_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        cls.recording_pools.remove(pool)

    def replay(self):
        self.num_replays = getattr(self, "num_replays", 0) + 1


@pytest.fixture
def streams(monkeypatch):
    """The thread's current stream, and all streams made."""
    # Graphs of other tests say that they are freed.
    gc.collect()
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
    monkeypatch.setattr(Graph, "events", [])
    monkeypatch.setattr(Graph, "recording_pools", [])
    monkeypatch.setattr(Graph, "generator", Generator())
    monkeypatch.setattr(
        torch._C,
        "_cuda_clearCublasWorkspaces",
        lambda: Graph.events.append("workspaces cleared"),
        raising=False,
    )
    monkeypatch.setattr(capture_module, "_FAILED", [])

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", Graph.end_allocate, raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", (Graph.generator,))
    monkeypatch.setattr(torch, "rand", lambda *_, generator, device: generator.draw())
    return state


def test_a_graph_has_workspaces_of_its_own(streams):
    """Warm-up's workspace lies outside the pool, where inductor's graphs would free it."""
    CudaCapture(DEVICE)(lambda: Graph.events.append("step") or torch.zeros(1))
    cleared = "workspaces cleared"
    assert Graph.events[:8] == ["made", *["step"] * 2, cleared, "begin", "step", "end", cleared]


def test_workspaces_of_a_capture_that_failed_are_not_left_to_others(streams, monkeypatch):
    monkeypatch.setattr(Graph, "end_error", "operation failed due to a previous error")
    with pytest.raises(RuntimeError):
        CudaCapture(DEVICE)(lambda: torch.zeros(1))
    assert Graph.events[-2:] == ["end", "workspaces cleared"]


def failing_in_capture(error):
    """A step that raises once the capture has begun."""

    def step():
        if "begin" in Graph.events:
            raise error
        return torch.zeros(1)

    return step


@pytest.mark.parametrize("end_error", [None, "operation failed due to a previous error"])
def test_a_failed_capture_is_kept_for_ever_and_is_the_last_of_the_process(
    end_error, streams, monkeypatch
):
    """Torch's allocator keeps a pointer to it, which its destructor leaves there."""
    monkeypatch.setattr(Graph, "end_error", end_error)
    with pytest.raises(CaptureFailedError, match="no kernel image") as raised:
        CudaCapture(DEVICE)(failing_in_capture(RuntimeError("no kernel image")))
    assert raised.value.__cause__ is not None
    del raised
    gc.collect()
    assert "freed" not in Graph.events
    Graph.events.clear()
    with pytest.raises(CaptureFailedError, match=r"an earlier capture failed .*no kernel image"):
        CudaCapture(DEVICE)(lambda: Graph.events.append("step") or torch.zeros(1))
    assert Graph.events == []


def test_a_failed_capture_leaves_training_its_memory_and_its_random_numbers(streams, monkeypatch):
    """Or what two streams used is never freed, and dropout raises."""
    monkeypatch.setattr(Graph, "end_error", "operation failed due to a previous error")
    with pytest.raises(CaptureFailedError):
        CudaCapture(DEVICE)(failing_in_capture(RuntimeError("no kernel image")))
    assert Graph.recording_pools == []
    assert Graph.generator.offset == 8
    Graph.generator.draw()


def test_random_numbers_that_a_failed_capture_left_alone_stay_in_their_state(streams, monkeypatch):
    """Graphs of others hold that state, as torch 2.13 does through a failed capture."""
    monkeypatch.setattr(Graph, "end_error", "Invalid capture.")
    monkeypatch.setattr(
        Generator, "graphsafe_set_state", lambda *_: pytest.fail("another state was set")
    )

    def step():
        Graph.generator.is_capturing = False
        Graph.recording_pools.clear()
        return torch.zeros(1)

    with pytest.raises(CaptureFailedError, match="Invalid capture"):
        CudaCapture(DEVICE)(step)
    assert Graph.generator.offset == 8


def test_memory_that_runs_out_in_a_capture_that_ends_well_is_no_failed_capture(streams):
    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture(DEVICE)(failing_in_capture(torch.OutOfMemoryError("none left")))
    Graph.events.clear()
    CudaCapture(DEVICE)(lambda: torch.zeros(1))
    assert "end" in Graph.events


def test_memory_that_runs_out_and_breaks_the_capture_is_the_last_of_the_process(
    streams, monkeypatch
):
    monkeypatch.setattr(Graph, "end_error", "operation failed due to a previous error")
    with pytest.raises(CaptureFailedError, match="none left"):
        CudaCapture(DEVICE)(failing_in_capture(torch.OutOfMemoryError("none left")))
    with pytest.raises(CaptureFailedError, match="an earlier capture"):
        CudaCapture(DEVICE)(lambda: torch.zeros(1))


def test_an_interrupt_in_a_capture_leaves_no_dangling_graph(streams):
    with pytest.raises(KeyboardInterrupt):
        CudaCapture(DEVICE)(failing_in_capture(KeyboardInterrupt()))
    gc.collect()
    assert "freed" not in Graph.events


def test_a_step_that_fails_before_its_capture_is_no_failed_capture(streams):
    def fails():
        raise RuntimeError("a kernel does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        CudaCapture(DEVICE)(fails)
    CudaCapture(DEVICE)(lambda: torch.zeros(1))


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
