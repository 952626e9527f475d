"""Run a traced forward that `torch.compile` compiles with a user's settings.

Bounds how many sizes are compiled. With `dynamic=False`, sizes are rounded up, and each size has a
separate graph. Otherwise one graph takes every size of at least two, since torch gives a size of
one a separate graph. Called by the thread that runs a forward.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cb_rollout.compat import dynamo, inductor
from cb_rollout.config.compilation import CompileSettings
from cb_rollout.errors import ConfigurationError

Forward = Callable[..., torch.Tensor]

# Graphs of one size each that are kept, unless `max_cached_graphs` says how many.
MAX_STATIC_GRAPHS = 64

# torch gives a size of one a separate graph.
LEAST_SIZE = 2

# Sizes of static graphs: this one, twice the last one, and one between them. Above the first size,
# less than a third is padding.
_FIRST_SIZE = 4


class CompilationFailedError(ConfigurationError):
    """A forward cannot be compiled as a setting asks, whatever its rows are."""


def compile_obstacle(settings: CompileSettings, device: torch.device) -> str | None:
    """Return why nothing can be compiled with these settings on a device; None: it may be."""
    try:
        captures = dynamo.captures_graphs(settings.backend, settings.mode, settings.options)
        dynamo.compile_module(fx.GraphModule({}, _empty_graph()), **arguments_of(settings))
    except Exception as error:  # noqa: BLE001  what torch raises is the reason
        return f"is refused by torch.compile ({error})"
    if device.type == "cuda" and captures:
        name = f"mode={settings.mode!r}" if settings.options is None else "triton.cudagraphs"
        if settings.backend == "cudagraphs":
            name = "backend='cudagraphs'"
        return (
            f"({name}) has torch capture CUDA graphs of one size each, which cannot be captured in "
            "those of the engine; set mode='max-autotune-no-cudagraphs' or mode='default'"
        )
    needs_compiler = device.type == "cpu" and settings.backend == "inductor"
    if not needs_compiler:
        return None
    obstacle = inductor.compiler_obstacle()
    if obstacle:
        return f"needs a C++ compiler, g++ or the one that CXX names ({obstacle})"
    return None


def _empty_graph() -> fx.Graph:
    graph = fx.Graph()
    graph.output(())
    return graph


def arguments_of(settings: CompileSettings) -> dict[str, Any]:
    """Return the arguments of `torch.compile`."""
    names = ("fullgraph", "dynamic", "backend", "mode", "options")
    return {name: getattr(settings, name) for name in names}


def padded_size(size: int, interval: int = 0) -> int:
    """Return the size of the static graph for this many rows or tokens.

    A multiple of `interval`; 0: a power of two, or one and a half times a power of two.
    """
    if interval:
        return -(-size // interval) * interval
    padded = _FIRST_SIZE
    while padded < size:
        between = padded + padded // 2
        if size <= between:
            return between
        padded *= 2
    return padded


class CompiledGraph:
    """A traced forward, compiled when it is first called, or once for each of its sizes."""

    def __init__(
        self,
        module: fx.GraphModule,
        settings: CompileSettings,
        *,
        interval: int = 0,
        max_graphs: int = 0,
    ) -> None:
        """Compile nothing yet.

        Args:
            module: the forward, of tensors of any size.
            settings: of `torch.compile`.
            interval: see `padded_size`.
            max_graphs: static graphs that are kept, the ones that ran last; 0: a default.
        """
        self._module = module
        self._settings = settings
        self._interval = interval
        self._max_graphs = max_graphs or MAX_STATIC_GRAPHS
        self._graphs: OrderedDict[tuple[int, ...], Forward] = OrderedDict()

    @property
    def num_graphs(self) -> int:
        """Static graphs that are kept; 1 where one graph takes every size."""
        return len(self._graphs)

    def padded(self, size: int) -> int:
        """Return the number of rows or tokens with which to call the forward to compute `size`."""
        if self._settings.is_static:
            return padded_size(size, self._interval)
        return max(LEAST_SIZE, size)

    def __call__(self, sizes: tuple[int, ...], *inputs: torch.Tensor) -> torch.Tensor:
        """Run the forward; `sizes`: of these inputs, each as `padded` returns it."""
        key = sizes if self._settings.is_static else ()
        graph = self._graphs.pop(key, None)
        if graph is None:
            # Dynamo counts recompilations by code, and a copy has separate code.
            copied = fx.GraphModule(self._module, self._module.graph)
            graph = dynamo.compile_module(copied, **arguments_of(self._settings))
        self._graphs[key] = graph
        if len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)
        # No inference mode: compiled code may keep what it makes at its first call.
        with torch.no_grad():
            return graph(*inputs)
