"""Compile the C++ sources of this folder. Any thread may call."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from cb_rollout.compat import inductor

# The C++ type STORED of each dtype.
TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "Bfloat16"}

# Sources whose results must not depend on the loop that computed them.
ORDERED = ("multiply", "ordered")

# Types of a kernel's arguments; a tensor is passed as the address of its first number.
TENSOR, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


@cache
def library(name: str, **constants: object) -> ctypes.CDLL:
    """Load `name.cpp`, compiled with these constants; once for each process and constants.

    Raises:
        Exception: what the compiler raises.
    """
    lines = [f"#define {constant} {value}" for constant, value in constants.items()]
    folder = Path(__file__).parent
    texts = [(folder / file).read_text() for file in ("vectors.h", "pages.h", f"{name}.cpp")]
    return inductor.compile_library("\n".join([*lines, *texts]), contracts=name not in ORDERED)
