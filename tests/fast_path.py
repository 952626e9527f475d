"""The fast decode path on a machine without a GPU: Triton's interpreter, and graphs played back."""

import torch

from cb_rollout.engine.attention import selector
from cb_rollout.engine.attention.triton import backend as triton_backend
from cb_rollout.engine.cuda_graphs import graphs, ladder
from cb_rollout.engine.cuda_graphs import selection as graph_choice
from cb_rollout.engine.memory import device as devices


class Playback:
    """Stands in for a CUDA graph: a replay does the step again, from the same buffers.

    Like a capture, making one runs the step beforehand, which must leave no trace.
    """

    num_captures = 0

    def __init__(self, device):
        assert device.type == "cpu"

    def start_over(self):
        pass

    def __call__(self, step):
        Playback.num_captures += 1
        kept = step()
        self.num_rows = len(kept)

        def replay():
            return kept.copy_(step())

        return replay


def graphs_of(generator):
    """The CUDA graphs of a generator's engine; None: it has none."""
    return getattr(generator.manager.engine.paged_model.decode_path, "graphs", None)


def run_few_rows(monkeypatch):
    """Have engines capture steps of few rows by default: each runs, in an interpreter."""
    monkeypatch.setattr(devices, "max_requests_per_batch", lambda device: 4)
    # A proof of each graph takes seconds there; `tests/invariants/test_proof.py` has its own.
    monkeypatch.setattr(ladder, "PROVED_DEVICES", set())


def pretend_cuda(monkeypatch):
    """Have engines on the CPU choose what they would choose on a GPU."""
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(selector, "BACKENDS", [triton_backend.TritonBackend])
    monkeypatch.setattr(triton_backend.TritonBackend, "device_type", "cpu")
    monkeypatch.setattr(triton_backend, "device_obstacle", lambda device: None)
    monkeypatch.setattr(graph_choice, "graph_obstacle", lambda device: None)
    monkeypatch.setattr(graphs, "CudaCapture", Playback)
    run_few_rows(monkeypatch)
    Playback.num_captures = 0
