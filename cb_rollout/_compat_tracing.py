"""Reaches past torch's public API for its tracer, with the version and why.

`torch.export` wants every input named and every mutation declared; `make_fx` (torch 2.11 to 2.13),
which it is built on, writes down what runs.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

MARK = "cb_rollout::attend"

torch.library.define(MARK, "(Tensor query, Tensor key, Tensor value, int call) -> Tensor")


@torch.library.register_fake(MARK)
def _shape_of_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int
) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


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
    with torch.no_grad(), _quiet():
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
