"""Reaches past torch's public API for its way to compile C++ for this machine.

`torch.utils.cpp_extension` wants ninja, Python's headers and torch's own. What inductor compiles
its kernels with (torch 2.11 to 2.13) knows the compiler, the flags of the CPU and the OpenMP that
torch computes with, and keeps what it made on disk for the next process.

Traces and compiles past torch's public API, with the version and why.

`torch.export` wants every input named and every mutation declared; `make_fx` (torch 2.11 to 2.13),
which it is built on, records what runs. `torch.compile` would trace the graph once more, and check
guards at every call; `standalone_compile` takes a graph as it is.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._inductor import cpp_builder, list_mode_options, list_options, standalone_compile
from torch._inductor.codecache import CppCodeCache
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

FUSED = "-ffp-contract=fast"
# Multiplies and adds in one instruction, which inductor forbids its own kernels.


def compiler_obstacle() -> str | None:
    """Why nothing can be compiled for a CPU; None: it can."""
    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:  # noqa: BLE001  what it raises is the answer
        return str(error)
    return None


def compiled_library(source: str) -> ctypes.CDLL:
    """What C++ source exports, compiled now or by an earlier process.

    Raises:
        Exception: what the compiler raises.
    """
    return CppCodeCache.load(source, extra_flags=(FUSED,))


ATTEND, GROUPED = "cb_rollout::attend", "cb_rollout::grouped_product"

torch.library.define(ATTEND, "(Tensor query, Tensor key, Tensor value, int call) -> Tensor")
torch.library.define(GROUPED, "(Tensor rows, Tensor weights, Tensor ends) -> Tensor")


class _Attending(threading.local):
    """The function that attends in this thread; None outside of `attending`."""

    function: Callable[..., torch.Tensor] | None = None


_ATTENDING = _Attending()


@contextmanager
def attending(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Have `attend`, in this thread, call a function with its own arguments."""
    _ATTENDING.function = function
    try:
        yield
    finally:
        _ATTENDING.function = None


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int) -> torch.Tensor:
    """Run the `call`-th attention of a traced forward; only inside of `attending`."""
    assert _ATTENDING.function is not None
    return _ATTENDING.function(query, key, value, call)


torch.library.impl(ATTEND, "CPU", attend)


@torch.library.register_fake(ATTEND)
def _output_of_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int
) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


def grouped_product(
    rows_BK: torch.Tensor, weights_GKN: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    """Multiply each row by its group's weight, `[B, N]`; `ends_G` tells where groups' rows end."""
    return torch._grouped_mm(rows_BK, weights_GKN, ends_G)


torch.library.impl(GROUPED, "CPU", grouped_product)


@torch.library.register_fake(GROUPED)
def _output_of_grouped_product(
    rows_BK: torch.Tensor, weights_GKN: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    return rows_BK.new_empty(rows_BK.shape[0], weights_GKN.shape[2])


class _AnyDtypeGrouped(TorchFunctionMode):
    """Has torch's `_grouped_mm` traced as `grouped_product`.

    transformers' experts call it. It has a kernel for float32 on a CPU, but its shape function
    refuses anything but bfloat16 (torch 2.13).
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


def traced(
    function: Callable[..., torch.Tensor], *examples: torch.Tensor
) -> tuple[fx.GraphModule, bool]:
    """Trace a function of tensors of any leading size, as operators on its inputs and weights.

    Returns:
        The graph, and whether it is right for some sizes only.

    Raises:
        Exception: the function asks for the contents of a tensor.
    """
    with torch.no_grad(), _quiet(), _AnyDtypeGrouped():
        module = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    shapes = module.shape_env
    assert shapes is not None
    return module, bool(shapes.guards or shapes.replacements or shapes.deferred_runtime_asserts)


def without_contents(graph: fx.Graph, weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a weight's form, without contents, as the inputs of a traced graph are."""
    mode = graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    return mode.from_tensor(weight.detach(), static_shapes=True)


def compiled(graph: fx.Graph, options: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """Compile a traced graph of one output, whose inputs carry examples, by inductor.

    Raises:
        Exception: what inductor or its C++ compiler raises.
    """
    (output,) = graph.find_nodes(op="output")
    # inductor takes graphs that return a tuple.
    output.args = ((output.args[0],),)
    examples = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    # One at a time, in this process: workers would outlive a training run's forks.
    # A trace is tried before it is used, so a call need not look at the form of each tensor.
    patches = {"compile_threads": 1, "size_asserts": False, **options}
    with torch.no_grad():
        artifact = standalone_compile(
            fx.GraphModule({}, graph),
            examples,
            dynamic_shapes="from_graph",
            options={"config_patches": patches},
        )
    return lambda *inputs: artifact(*inputs)[0]


def inductor_options(mode: str | None) -> dict[str, Any]:
    """Return the options that a `mode` of `torch.compile` stands for.

    Raises:
        RuntimeError: there is no such mode.
    """
    return list_mode_options(mode) if mode else {}


def unknown_inductor_options(options: Iterable[object]) -> list[object]:
    """Return those of the names that are no options of inductor."""
    # As torch.compile reads them.
    known = {name.replace("-", "_") for name in list_options()}
    return [name for name in options if str(name).replace("-", "_") not in known]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging an error for a forward that cannot be traced."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
