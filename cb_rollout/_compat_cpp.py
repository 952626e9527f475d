"""Reaches past torch's public API for its way to compile C++ for this machine.

`torch.utils.cpp_extension` wants ninja, Python's headers and torch's own. What inductor compiles
its kernels with (torch 2.11 to 2.13) knows the compiler, the flags of the CPU and the OpenMP that
torch computes with, and keeps what it made on disk for the next process.
"""

import ctypes

from torch._inductor import cpp_builder
from torch._inductor.codecache import CppCodeCache

FUSED = "-ffp-contract=fast"
# Multiplies and adds in one instruction, which inductor forbids its own kernels.


def compiler_obstacle() -> str | None:
    """Why nothing can be compiled for a CPU; None: it can."""
    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:  # noqa: BLE001  what it raises is the answer
        return str(error)
    return None


def compiled_library(source: str) -> ctypes.CDLL:
    """What C++ source exports, compiled now or by an earlier process.

    Raises:
        Exception: what the compiler raises.
    """
    return CppCodeCache.load(source, extra_flags=(FUSED,))
