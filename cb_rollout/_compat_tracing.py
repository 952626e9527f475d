"""Reaches past torch's public API for its tracer, with the version and why.

`torch.export` wants every input named and every mutation declared; `make_fx` (torch 2.11 to 2.13),
which it is built on, writes down what runs. `torch.compile` would look at the graph once more, and
at guards at every call; `standalone_compile` takes a graph as it is.
"""

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._inductor import list_mode_options, list_options, standalone_compile
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

MARK, GROUPED = "cb_rollout::attend", "cb_rollout::grouped_product"

torch.library.define(MARK, "(Tensor query, Tensor key, Tensor value, int call) -> Tensor")
torch.library.define(GROUPED, "(Tensor rows, Tensor weights, Tensor ends) -> Tensor")


@torch.library.register_fake(MARK)
def _shape_of_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int
) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


def grouped_product(
    rows_BK: torch.Tensor, weights_GKN: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    """`[B, N]`: each row times its group's weight; a group's rows end where `ends_G` says."""
    return torch._grouped_mm(rows_BK, weights_GKN, ends_G)


torch.library.impl(GROUPED, "CPU", grouped_product)


@torch.library.register_fake(GROUPED)
def _shape_of_grouped_product(
    rows_BK: torch.Tensor, weights_GKN: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    return rows_BK.new_empty(rows_BK.shape[0], weights_GKN.shape[2])


class _AnyDtypeGrouped(TorchFunctionMode):
    """Has products with one weight a group traced as `grouped_product`.

    torch's own, which transformers' experts call, has a kernel for float32 on a CPU, and refuses
    anything but bfloat16 where it is asked for no more than a shape (torch 2.13).
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


def mark(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int) -> torch.Tensor:
    """An operator that exists in traces only: the `call`-th attention of a forward."""
    return torch.ops.cb_rollout.attend(query, key, value, call)


def is_mark(node: fx.Node) -> bool:
    """Whether a traced operator is a `mark`."""
    return node.target is torch.ops.cb_rollout.attend.default


def traced(
    function: Callable[..., torch.Tensor], *examples: torch.Tensor
) -> tuple[fx.GraphModule, bool]:
    """What a function does to tensors of any leading size, as operators on its inputs and weights.

    Returns:
        The operators, and whether they are right for some sizes only.

    Raises:
        Exception: the function asks for the contents of a tensor.
    """
    with torch.no_grad(), _quiet(), _AnyDtypeGrouped():
        module = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    shapes = module.shape_env
    assert shapes is not None
    return module, bool(shapes.guards or shapes.replacements or shapes.deferred_runtime_asserts)


def example(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """A tensor without contents, of the form that an input or a value of a traced graph has."""
    value = node.meta.get("val")
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(module)
    assert isinstance(value, torch.Tensor)
    if isinstance(value, FakeTensor):
        return value
    modes = (n.meta["val"].fake_mode for n in module.graph.nodes if _is_fake(n))
    return next(modes).from_tensor(value.detach(), static_shapes=True)


def _is_fake(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), FakeTensor)


def compiled(module: fx.GraphModule, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A graph of tensors, whose placeholders carry examples, compiled by inductor.

    Raises:
        Exception: what inductor or its C++ compiler raises.
    """
    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    # One at a time, in this process: workers would outlive a training run's forks.
    # A trace is tried before it is used, so a call need not look at the form of each tensor.
    patches = {"compile_threads": 1, "size_asserts": False, **options}
    with torch.no_grad():
        artifact = standalone_compile(
            module, examples, dynamic_shapes="from_graph", options={"config_patches": patches}
        )

    # A graph calls functions, not objects.
    def stretch(*inputs: torch.Tensor) -> Any:
        return artifact(*inputs)

    return stretch


def inductor_options(mode: str | None) -> dict[str, Any]:
    """What a `mode` of `torch.compile` stands for.

    Raises:
        RuntimeError: there is no such mode.
    """
    return list_mode_options(mode) if mode else {}


def unknown_inductor_options(options: Iterable[object]) -> list[object]:
    """Those of the names that are no options of inductor."""
    # As torch.compile reads them.
    known = {name.replace("-", "_") for name in list_options()}
    return [name for name in options if str(name).replace("-", "_") not in known]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging, as an error, what is only an answer."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
