"""Compiles the C++ beside this file."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from cb_rollout.compat import inductor

# The values of REAL.
TYPES = {torch.float32: "float", torch.float64: "double"}

# Kinds of a kernel's arguments; a tensor is the address of its first number.
TENSOR, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


@cache
def library(name: str, **constants: object) -> ctypes.CDLL:
    """Compile `name.cpp` with these constants, and load it for good.

    Raises:
        Exception: what the compiler raises.
    """
    lines = [f"#define {constant} {value}" for constant, value in constants.items()]
    folder = Path(__file__).parent
    texts = [(folder / file).read_text() for file in ("vectors.h", f"{name}.cpp")]
    return inductor.compiled_library("\n".join([*lines, *texts]))
