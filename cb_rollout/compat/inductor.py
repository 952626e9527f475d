"""Reach past torch's public API (2.11 to 2.13) to compile C++, and to trace and compile graphs.

`torch.utils.cpp_extension` needs ninja, Python's headers and torch's own; inductor's `CppCodeCache`
knows the compiler, the CPU's flags and torch's OpenMP, and caches on disk. `torch.export` needs
every input named and every mutation declared; `make_fx`, below it, records what runs.
`torch.compile` would trace the graph again and check guards at each call; `standalone_compile` does
neither.

Owns the folder of what is compiled. Torch's own is named after the user in the folder for temporary
files, where any user of the machine may make it first.
"""

import ctypes
import logging
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import cpp_builder, list_mode_options, list_options, standalone_compile
from torch._inductor.codecache import CppCodeCache
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

# Multiply and add in one instruction, which inductor forbids its own kernels.
CONTRACT_FLAG = "-ffp-contract=fast"


def compiler_obstacle() -> str | None:
    """Return why nothing can be compiled for a CPU; None: it can (torch 2.11 to 2.13)."""
    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:  # noqa: BLE001  what it raises is the answer
        return str(error)
    return None


def compile_library(source: str, *, contracts: bool = True) -> ctypes.CDLL:
    """Load C++ source, compiled now or by an earlier process (torch 2.11 to 2.13).

    Args:
        source: the C++.
        contracts: let the compiler join products and sums, in some loops and not in others.

    Raises:
        Exception: what the compiler raises.
    """
    with _in_own_cache():
        return _CheckedLibraries.load(source, extra_flags=(CONTRACT_FLAG,) if contracts else ())


class _CheckedLibraries(CppCodeCache):
    """Load files of the user alone (torch 2.11 to 2.13)."""

    cache: dict[str, Any] = {}  # noqa: RUF012  torch's name for what is loaded

    @staticmethod
    def _load_library_inner(path: str, key: str) -> ctypes.CDLL:
        for checked in (Path(path), Path(path).parent):
            if reason := _why_others_can_write(checked):
                raise PermissionError(f"{checked} {reason}; remove it, and it is compiled again.")
        return ctypes.CDLL(path)


def _why_others_can_write(path: Path) -> str | None:
    """Return why a file is not this user's alone; None: it is."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"is of user {status.st_uid}, not of {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"is open to other users (mode {stat.S_IMODE(status.st_mode):o})"
    return None


# Inductor reads the name of its folder from the environment, which threads share.
_COMPILING = threading.RLock()
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def _in_own_cache() -> Iterator[None]:
    """Compile into, and load from, `compiled_folder` inside the block."""
    with _COMPILING:
        before = os.environ.get(_CACHE_VARIABLE)
        os.environ[_CACHE_VARIABLE] = str(compiled_folder())
        try:
            yield
        finally:
            if before is None:
                del os.environ[_CACHE_VARIABLE]
            else:
                os.environ[_CACHE_VARIABLE] = before


def compiled_folder() -> Path:
    """Return the folder of compiled code, which no other user can write to.

    It is `cb_rollout/compiled` in the user's cache, else a temporary one.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(caches).absolute() / "cb_rollout" / "compiled"
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        reason = _why_others_can_write(folder)
        if not reason and not os.access(folder, os.W_OK | os.X_OK):
            reason = "cannot be written"
    except OSError as error:
        reason = f"cannot be used ({error.strerror})"
    return _temporary_folder(f"{folder} {reason}") if reason else folder


@cache
def _temporary_folder(reason: str) -> Path:
    """Make a folder for this process, and warn why."""
    warnings.warn(
        f"{reason}; what is compiled is kept for this process only. Remove it, or set "
        "XDG_CACHE_HOME to a folder of your own.",
        stacklevel=2,
    )
    # Kept until the process ends.
    _TEMPORARY.append(folder := tempfile.TemporaryDirectory("-cb_rollout"))
    return Path(folder.name)


_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []


GROUPED = "cb_rollout::grouped_product"

