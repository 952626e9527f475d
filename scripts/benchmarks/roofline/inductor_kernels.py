"""Reach past torch's public API (2.13): the kernels that inductor plans for a card, without one.

Inductor asks `torch.cuda` and Triton's driver for the card's properties, plans its kernels and
writes their code before it compiles any. Here it stops then.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import sympy
import torch
from torch import fx
from torch._dynamo import device_interface
from torch._inductor import ir
from torch._inductor.dependencies import MemoryDep
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch.utils import _triton as triton_support
from torch.utils._pytree import tree_map
from torch.utils._sympy.functions import Identity

from cb_rollout.compat import inductor

DEVICE = torch.device("cuda", 0)

# Accesses are counted for two numbers of rows, and grow linearly between and beyond them.
COUNTED_ROWS = (2, 3)

# Operators that leave a kernel's numbers as they are.
VIEWS = {"view", "_unsafe_view", "transpose", "permute", "unsqueeze", "slice", "select", "reshape"}

# Floor division and remainder, as inductor writes them in an index.
_INDEX_FUNCTIONS = {
    "FloorDiv": np.floor_divide,
    "CleanDiv": np.floor_divide,
    "ModularIndexing": lambda index, divisor, modulus: index // divisor % modulus,
}


@dataclass(frozen=True, slots=True)
class GeneratedKernel:
    """A kernel that inductor writes."""

    name: str
    """Its operators, as inductor joins them."""
    fixed_bytes: int
    """Read and written whatever the number of rows, each element once."""
    bytes_per_row: int


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call of an operator that inductor leaves as it is."""

    operator: Any
    arguments: tuple[Any, ...]
    """Tensors are `Sized`."""


@dataclass(frozen=True, slots=True)
class Sized:
    """Sizes of a tensor: of each dimension, a number for no row, and one for each row."""

    sizes: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """Return the shape for so many rows."""
        return tuple(fixed + num_rows * growing for fixed, growing in self.sizes)


Planned = list[GeneratedKernel | OperatorCall]


class _PlannedError(BaseException):
    """Ends a compilation whose kernels are planned; no handler of inductor's takes it."""


def planned_kernels(graph: fx.Graph, card: Any) -> Planned:
    """Return the kernels of a traced graph on a card, in the order of their launches.

    Args:
        graph: as `trace_graph` returns it, with weights as inputs; it is changed.
        card: properties of the card, as `torch.cuda.get_device_properties` names them.
    """
    found: Planned = []
    generate = GraphLowering.codegen

    def codegen(self: GraphLowering) -> Any:
        code = generate(self)[0].value
        found.extend(_kernels(self))
        num_generated = sum(isinstance(one, GeneratedKernel) for one in found)
        assert num_generated == code.count(".run("), "the code launches other kernels"
        raise _PlannedError

    _move(graph)
    changed = {"triton.autotune_at_compile_time": False, "fx_graph_cache": False}
    compile_own = inductor.standalone_compile

    def standalone_compile(*args: Any, options: Mapping[str, Any], **named: Any) -> Any:
        # Inductor sets some of these itself, but for what its caller asks.
        patches = {**options["config_patches"], **changed}
        return compile_own(*args, options={"config_patches": patches}, **named)

    compiling = patch.object(inductor, "standalone_compile", standalone_compile)
    planning = patch.object(GraphLowering, "codegen", codegen)
    with _pretended(card), compiling, planning, suppress(_PlannedError):
        inductor.compile_graph(graph)
    return found


def _move(graph: fx.Graph) -> None:
    """Have a graph's inputs, and what its operators create, lie on `DEVICE`, in place."""
    for node in graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["val"]
            with fake.fake_mode:
                node.meta["val"] = torch.empty_strided(
                    fake.shape, fake.stride(), dtype=fake.dtype, device=DEVICE
                )
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": DEVICE}


def _kernels(graph: GraphLowering) -> Iterator[GeneratedKernel | OperatorCall]:
    """List what a planned graph launches."""
    rows = sorted(graph.sizevars.backed_var_to_val, key=str)[:1]
    for node in graph.scheduler.nodes:
        if isinstance(node, ExternKernelSchedulerNode):
            if not isinstance(node.node, ir.MultiOutput):
                yield _call(node.node, rows)
        elif not isinstance(node, NopKernelSchedulerNode):
            few, more = (_accessed_bytes(graph, node, rows, count) for count in COUNTED_ROWS)
            yield GeneratedKernel(_name(node), few - COUNTED_ROWS[0] * (more - few), more - few)


def _name(node: Any) -> str:
    """Name a kernel by its operators."""
    targets = {one.target for part in node.get_nodes() for one in part.node.origins}
    names = {
        target.overloadpacket.__name__ for target in targets if hasattr(target, "overloadpacket")
    }
    return ", ".join(sorted(names - VIEWS))


