"""Capture a step as a CUDA graph."""

from collections.abc import Callable

import torch

# Runs a captured step again; returns the tensor of its first run, with new contents.
Replay = Callable[[], torch.Tensor]


class CudaCapture:
    """Captures steps into CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Replay) -> Replay:
        """Run a step in a side stream, to compile kernels and set up libraries; then capture it."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may train, and allocate, during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