torch.library.define(GROUPED, "(Tensor rows, Tensor weights, Tensor ends) -> Tensor")


def grouped_product(
    rows_BK: torch.Tensor, weights_GKN: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    """Multiply each row by its group's weight, `[B, N]`; `ends_G`: the end of each group's rows."""
    return torch._grouped_mm(rows_BK, weights_GKN, ends_G)


torch.library.impl(GROUPED, "CPU", grouped_product)


@torch.library.register_fake(GROUPED)
def _output_of_grouped_product(
    rows_BK: torch.Tensor, weights_GKN: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    return rows_BK.new_empty(rows_BK.shape[0], weights_GKN.shape[2])


class _AnyDtypeGrouped(TorchFunctionMode):
    """Trace torch's `_grouped_mm`, which transformers' experts call, as `grouped_product`.

    Its CPU kernel takes float32, but its shape function refuses all but bfloat16 (torch 2.13).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_plain = len(args) == 2 and kwargs.get("offs") is not None
        is_plain &= kwargs.get("bias") is None and kwargs.get("out_dtype") is None
        if func is torch._grouped_mm and is_plain and (args[0].dim(), args[1].dim()) == (2, 3):
            return torch.ops.cb_rollout.grouped_product(*args, kwargs["offs"])
        return func(*args, **kwargs)


def trace_graph(
    function: Callable[..., torch.Tensor], *examples: torch.Tensor
) -> tuple[fx.GraphModule, bool]:
    """Trace a function of tensors of any leading size (torch 2.11 to 2.13).

    Returns:
        The graph of operators on inputs and weights, and whether it holds for some sizes only.

    Raises:
        Exception: the function reads the contents of a tensor.
    """
    with torch.no_grad(), _quiet(), _AnyDtypeGrouped():
        module = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    shapes = module.shape_env
    assert shapes is not None
    return module, bool(shapes.guards or shapes.replacements or shapes.deferred_runtime_asserts)


def fake_weight(graph: fx.Graph, weight: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of a weight's shape, for an input of a traced graph (torch 2.13)."""
    mode = graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    return mode.from_tensor(weight.detach(), static_shapes=True)


def call_function(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Add a call of an operator to a traced graph, with its fake result (torch 2.11 to 2.13)."""
    node = graph.call_function(target, args)
    mode = graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    with mode:
        node.meta["val"] = target(*fx.map_arg(args, lambda given: given.meta["val"]))
    return node


def compile_graph(graph: fx.Graph, options: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """Compile a traced graph of one output by inductor (torch 2.11 to 2.13).

    Raises:
        Exception: what inductor or its C++ compiler raises.
    """
    (output,) = graph.find_nodes(op="output")
    # inductor takes graphs that return a tuple.
    output.args = ((output.args[0],),)
    examples = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    # Compile in this process: workers would outlive a training run's forks. A trace is tried before
    # it is used, so its calls skip the checks of sizes. The caller captures CUDA graphs itself.
    skipped = {"size_asserts": False, "alignment_asserts": False}
    patches = {"compile_threads": 1, **skipped, **options, "triton.cudagraphs": False}
    with torch.no_grad(), _in_own_cache():
        artifact = standalone_compile(
            fx.GraphModule({}, graph),
            examples,
            dynamic_shapes="from_graph",
            options={"config_patches": patches},
        )
    return lambda *inputs: artifact(*inputs)[0]


def inductor_options(mode: str | None) -> dict[str, Any]:
    """Return the inductor options of a `mode` of `torch.compile` (torch 2.11 to 2.13).

    Raises:
        RuntimeError: there is no such mode.
    """
    return list_mode_options(mode) if mode else {}


def unknown_inductor_options(options: Iterable[object]) -> list[object]:
    """Return the names that are no options of inductor (torch 2.11 to 2.13)."""
    # torch.compile takes dashes too.
    known = {name.replace("-", "_") for name in list_options()}
    return [name for name in options if str(name).replace("-", "_") not in known]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch 2.13 from logging an error for a forward that cannot be traced."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