def _call(kernel: Any, rows: Sequence[sympy.Symbol]) -> OperatorCall:
    """Read the call of an operator."""

    def sized(value: Any) -> Any:
        if not isinstance(value, ir.IRNode):
            return value
        sizes = [_linear(size, rows) for size in value.get_size()]
        strides = [_linear(stride, rows)[0] for stride in value.get_stride()]
        return Sized(tuple(sizes), tuple(strides), value.get_dtype())

    if isinstance(kernel, ir.FallbackKernel):
        arguments, _ = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
        operator = kernel.op_overload
    else:
        arguments = kernel.inputs
        operator = getattr(torch, kernel.get_kernel_name().removeprefix("extern_kernels."))
    is_leaf = lambda value: isinstance(value, ir.IRNode)  # noqa: E731
    return OperatorCall(operator, tuple(tree_map(sized, list(arguments), is_leaf=is_leaf)))


def _linear(size: Any, rows: Sequence[sympy.Symbol]) -> tuple[int, int]:
    """Return a size for no row, and what it grows by with each row."""
    none, one = (int(sympy.sympify(size).subs(dict.fromkeys(rows, n))) for n in (0, 1))
    return none, one - none


def _accessed_bytes(
    graph: GraphLowering, node: Any, rows: Sequence[sympy.Symbol], num_rows: int
) -> int:
    """Return the bytes that a kernel reads and writes for so many rows, each element once."""
    values = dict.fromkeys(rows, num_rows)
    accesses: dict[str, list[Any]] = {}
    for dep in sorted({*node.read_writes.reads, *node.read_writes.writes}, key=str):
        if not _is_internal(graph, node, dep.name):
            accesses.setdefault(dep.name, []).append(dep)
    total = 0
    for name, deps in accesses.items():
        buffer: Any = graph.try_get_buffer(name)
        numel = int(sympy.prod([sympy.sympify(n).subs(values) for n in buffer.get_size()]))
        elements = _num_elements(deps, values, numel)
        total += elements * buffer.get_dtype().itemsize
    return total


def _is_internal(graph: GraphLowering, node: Any, name: str) -> bool:
    """Return whether a kernel keeps a result to itself, so that it is never in memory."""
    buffer = graph.scheduler.name_to_buf.get(name)
    if buffer is None or buffer.defining_op_name() not in node.get_operation_names():
        return False
    parts = {part.get_name() for part in node.get_nodes()}
    return all(user.get_name() in parts for user in buffer.users)


def _num_elements(deps: Sequence[Any], values: Mapping[Any, int], numel: int) -> int:
    """Return the elements of a buffer that some of these accesses touch."""
    touched, indirect = [np.empty(0, np.int64)], 0
    for dep in deps:
        if not isinstance(dep, MemoryDep):
            return numel
        index = sympy.sympify(dep.index).replace(Identity, lambda inner: inner).subs(values)
        sizes = [int(sympy.sympify(size).subs(values)) for size in dep.size]
        if index.free_symbols - {*dep.var_names}:
            # Looked up by the contents of another tensor: each time another element.
            indirect += int(np.prod(sizes))
            continue
        places = np.indices(sizes, np.int64).reshape(len(sizes), -1)
        function = sympy.lambdify(dep.var_names, index, modules=[_INDEX_FUNCTIONS, "numpy"])
        touched.append(np.unique(np.broadcast_to(function(*places), places.shape[1:])))
    every = np.unique(np.concatenate(touched))
    return min(numel, indirect + int(((every >= 0) & (every < numel)).sum()))


@contextmanager
def _pretended(card: Any) -> Iterator[None]:
    """Have torch and Triton describe a card that is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def nothing(*_: Any, **__: Any) -> None: ...

    def zero(*_: Any) -> int:
        return 0

    target = GPUTarget("cuda", 10 * card.major + card.minor, 32)
    active = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=zero, get_current_stream=zero
    )
    answers: dict[str, Any] = {
        "current_device": zero,
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: card,
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": nothing,
    }
    spoken = answers | {
        "_exchange_device": zero,
        "_lazy_init": nothing,
        "_maybe_exchange_device": zero,
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0),
        "get_device_capability": lambda *_: (card.major, card.minor),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: True,
        "set_rng_state": nothing,
    }
    interface = device_interface.CudaInterface
    answers |= {"exchange_device": zero, "maybe_exchange_device": zero}
    # Its patterns of attention would be traced on the device.
    find_patterns = joint_graph.lazy_init
    with ExitStack() as stack:

        def answer(owner: Any, name: str, said: Any) -> None:
            stack.enter_context(patch.object(owner, name, said))

        for name, said in spoken.items():
            answer(torch.cuda, name, said)
        for name, said in answers.items():
            answer(interface, name, staticmethod(said))
        for name in ("current_device", "get_device_properties"):
            answer(interface.Worker, name, staticmethod(answers[name]))
        answer(joint_graph, "lazy_init", lambda *_: find_patterns(torch.device("cpu")))
        answer(driver, "_active", active)
        _forget_triton()
        stack.callback(_forget_triton)
        yield


def _forget_triton() -> None:
    """Have torch ask again whether Triton runs here; it keeps the first answer of a process."""
    for function in vars(triton_support).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
