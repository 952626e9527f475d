"""Compile C++ kernels, and call those whose sums have one order: products and attention.

Nothing here chooses between kernels: the same numbers give the same bits for any number of rows,
any padding and any number of threads. Any thread may call.

B: rows or batches, M: rows of a matrix, K: inputs of a product, or heads of keys, N: outputs, H:
query heads, Q: queries, S: keys, D: size of a key, E: size of a value.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cb_rollout.compat import inductor

# Dtypes of the ordered kernels, which compute in float32.
DTYPES = (torch.float32, torch.bfloat16)

# The C++ type STORED of each dtype.
TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "Bfloat16"}

# Types of a kernel's arguments; a tensor is passed as the address of its first number.
TENSOR, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double

_STRIDED = (TENSOR, COUNT, COUNT, COUNT)
_ARGUMENTS = {
    "multiply": (*(TENSOR,) * 4, *(COUNT,) * 3),
    "multiply_batch": (*_STRIDED, TENSOR, COUNT, COUNT, TENSOR, *(COUNT,) * 4),
    "attend_masked": (
        *(_STRIDED * 3),
        *(TENSOR, TENSOR),
        *(COUNT,) * 12,
        *(NUMBER, NUMBER, COUNT, TENSOR),
    ),
    "attend_paged": (TENSOR,),
    "attend": (TENSOR,),
}

# Forms of a mask, as in ordered.cpp.
_NONE, _BOOLEAN, _ADDED = range(3)


def multiply(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a linear layer, `[B, N]`; each output is one sum over the inputs, in one order.

    All tensors are on a CPU, in one of `TYPES`; the weight is contiguous.
    """
    rows_BK, bias_N = rows_BK.contiguous(), None if bias_N is None else bias_N.contiguous()
    (B, K), N = rows_BK.shape, weight_NK.shape[0]
    outputs_BN = rows_BK.new_empty(B, N)
    kernel("multiply", rows_BK.dtype)(
        rows_BK.data_ptr(),
        weight_NK.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        outputs_BN.data_ptr(),
        *(B, K, N),
    )
    return outputs_BN


def multiply_batch(left_BMK: torch.Tensor, right_BKN: torch.Tensor) -> torch.Tensor:
    """Multiply matrices, `[B, M, N]`: each output is one chain over K, which zeros do not change.

    Both are on a CPU, in one of `DTYPES`; the right one is copied if its last stride is not 1.
    """
    (B, M, K), N = left_BMK.shape, right_BKN.shape[2]
    if right_BKN.stride(2) != 1:
        right_BKN = right_BKN.contiguous()
    outputs_BMN = left_BMK.new_empty(B, M, N)
    kernel("multiply_batch", left_BMK.dtype)(
        left_BMK.data_ptr(),
        *left_BMK.stride(),
        right_BKN.data_ptr(),
        *right_BKN.stride()[:2],
        outputs_BMN.data_ptr(),
        *(B, M, K, N),
    )
    return outputs_BMN


def attend(
    query_BHQD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSE: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    is_causal: bool = False,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with every query to the keys that its mask leaves, in their order.

    Args:
        query_BHQD: on a CPU, in one of `DTYPES`, as all three states.
        key_BKSD: H is a multiple of K.
        value_BKSE: as the keys.
        mask: broadcast to `[B, H, Q, S]`: bool, True where a key is seen, or numbers to add; None:
            all keys are seen.
        scale: multiplies the scores.
        is_causal: the last query sees all keys, and each one before sees one less.
        softcap: bounds the scores; None: does not.
        sinks_H: a score for each head that takes its share and gives no value; None: none.

    Returns:
        `[B, Q, H, E]`, zeros where a query sees no key.
    """
    B, H, Q, D = query_BHQD.shape
    _, K, S, E = value_BKSE.shape
    states = [*map(with_unit_stride, (query_BHQD, key_BKSD, value_BKSE))]
    outputs_BQHE = query_BHQD.new_empty(B, Q, H, E)
    form, strides = _NONE, (0, 0, 0, 0)
    if mask is not None:
        form = _BOOLEAN if mask.dtype == torch.bool else _ADDED
        mask = (mask if form == _BOOLEAN else mask.to(query_BHQD.dtype)).expand(B, H, Q, S)
        strides = mask.stride()
    sinks_H = None if sinks_H is None else sinks_H.to(query_BHQD.dtype).contiguous()
    kernel("attend_masked", query_BHQD.dtype)(
        *(n for x in states for n in (x.data_ptr(), *x.stride()[:3])),
        outputs_BQHE.data_ptr(),
        None if mask is None else mask.data_ptr(),
        form,
        *strides,
        *(B, H, K, Q, S, D, E),
        *(scale, softcap or 0.0, is_causal),
        None if sinks_H is None else sinks_H.data_ptr(),
    )
    return outputs_BQHE


def with_unit_stride(states: torch.Tensor) -> torch.Tensor:
    """Return states whose last stride is 1, copied if needed."""
    return states if states.stride(-1) == 1 else states.contiguous()


@cache
def kernel(name: str, dtype: torch.dtype, **sizes: int) -> Callable[..., Any]:
    """Compile a kernel of `native/`, once per machine.

    `sizes`: constants of the source, by which the compiler unrolls loops.

    Raises:
        Exception: what the compiler raises.
    """
    source = name if name in ("multiply", "attend") else "ordered"
    constants = {"STORED": TYPES[dtype], **sizes}
    lines = [f"#define {constant} {value}" for constant, value in constants.items()]
    folder = Path(__file__).parent / "native"
    texts = [(folder / file).read_text() for file in ("vectors.h", "pages.h", f"{source}.cpp")]
    # Results of the others must not depend on the loop that computed them.
    contracts = source == "attend"
    library = inductor.compile_library("\n".join([*lines, *texts]), contracts=contracts)
    function = getattr(library, name)
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return function
