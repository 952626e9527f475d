"""Reaches past torch's public API for its tracer, with the version and why.

`torch.export` wants every input named and every mutation declared; `make_fx` (torch 2.11 to 2.13),
which it is built on, writes down what runs.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging, as an error, what is only an answer."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
