"""What a program is to `program.cpp`, and the function that runs it."""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from cb_rollout.engine.native.library import COUNT, NUMBER, TENSOR, layers_library

NOWHERE = -(2**63)
# The place of a tensor that is not there. Others are a tensor's number, or, below zero, -1 - n:
# behind n numbers of the workspace for each row.


class Kind(IntEnum):
    """What an operator does; as program.cpp has it."""

    PRODUCT = 0
    NORM = 1
    ROTATION = 2
    GATE = 3
    SUM = 4
    SCALING = 5
    NARROWING = 6
    ATTENTION = 7


class Operator(ctypes.Structure):
    """What is done to which numbers."""

    _fields_ = (
        ("kind", COUNT),
        ("given", COUNT * 3),
        ("output", COUNT),
        ("sizes", COUNT * 4),
        ("number", NUMBER),
    )


class Attention(ctypes.Structure):
    """How an operator attends, and where its pages are."""

    _fields_ = (
        ("attend", TENSOR),
        ("keys", TENSOR),
        ("values", TENSOR),
        ("sinks", TENSOR),
        ("num_heads", COUNT),
        ("num_key_heads", COUNT),
        ("key_size", COUNT),
        ("value_size", COUNT),
        ("window", COUNT),
        ("scale", NUMBER),
        ("softcap", NUMBER),
    )


class Rows(ctypes.Structure):
    """Where the rows' keys are in the pages."""

    _fields_ = (
        ("table", TENSOR),
        ("table_width", COUNT),
        ("block_size", COUNT),
        ("slots", TENSOR),
        ("lengths", TENSOR),
    )


@cache
def run_kernel(dtype: torch.dtype) -> Callable[..., Any]:
    """Runs operators on numbers of a type.

    Raises:
        Exception: what the compiler raises.
    """
    kernel = layers_library(dtype).run
    operators, attentions, rows = map(ctypes.POINTER, (Operator, Attention, Rows))
    kernel.argtypes = (
        operators, COUNT, COUNT, ctypes.POINTER(TENSOR), TENSOR, COUNT, attentions, rows
    )  # fmt: skip
    kernel.restype = None
    return kernel
