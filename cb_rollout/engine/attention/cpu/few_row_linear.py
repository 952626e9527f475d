"""Compute linear layers of a few rows by a C++ kernel on a CPU, compiled once for this machine.

Owns the choice between the kernel and torch, which computes all that the kernel is not for. Called
by the thread that runs a decode step.

B: rows, K: inputs of a linear layer, N: its outputs.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from cb_rollout.engine.native.library import COUNT, TENSOR, TYPES, library

# With more rows MKL's product is the faster one (see the bench's `roofline`).
MAX_ROWS = 64


def prepare(dtype: torch.dtype) -> None:
    """Compile the kernel now, not in a rollout; the kernel's call raises a failure."""
    with suppress(Exception):
        _kernel(dtype)


def linear(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a linear layer, `[B, N]`, by the kernel or by torch, whichever is faster.

    Args:
        rows_BK: on a CPU, in one of `native.library.TYPES`, as all three.
        weight_NK: the layer's weight.
        bias_N: the bias; None: there is none.
    """
    if rows_BK.shape[0] > MAX_ROWS or not weight_NK.is_contiguous():
        return functional.linear(rows_BK, weight_NK, bias_N)
    return multiply(rows_BK, weight_NK, bias_N)


def multiply(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a linear layer by the kernel; see `linear`. The weight must be contiguous."""
    rows_BK, bias_N = rows_BK.contiguous(), None if bias_N is None else bias_N.contiguous()
    (B, K), N = rows_BK.shape, weight_NK.shape[0]
    outputs_BN = rows_BK.new_empty(B, N)
    _kernel(rows_BK.dtype)(
        rows_BK.data_ptr(),
        weight_NK.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        outputs_BN.data_ptr(),
        B,
        K,
        N,
    )
    return outputs_BN


# An operator, so that a traced graph may hold it and inductor compile it.
torch.library.define("cb_rollout::linear", "(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.register_fake("cb_rollout::linear")
def _output_of_linear(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    return rows_BK.new_empty(rows_BK.shape[0], weight_NK.shape[0])


torch.library.impl("cb_rollout::linear", "CPU", linear)


@cache
def _kernel(dtype: torch.dtype) -> Callable[..., Any]:
    kernel = library("multiply", REAL=TYPES[dtype]).multiply
    kernel.argtypes, kernel.restype = (*(TENSOR,) * 4, *(COUNT,) * 3), None
    return kernel
