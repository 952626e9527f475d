"""Capture a step as a CUDA graph."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cb_rollout.compat.torch import clear_cublas_workspaces, leave_failed_capture
from cb_rollout.errors import error_text

# Runs a captured step again; returns the tensor of its first run, with new contents.
Replay = Callable[[], torch.Tensor]

# What torch says about an operator that waits, under `set_sync_debug_mode("warn")`.
WAIT_WARNING = "called a synchronizing CUDA operation"

# Graphs whose capture failed, each with its error. Torch's allocator of pinned memory (2.11 to
# 2.13) keeps a pointer to such a graph, and follows it later: the graph must never be freed.
_FAILED: list[tuple[Any, str]] = []


class CaptureFailedError(RuntimeError):
    """CUDA refused this capture, or an earlier one of this process; no further one is made."""


class WaitingStepError(RuntimeError):
    """A step waits for the device, which no capture allows."""


class CudaCapture:
    """Captures steps into CUDA graphs that share one memory pool and one stream.

    One stream, because cuBLAS keeps a workspace for every stream that it ran in.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.start_over()

    def start_over(self) -> None:
        """Capture into a new memory pool; the previous one is freed with its last graph."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Replay) -> Replay:
        """Run a step twice, to compile kernels and set up libraries; then capture it.

        Raises:
            CaptureFailedError: CUDA refused the capture, or an earlier one of this process.
            WaitingStepError: the step waits for the device.
            RuntimeError: the step fails before the capture.
        """
        if _FAILED:
            _, reason = _FAILED[0]
            raise CaptureFailedError(
                f"an earlier capture failed ({reason}), and no more are made in this process; "
                "restart it to capture again"
            )
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` stays in its stream if its end raises; this block leaves it.
        with torch.cuda.stream(self._stream):
            step()
            with _refusing_waits():
                step()
            with _own_state():
                result = self._captured(graph, step)
        caller.wait_stream(self._stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def _captured(self, graph: torch.cuda.CUDAGraph, step: Replay) -> torch.Tensor:
        """Capture a step; return the result that each replay fills."""
        result: torch.Tensor | None = None
        raised: BaseException | None = None
        try:
            # Other threads may train, and allocate, during the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                # An error is kept until the capture has ended, whose own error would hide it.
                try:
                    result = step()
                except BaseException as error:  # noqa: BLE001  raised below
                    raised = error
        except RuntimeError as error:
            leave_failed_capture(self._device, self._pool)
            raise _failed(graph, raised or error) from (raised or error)
        if isinstance(raised, torch.OutOfMemoryError):
            # The capture ended as it should.
            raise raised
        if isinstance(raised, Exception):
            raise _failed(graph, raised) from raised
        if raised is not None:
            _FAILED.append((graph, error_text(raised)))
            raise raised
        assert result is not None
        return result


def _failed(graph: torch.cuda.CUDAGraph, error: BaseException) -> CaptureFailedError:
    """Keep a graph whose capture failed; return the error to raise."""
    reason = error_text(error)
    _FAILED.append((graph, reason))
    return CaptureFailedError(
        f"CUDA refused a capture ({reason}); no more are made in this process"
    )


@contextmanager
def _own_state() -> Iterator[None]:
    """Keep a capture from using earlier casts and workspaces, and from leaving its own behind.

    accelerate may wrap the model's forward in autocast, which caches casts: a replay would read a
    cast from before the capture, and a cast cached during the capture is empty until a replay. A
    cuBLAS workspace from before the capture is outside the pool, where others may free it:
    inductor's graphs clear all workspaces around their captures.
    """
    torch.clear_autocast_cache()
    clear_cublas_workspaces()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        clear_cublas_workspaces()


@contextmanager
def _refusing_waits() -> Iterator[None]:
    """Raise `WaitingStepError` at the end if the calling thread waited for the device inside.

    A capture that fails leaves its memory pool half open, so it must not begin. Torch's own mode
    that raises would raise in other threads too, which may train.
    """
    mode_before = torch.cuda.get_sync_debug_mode()
    thread = threading.get_ident()
    places: list[str] = []
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
            torch.cuda.set_sync_debug_mode(mode_before)
    if places:
        distinct_places = ", ".join(dict.fromkeys(places))
        raise WaitingStepError(f"it waits for the device at {distinct_places}")
