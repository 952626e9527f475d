"""Where the engine can be watched: the functions behind each word of a profile.

The one file of the bench that knows the engine's inside. A function that is gone fails loudly.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cb_rollout.bench.spans import Seam
from cb_rollout.engine.attention import cpp_layers
from cb_rollout.engine.attention.batched import BatchedAttention
from cb_rollout.engine.attention.cpp_decode import CppReader
from cb_rollout.engine.attention.program import Program
from cb_rollout.engine.cache import PagedLayer
from cb_rollout.engine.core import Engine
from cb_rollout.engine.runner import ModelRunner
from cb_rollout.engine.sampling import TokenGiver
from cb_rollout.engine.steps import Steps
from cb_rollout.loop import EngineLoop

STEP, PREFILL, DECODE, FORWARD = "step", "prefill", "decode", "forward"
ATTENTION, LINEAR = "attention", "linear"
SAMPLING, DELIVERY = "sampling", "delivery"

COARSE = (
    Seam(FORWARD, ModelRunner, "logits"),
    Seam(SAMPLING, TokenGiver, "extend"),
)
# What a step is there for; the rest of it is bookkeeping.

FINE = (
    *COARSE,
    Seam(STEP, Engine, "step"),
    Seam(PREFILL, Steps, "prefill"),
    Seam(DECODE, Steps, "decode"),
    Seam(ATTENTION, BatchedAttention, "__call__"),
    Seam(ATTENTION, CppReader, "attend"),
    Seam(ATTENTION, PagedLayer, "update"),
    Seam(LINEAR, torch.nn.functional, "linear"),
    Seam(LINEAR, cpp_layers, "multiply"),
    Seam(LINEAR, Program, "run_product"),
    Seam(DELIVERY, EngineLoop, "_deliver"),
)


@contextmanager
def operators_called_singly() -> Iterator[None]:
    """Have programs call each operator by itself, so that it can be watched."""
    was, Program.is_watched = Program.is_watched, True
    try:
        yield
    finally:
        Program.is_watched = was
