"""The workload `deltas`: the bytes of a weight sync of a pool: whole, as a delta, adapters alone.

SmolLM2-135M-Instruct trains on its own chats by AdamW at a rate of RL, in float32; workers hold the
weights in bfloat16 or in float32.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.chats import chats_of, load
from benchmarks.sizes import Setup
from cb_rollout.integrations.ray.weight_update import (
    DeltaCodec,
    WorkerTensor,
    bytes_of,
    new_values,
    worker_tensors,
)

LEARNING_RATES = (1e-6, 1e-5)
NUM_STEPS, ROWS_PER_STEP = 6, 4
RANK = 16

Stored = list[tuple[WorkerTensor, np.ndarray]]


def bench_deltas(setup: Setup) -> dict[str, Any]:
    """Return the share of changed numbers, and bytes and seconds of deltas."""
    return {
        f"deltas, {name} workers, AdamW at {rate:g}": _figures(setup, dtype, rate)
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
        for rate in LEARNING_RATES
    } | {f"adapters alone, LoRA of rank {RANK} on every linear layer": _adapters(setup)}


def _adapters(setup: Setup) -> dict[str, float]:
    _, model = load(setup.device)
    whole = sum(tensor.num_bytes for tensor in worker_tensors(model))
    config = LoraConfig(r=RANK, target_modules="all-linear")
    adapted = get_peft_model(model.requires_grad_(False), config)
    expected = worker_tensors(model, merges_adapters=False)
    sent = new_values(adapted, expected, merges_adapters=False)
    num_bytes = sum(bytes_of(value, tensor.dtype).nbytes for tensor, value in sent)
    return {"megabytes": num_bytes / 1e6, "percent of whole": 100 * num_bytes / whole}


def _figures(setup: Setup, dtype: torch.dtype, rate: float) -> dict[str, float]:
    tokenizer, model = load(setup.device)
    rows = iter(chats_of(tokenizer, NUM_STEPS * ROWS_PER_STEP))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    # What a worker says of its model.
    expected = [
        WorkerTensor(t.names, t.shape, dtype if t.dtype.is_floating_point else t.dtype, t.is_buffer)
        for t in worker_tensors(model)
    ]
    codec, steps = DeltaCodec(), []
    before = [(t, bytes_of(value, t.dtype)) for t, value in new_values(model, expected)]
    for _ in range(NUM_STEPS):
        for _ in range(ROWS_PER_STEP):
            ids = torch.tensor([next(rows)], device=setup.device)
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = [(t, bytes_of(value, t.dtype)) for t, value in new_values(model, expected)]
        steps.append(_compared(codec, before, after))
        before = after
    # The first step of AdamW moves every weight by the whole rate.
    return {name: statistics.median(step[name] for step in steps[1:]) for name in steps[0]} | {
        "first step, percent of whole": steps[0]["percent of whole"]
    }


def _compared(codec: DeltaCodec, before: Stored, after: Stored) -> dict[str, float]:
    whole = changed = numbers = delta_bytes = 0
    compressing = applying = 0.0
    for (tensor, new), (_, old) in zip(after, before, strict=True):
        size = tensor.dtype.itemsize
        whole, numbers = whole + new.nbytes, numbers + new.nbytes // size
        changed += int((new.reshape(-1, size) != old.reshape(-1, size)).any(1).sum())
        began = time.perf_counter()
        delta = codec.delta(tensor, new, old)
        compressing += time.perf_counter() - began
        began = time.perf_counter()
        bits = codec.changed(tensor, delta)
        result = torch.from_numpy(old) ^ bits
        applying += time.perf_counter() - began
        assert np.array_equal(result.numpy(), new), tensor.names
        delta_bytes += delta.nbytes
    return {
        "percent of numbers that changed": 100 * changed / numbers,
        "whole, megabytes": whole / 1e6,
        "delta, megabytes": delta_bytes / 1e6,
        "percent of whole": 100 * delta_bytes / whole,
        "seconds to compress": compressing,
        "seconds to apply": applying,
    }
