"""Compiles the C++ beside this file."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from cb_rollout import _compat_cpp

TYPES = {torch.float32: "float", torch.float64: "double"}
# What REAL may be.

TENSOR, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
# Of kernels' arguments; a tensor is where it begins.


@cache
def library(*names: str, **constants: object) -> ctypes.CDLL:
    """What `name.cpp` exports, of each name, where constants have these values; kept for good.

    Raises:
        Exception: what the compiler raises.
    """
    lines = [f"#define {constant} {value}" for constant, value in constants.items()]
    folder = Path(__file__).parent
    files = ("vectors.h", *(f"{name}.cpp" for name in names))
    texts = [(folder / file).read_text() for file in files]
    return _compat_cpp.compiled_library("\n".join([*lines, *texts]))


def layers_library(dtype: torch.dtype) -> ctypes.CDLL:
    """What layers do to a few rows, and what runs a list of that, for numbers of a type.

    Raises:
        Exception: what the compiler raises.
    """
    return library("multiply", "pointwise", "program", REAL=TYPES[dtype])
