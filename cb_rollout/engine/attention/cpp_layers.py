"""What layers do to a few rows, by C++ kernels; needs a C++ compiler, once.

Everything is in one of `native.library.TYPES`, and on a CPU.

B: rows, K: inputs of a linear layer, N: its outputs, H: heads, D: size of a head.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from cb_rollout.engine.native.library import COUNT, NUMBER, TENSOR, layers_library

MOST_ROWS = 64
# Of a product by the kernel; with more, MKL's is the faster one (see the bench's `roofline`).

_ARGUMENTS = {
    "multiply": (*(TENSOR,) * 4, *(COUNT,) * 3),
    "norm": (*(TENSOR,) * 3, *(COUNT,) * 2, NUMBER),
    "rotate": (TENSOR, *(COUNT,) * 2, *(TENSOR,) * 3, *(COUNT,) * 3),
    "gate": (*(TENSOR,) * 3, COUNT),
}


def prepare(dtype: torch.dtype) -> None:
    """Compile the kernels now, not in a rollout; what fails is told where they are called."""
    with suppress(Exception):
        for name in _ARGUMENTS:
            _kernel(name, dtype)


def product(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """`[B, N]`: a linear layer, by whoever is faster at so many rows."""
    if rows_BK.shape[0] > MOST_ROWS or not weight_NK.is_contiguous():
        return functional.linear(rows_BK, weight_NK, bias_N)
    return multiply(rows_BK, weight_NK, bias_N)


def multiply(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """`[B, N]`: a linear layer, by the kernel, whose weight is contiguous."""
    rows_BK, bias_N = rows_BK.contiguous(), None if bias_N is None else bias_N.contiguous()
    (B, K), N = rows_BK.shape, weight_NK.shape[0]
    outputs_BN = rows_BK.new_empty(B, N)
    _kernel("multiply", rows_BK.dtype)(
        rows_BK.data_ptr(),
        weight_NK.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        outputs_BN.data_ptr(),
        B,
        K,
        N,
    )
    return outputs_BN


def norm(rows: torch.Tensor, weight_N: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`[..., N]`: rows over the root of their mean square, times the weight."""
    rows, weight_N = rows.contiguous(), weight_N.contiguous()
    outputs, N = torch.empty_like(rows), rows.shape[-1]
    _kernel("norm", rows.dtype)(
        rows.data_ptr(), weight_N.data_ptr(), outputs.data_ptr(), rows.numel() // N, N, epsilon
    )
    return outputs


def rotate(
    heads_BH1D: torch.Tensor, cosines_B1D: torch.Tensor, sines_B1D: torch.Tensor
) -> torch.Tensor:
    """`[B, H, 1, D]`: heads turned by their positions; halves of a head are a plane's two axes."""
    B, H, _, D = heads_BH1D.shape
    if heads_BH1D.stride(3) != 1:
        heads_BH1D = heads_BH1D.contiguous()
    row, head, _, _ = heads_BH1D.stride()
    cosines_B1D, sines_B1D = cosines_B1D.contiguous(), sines_B1D.contiguous()
    outputs_BH1D = heads_BH1D.new_empty(B, H, 1, D)
    _kernel("rotate", heads_BH1D.dtype)(
        heads_BH1D.data_ptr(),
        row,
        head,
        cosines_B1D.data_ptr(),
        sines_B1D.data_ptr(),
        outputs_BH1D.data_ptr(),
        B,
        H,
        D,
    )
    return outputs_BH1D


def gate(gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The gates' silu times the values, all of one shape."""
    gates, values = gates.contiguous(), values.contiguous()
    outputs = torch.empty_like(gates)
    _kernel("gate", gates.dtype)(
        gates.data_ptr(), values.data_ptr(), outputs.data_ptr(), gates.numel()
    )
    return outputs


torch.library.define("cb_rollout::product", "(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.register_fake("cb_rollout::product")
def _shape_of_product(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    return rows_BK.new_empty(rows_BK.shape[0], weight_NK.shape[0])


torch.library.impl("cb_rollout::product", "CPU", product)


@cache
def _kernel(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    kernel = getattr(layers_library(dtype), name)
    kernel.argtypes, kernel.restype = _ARGUMENTS[name], None
    return kernel
