"""Compute a model's linear layers on a CPU, by the kernel that is fastest for the number of rows.

The C++ kernels read the weights as they are, so a changed weight needs no preparation. With more
rows than they are made for, and where they cannot be compiled, torch computes the layers. Called by
the thread that runs a forward.

B: rows, K: inputs of a linear layer, N: its outputs.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cb_rollout.compat import inductor
from cb_rollout.compat.torch import multiplies_bfloat16
from cb_rollout.engine.numerics import operators
from cb_rollout.engine.numerics.kernels import (
    TYPES,
    kernel,
    multiply,
    multiply_many,
    rounding_of,
)
from cb_rollout.engine.numerics.qualification.qualifier import UnprovedError
from cb_rollout.errors import error_text

# Up to this many rows `multiply` is faster: its vectors hold inputs of one row.
FEW_ROWS = 8

# With more rows torch is as fast: 209 ms with 128 rows of SmolLM2's layers, `multiply_many` 221.
MOST_ROWS = 128

_LOGGER = logging.getLogger(__name__)


def linear(
    rows_BK: torch.Tensor,
    weights_NK: Sequence[torch.Tensor],
    biases_N: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Compute linear layers of the same rows in the way that is fastest for the number of rows.

    Results of bfloat16 are summed in float32 and rounded once.

    Args:
        rows_BK: `[B, K]`, on a CPU.
        weights_NK: `[N, K]` each, with the same K; rounded to the dtype of the rows if in another.
        biases_N: `[N]`, one per weight, or none.

    Returns:
        The outputs of all layers, one after the other: `[B, sum of N]`.
    """
    dtype = rows_BK.dtype
    num_rows = rows_BK.shape[0]
    tensors = (*weights_NK, *biases_N)
    is_plain = all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)
    if operators.are_installed():
        # Bitwise forwards take one kernel for any number of rows, also in torch's place.
        layer = multiply if is_plain else _multiply_by_torch
        return _each(layer, rows_BK, weights_NK, biases_N)
    if is_plain and num_rows <= FEW_ROWS and has_kernel(dtype):
        return _each(multiply, rows_BK, weights_NK, biases_N)
    if num_rows <= MOST_ROWS and _can_multiply_many(dtype, weights_NK):
        return multiply_many(rows_BK, weights_NK, [bias.to(dtype) for bias in biases_N])
    return _each(_multiply_by_torch, rows_BK, weights_NK, biases_N)


def _can_multiply_many(dtype: torch.dtype, weights_NK: Sequence[torch.Tensor]) -> bool:
    """Return whether `multiply_many` takes these weights for rows of `dtype`."""
    weight_dtype = weights_NK[0].dtype
    for weight_NK in weights_NK:
        if weight_NK.dtype != weight_dtype or not weight_NK.is_contiguous():
            return False
    is_rounded = dtype == torch.bfloat16 and weight_dtype == torch.float32
    if weight_dtype != dtype and not is_rounded:
        return False
    return has_kernel(dtype, "multiply_many", **rounding_of(dtype, weight_dtype))


def _multiply_by_torch(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """Compute one layer, `[B, N]`, by torch."""
    dtype = rows_BK.dtype
    # Without bfloat16 instructions, torch multiplies float32 faster.
    product_dtype = dtype
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        product_dtype = torch.float32
    rows_BK = rows_BK.to(product_dtype)
    weight_NK = weight_NK.to(dtype).to(product_dtype)
    if bias_N is not None:
        bias_N = bias_N.to(dtype).to(product_dtype)
    return functional.linear(rows_BK, weight_NK, bias_N).to(dtype)


def _each(
    layer: Callable[..., torch.Tensor],
    rows_BK: torch.Tensor,
    weights_NK: Sequence[torch.Tensor],
    biases_N: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Compute layers one by one; return as `linear`."""
    pairs = zip(weights_NK, biases_N or [None] * len(weights_NK), strict=True)
    outputs_BN = [layer(rows_BK, weight_NK, bias_N) for weight_NK, bias_N in pairs]
    return outputs_BN[0] if len(outputs_BN) == 1 else torch.cat(outputs_BN, dim=1)


@cache
def has_kernel(dtype: torch.dtype, name: str = "multiply", **constants: int) -> bool:
    """Return whether there is a kernel of products, which the first call compiles.

    Args:
        dtype: of the rows.
        name: "multiply", for few rows, or "multiply_many".
        constants: of its source.
    """
    if dtype not in TYPES or inductor.compiler_obstacle():
        return False
    try:
        kernel(name, dtype, **constants)
    except UnprovedError:
        # This was logged already.
        return False
    except Exception as error:  # noqa: BLE001  torch computes the same
        _LOGGER.warning("linear layers run without the kernel %s: %s", name, error_text(error))
        return False
    return True


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile the kernels for weights of `dtype` now, not during a rollout."""
    for name in ("multiply", "multiply_many"):
        has_kernel(dtype, name)


def replacing_linear(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Compute a model's linear layers of `dtype` by `linear`, in this thread."""
    return _ReplacedLinear(dtype) if dtype in (torch.float32, torch.bfloat16) else nullcontext()


class _ReplacedLinear(TorchFunctionMode):
    """Compute `functional.linear` by `linear`, as an operator that a trace may hold."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not functional.linear or kwargs:
            return func(*args, **(kwargs or {}))
        inputs, weight, *rest = args
        bias = rest[0] if rest else None
        tensors = [inputs, weight] if bias is None else [inputs, weight, bias]
        if torch.is_autocast_enabled("cpu"):
            # Autocast leaves float64 alone.
            is_cast = all(x.dtype.is_floating_point and x.dtype.itemsize <= 4 for x in tensors)
            is_ours = is_cast and self._dtype == torch.get_autocast_dtype("cpu")
        else:
            is_ours = all(x.dtype == self._dtype for x in tensors)
        # Torch answers for what does not fit together.
        fits = weight.dim() == 2 and inputs.shape[-1:] == weight.shape[1:]
        if bias is not None:
            fits = fits and bias.shape == weight.shape[:1]
        if not (is_ours and fits):
            return func(*args)
        rows = inputs.to(self._dtype).reshape(-1, inputs.shape[-1])
        outputs = torch.ops.cb_rollout.linear(rows, [weight], [] if bias is None else [bias])
        return outputs.view(*inputs.shape[:-1], outputs.shape[-1])


# An operator, so that a traced graph may hold it and inductor compile it.
torch.library.define(
    "cb_rollout::linear", "(Tensor rows, Tensor[] weights, Tensor[] biases) -> Tensor"
)


@torch.library.register_fake("cb_rollout::linear")
def _output_of_linear(
    rows_BK: torch.Tensor, weights_NK: Sequence[torch.Tensor], biases_N: Sequence[torch.Tensor]
) -> torch.Tensor:
    return rows_BK.new_empty(rows_BK.shape[0], sum(weight.shape[0] for weight in weights_NK))


torch.library.impl("cb_rollout::linear", "CPU", linear)
