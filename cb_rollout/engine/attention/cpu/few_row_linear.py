"""Compute linear layers of a few rows by a C++ kernel on a CPU, compiled once for this machine.

Owns the choice between the kernel and torch, which computes all that the kernel is not for. Called
by the thread that runs a step.

B: rows, K: inputs of a linear layer, N: its outputs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cb_rollout.compat import inductor
from cb_rollout.compat.torch import multiplies_bfloat16
from cb_rollout.engine.numerics import operators
from cb_rollout.engine.numerics.kernels import multiply, ordered_kernel

# With more rows MKL's product is the faster one (`scripts/bench.py roofline`): with AVX-512 it
# gains more than the kernel does.
MAX_ROWS = 32 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 64

# The same where the CPU itself multiplies bfloat16.
MAX_ROWS_OF_BFLOAT16 = 16

# Numbers of a weight that are widened at once: 16 MiB.
WIDENED_AT_ONCE = 1 << 22


def prepare(dtype: torch.dtype) -> None:
    """Compile the kernel now, not in a rollout; a failure is raised by the kernel's call."""
    with suppress(Exception):
        ordered_kernel(dtype, "multiply")


def linear(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a linear layer, `[B, N]`, by the kernel or by torch, whichever is faster.

    All tensors are on a CPU, in one of `native.library.TYPES`.
    """
    is_half = rows_BK.dtype == torch.bfloat16
    max_rows = MAX_ROWS_OF_BFLOAT16 if is_half and multiplies_bfloat16() else MAX_ROWS
    # Bitwise forwards take the same kernel for any number of rows.
    is_kernels = rows_BK.shape[0] <= max_rows or operators.are_installed()
    if is_kernels and weight_NK.is_contiguous():
        return multiply(rows_BK, weight_NK, bias_N)
    if is_half and not multiplies_bfloat16():
        return widened(rows_BK, weight_NK, bias_N)
    return functional.linear(rows_BK, weight_NK, bias_N)


def widened(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a linear layer in float32, and round once."""
    outputs_BN = rows_BK.new_empty(rows_BK.shape[0], weight_NK.shape[0])
    rows_BK = rows_BK.float()
    size = max(1, WIDENED_AT_ONCE // weight_NK.shape[1])
    for start in range(0, weight_NK.shape[0], size):
        columns = slice(start, start + size)
        bias = None if bias_N is None else bias_N[columns].float()
        outputs_BN[:, columns] = functional.linear(rows_BK, weight_NK[columns].float(), bias)
    return outputs_BN


def replacing_linear(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Have a model's linear layers in `dtype` bfloat16 run here, on a CPU without instructions."""
    if device.type != "cpu" or dtype != torch.bfloat16 or multiplies_bfloat16():
        return nullcontext()
    return _ReplacedLinear()


class _ReplacedLinear(TorchFunctionMode):
    """Compute `functional.linear` in bfloat16 by `linear`, as an operator that a trace may hold."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not functional.linear or kwargs:
            return func(*args, **(kwargs or {}))
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            args = tuple(None if tensor is None else tensor.to(dtype) for tensor in args)
        if any(tensor is not None and tensor.dtype != torch.bfloat16 for tensor in args):
            return func(*args)
        inputs, *rest = args
        rows = inputs.reshape(-1, inputs.shape[-1])
        compute = widened if inductor.compiler_obstacle() else torch.ops.cb_rollout.linear
        outputs = compute(rows, *rest, *[None] * (2 - len(rest)))
        return outputs.view(*inputs.shape[:-1], outputs.shape[-1])


# An operator, so that a traced graph may hold it and inductor compile it.
torch.library.define("cb_rollout::linear", "(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.register_fake("cb_rollout::linear")
def _output_of_linear(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    return rows_BK.new_empty(rows_BK.shape[0], weight_NK.shape[0])


torch.library.impl("cb_rollout::linear", "CPU", linear)
