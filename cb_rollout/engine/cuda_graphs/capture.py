"""Capture a step as a CUDA graph."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Runs a captured step again; returns the tensor of its first run, with new contents.
Replay = Callable[[], torch.Tensor]

# What torch says of an operator that waits, under `set_sync_debug_mode("warn")`.
WAIT_WARNING = "called a synchronizing CUDA operation"


class CudaCapture:
    """Captures steps into CUDA graphs that share one memory pool and one stream.

    One stream, because cuBLAS keeps a workspace for every stream that it ran in.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.start_over()

    def start_over(self) -> None:
        """Capture into another pool from now on: the last one is freed with its last graph."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Replay) -> Replay:
        """Run a step twice, to compile kernels and set up libraries; then capture it.

        `RuntimeError`: the step waits for the device, or CUDA refused the capture.
        """
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` stays in its stream where its end raises; this block leaves it.
        with torch.cuda.stream(self._stream):
            step()
            with _refusing_waits():
                step()
            # Other threads may train, and allocate, during the capture. A model's own forward may
            # autocast, as accelerate wraps it: a replay would read a cast from before the capture,
            # and a cast of the capture is empty before a replay.
            torch.clear_autocast_cache()
            try:
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    result = step()
            finally:
                torch.clear_autocast_cache()
        caller.wait_stream(self._stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


@contextmanager
def _refusing_waits() -> Iterator[None]:
    """Raise `RuntimeError` at the end if the calling thread waited for the device inside.

    A capture that fails leaves its memory pool half open, so it must not begin. Torch's own mode
    that raises would raise in other threads too, which may train.
    """
    before, thread, places = torch.cuda.get_sync_debug_mode(), threading.get_ident(), []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if WAIT_WARNING not in str(message):
                show(message, category, filename, lineno, *rest)
            elif threading.get_ident() == thread:
                places.append(f"{filename}:{lineno}")

        warnings.filterwarnings("always", message=WAIT_WARNING)
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if places:
        raise RuntimeError(f"it waits for the device at {', '.join(dict.fromkeys(places))}")
