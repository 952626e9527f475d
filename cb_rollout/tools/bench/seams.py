"""Where the engine can be watched: the functions behind each word of a profile.

The one file of the bench that knows the engine's inside. A function that is gone fails loudly.
"""

import torch

from cb_rollout.engine.attention.cpu import few_row_linear
from cb_rollout.engine.attention.cpu.attention import CpuPagedAttention
from cb_rollout.engine.attention.gathered import BatchedAttention
from cb_rollout.engine.core import Engine
from cb_rollout.engine.executor import Steps
from cb_rollout.engine.kv_cache.paged import PagedLayer
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.sampling.sampler import TokenSampler
from cb_rollout.engine.service.loop import EngineLoop
from cb_rollout.tools.bench.spans import Seam

STEP, PREFILL, DECODE, FORWARD = "step", "prefill", "decode", "forward"
ATTENTION, LINEAR = "attention", "linear"
SAMPLING, DELIVERY = "sampling", "delivery"

COARSE = (
    Seam(FORWARD, ModelRunner, "logits"),
    Seam(SAMPLING, TokenSampler, "extend"),
)
# What a step is there for; the rest of it is bookkeeping.

FINE = (
    *COARSE,
    Seam(STEP, Engine, "step"),
    Seam(PREFILL, Steps, "prefill"),
    Seam(DECODE, Steps, "decode"),
    Seam(ATTENTION, BatchedAttention, "__call__"),
    Seam(ATTENTION, CpuPagedAttention, "attend"),
    Seam(ATTENTION, PagedLayer, "update"),
    Seam(LINEAR, torch.nn.functional, "linear"),
    Seam(LINEAR, few_row_linear, "multiply"),
    Seam(DELIVERY, EngineLoop, "_deliver"),
)
