"""Describe the arguments of the C++ kernels for ctypes.

It does not import torch, so a child process that tries a kernel starts at once.

B: rows.
"""

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

# Types of a kernel's arguments; a tensor is passed as the address of its first number.
TENSOR = ctypes.c_void_p
COUNT = ctypes.c_int64
NUMBER = ctypes.c_double

# A tensor and its first three strides.
STRIDED = [TENSOR, COUNT, COUNT, COUNT]

# Types of each kernel's arguments, in the order of its C++ function.
ARGUMENTS: dict[str, list[Any]] = {
    # Rows, weight, bias and outputs; then their sizes.
    "multiply": [TENSOR, TENSOR, TENSOR, TENSOR] + [COUNT] * 3,
    # A struct of arguments.
    "multiply_many": [TENSOR],
    # The left matrices, the right ones with two strides, outputs; then their sizes.
    "multiply_batch": STRIDED + [TENSOR, COUNT, COUNT] + [TENSOR] + [COUNT] * 4,
    # Queries, keys, values; outputs; the mask, its form and strides; sizes; scale, softcap,
    # whether it is causal, and sinks.
    "attend_masked": STRIDED * 3
    + [TENSOR]
    + [TENSOR, COUNT, COUNT, COUNT, COUNT, COUNT]
    + [COUNT] * 7
    + [NUMBER, NUMBER, COUNT, TENSOR],
    # A struct of arguments.
    "attend_paged": [TENSOR],
    "attend": [TENSOR],
}


class Products(ctypes.Structure):
    """`Products` of multiply_many.cpp: products of the same rows with several weights.

    Rows, `[B, K]`, biases and outputs, `[B, sum of N]`, are in the kernel's dtype; the weights,
    `[N, K]`, too, or in float32 if it rounds them. `weights` and `biases` are arrays of addresses;
    `biases` may be null. `sizes` has the N of each weight. `allows_tiles` is 1, or 0 to multiply
    without AMX.
    """

    _fields_: ClassVar = [
        ("rows", TENSOR),
        ("outputs", TENSOR),
        ("weights", ctypes.POINTER(TENSOR)),
        ("biases", ctypes.POINTER(TENSOR)),
        ("sizes", ctypes.POINTER(COUNT)),
        ("num_weights", COUNT),
        ("num_rows", COUNT),
        ("num_inputs", COUNT),
        ("allows_tiles", COUNT),
    ]


class States(ctypes.Structure):
    """`States` of pages.h: queries, keys or values of the new tokens, strides in numbers."""

    _fields_: ClassVar = [
        ("first", TENSOR),
        ("row_stride", COUNT),
        ("head_stride", COUNT),
        ("stride", COUNT),
    ]

    @classmethod
    def of(cls, tensor: "torch.Tensor") -> "States":
        """Point to a tensor of `[B, heads, 1, size]`."""
        row_stride, head_stride, _, stride = tensor.stride()
        return cls(
            first=tensor.data_ptr(), row_stride=row_stride, head_stride=head_stride, stride=stride
        )


class Step(ctypes.Structure):
    """`Step` of pages.h: a decode step over pages.

    A window, a softcap or sinks of 0 mean none.
    """

    _fields_: ClassVar = [
        ("queries", States),
        ("new_keys", States),
        ("new_values", States),
        ("outputs", TENSOR),
        ("keys", TENSOR),
        ("values", TENSOR),
        ("table", TENSOR),
        ("table_width", COUNT),
        ("block_size", COUNT),
        ("table_rows", TENSOR),
        ("lengths", TENSOR),
        ("num_rows", COUNT),
        ("num_heads", COUNT),
        ("num_key_heads", COUNT),
        ("key_size", COUNT),
        ("value_size", COUNT),
        ("scale", NUMBER),
        ("softcap", NUMBER),
        ("window", COUNT),
        ("sinks", TENSOR),
    ]
