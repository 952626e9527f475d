"""Compile a traced graph with `torch.compile` and the user's settings (torch 2.11 to 2.13).

Inductor writes to this user's cache folder, compiles in this process, and rounds to 16 bits where
the model does; `options` may change the last two. Settings that `torch.compile` refuses are refused
here too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import list_mode_options

from cb_rollout.compat.inductor import own_folder

# Worker processes would outlive a training run's forks.
_PATCHES = {"compile_threads": 1, "emulate_precision_casts": True}


def compile_module(
    module: fx.GraphModule,
    *,
    fullgraph: bool,
    dynamic: bool | None,
    backend: str | Callable[..., Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Callable[..., torch.Tensor]:
    """Return a graph's function, which the first call of a new size compiles.

    Calls of one module share dynamo's limit of recompilations.

    Args:
        module: the traced graph.
        fullgraph: raise an error at a graph break.
        dynamic: compile for any size; None: for any size from the second size on.
        backend: the name of a backend of `torch.compile`, or a function.
        mode: a name that stands for several options of `torch.compile`; None: no such options.
        options: options of the backend, and `guard_filter_fn`.

    Raises:
        RuntimeError: torch knows no such backend, mode or option.
    """
    named = dict(options or {})
    # An option of torch itself, which inductor does not know.
    filters = {}
    if "guard_filter_fn" in named:
        filters["guard_filter_fn"] = named.pop("guard_filter_fn")
    if backend == "inductor":
        patches = _PATCHES | mode_options(mode) | named
        compiler: Any = _Inductor(patches, dynamic)
        return torch.compile(
            module.forward,
            fullgraph=fullgraph,
            dynamic=dynamic,
            backend=compiler,
            options=filters or None,
        )
    return torch.compile(
        module.forward,
        fullgraph=fullgraph,
        dynamic=dynamic,
        backend=backend,
        mode=mode,
        options=(filters | named) or None,
    )


def mode_options(mode: str | None) -> dict[str, Any]:
    """Return inductor's options for a mode; `RuntimeError` if inductor has no such mode."""
    return dict(list_mode_options(mode)) if mode else {}


def captures_graphs(
    backend: str | Callable[..., Any], mode: str | None, options: Mapping[str, Any] | None
) -> bool:
    """Return whether a backend captures its own CUDA graphs; may raise `RuntimeError`."""
    if backend != "inductor":
        return backend == "cudagraphs"
    return bool((mode_options(mode) | dict(options or {})).get("triton.cudagraphs", False))


def cause_of(error: Exception) -> Exception:
    """Return the backend's exception that dynamo wrapped in its own error."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error


class _Inductor:
    """The backend "inductor", compiling into this user's cache folder."""

    def __init__(self, patches: dict[str, Any], dynamic: bool | None) -> None:
        # torch.compile makes this wrapper for backend="inductor"; the wrapper checks the options.
        self._compile = torch._TorchCompileInductorWrapper(None, patches, dynamic)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        with own_folder():
            return self._compile(module, inputs)
