"""The attention of decode steps alone: no model is made, and nothing but Triton compiles.

B: rows, H: query heads, D: size of a key.
"""

import statistics
from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from cb_rollout.engine.attention.decode_cache import AttentionSpec, DecodeLayer
from cb_rollout.engine.attention.shared_prefix import (
    AttentionMetadata,
    is_cut,
    max_stretches,
)
from cb_rollout.engine.cuda_graphs import graphs
from cb_rollout.engine.cuda_graphs.capture import Replay
from cb_rollout.engine.kv_cache.layout import LayerSpec, TensorSpec
from cb_rollout.tools.bench import timed

# Stages of the loop over keys. Triton compiles four as three.
STAGES = (2, 3, 5)

# Rows of a step, and tokens of each.
STEPS = ((1, 8000), (8, 2000), (8, 8000), (256, 512))

# More than one, so that keys come from memory and not from the cache of the step before.
LAYERS = 8

DTYPE, BLOCK_SIZE, REPLAYS = torch.bfloat16, 32, 20

# The fewest tokens of a page that PyTorch's FlashAttention 2 takes.
VARLEN_BLOCK_SIZE = 256


def bench_stages(
    name: str,
    shape: dict[str, Any],
    device: str,
    peak: float,
    steps: tuple[tuple[int, int], ...] = STEPS,
) -> Iterator[dict[str, Any]]:
    """Time the attention of a few layers by the stages of its loop over keys."""
    from cb_rollout.engine.attention.triton import launch

    chosen = launch.num_stages
    per_token = 2 * DTYPE.itemsize * shape["num_key_value_heads"] * shape["head_dim"]
    for rows, tokens in steps:
        step = _Step(shape, rows, tokens, torch.device(device))
        for stages in STAGES:
            launch.num_stages = lambda *_, stages=stages, **__: stages
            try:
                seconds = step.seconds()
            finally:
                launch.num_stages = chosen
            yield {
                "what": f"{name} attention, {rows} x {tokens} tokens, {stages} stages",
                "ms": 1000 * seconds,
                "share_of_bandwidth": LAYERS * rows * tokens * per_token / seconds / peak,
            }
        what = f"{name} attention, {rows} x {tokens} tokens, PyTorch's varlen_attn"
        if (obstacle := _varlen_obstacle()) is not None:
            yield {"what": what, "note": obstacle}
            continue
        seconds = _VarlenStep(shape, rows, tokens, torch.device(device)).seconds()
        share = LAYERS * rows * tokens * per_token / seconds / peak
        yield {"what": what, "ms": 1000 * seconds, "share_of_bandwidth": share}


def _varlen_obstacle() -> str | None:
    """Return why PyTorch's kernel reads no pages; None: it reads them, from torch 2.12 on."""
    if "block_table" in signature(varlen_attn).parameters:
        return None
    return f"torch {torch.__version__} has no block table"


class _Step:
    """The attention of `LAYERS` layers over random pages, which lie in a random order."""

    def __init__(self, shape: dict[str, Any], rows: int, tokens: int, device: torch.device) -> None:
        self._device = device
        key_heads, size = shape["num_key_value_heads"], shape["head_dim"]
        num_processors, width = 1, -(-tokens // BLOCK_SIZE)
        if device.type == "cuda":
            num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._table = torch.randperm(rows * width, device=device).view(rows, width)
        state = TensorSpec((key_heads, size), DTYPE)
        self._layers = [
            DecodeLayer(index, LayerSpec(state, state), device) for index in range(LAYERS)
        ]
        slots = rows * width * BLOCK_SIZE
        self._pages = [
            torch.randn(slots, key_heads * size, dtype=DTYPE, device=device)
            for _ in range(2 * LAYERS)
        ]
        heads = shape["num_attention_heads"]
        self._queries_BHD = torch.randn(rows, heads, size, dtype=DTYPE, device=device)
        self._spec = AttentionSpec(size**-0.5)
        stretches = max_stretches(key_heads, num_processors)
        addresses = [self._table.data_ptr(), width, *(page.data_ptr() for page in self._pages)]
        self._metadata = AttentionMetadata(
            torch.tensor(addresses, device=device),
            BLOCK_SIZE,
            torch.arange(rows, dtype=torch.int32, device=device),
            torch.full((rows,), tokens, dtype=torch.int32, device=device),
            stretches if is_cut([tokens] * rows, stretches) else 0,
        )

    def seconds(self) -> float:
        """Return the seconds of all layers, under a CUDA graph."""
        return _seconds(self._attend, self._device)

    def _attend(self) -> torch.Tensor:
        from cb_rollout.engine.attention.triton.launch import attend, cut

        work = cut(self._metadata, None) if self._metadata.num_stretches else None
        outputs = [
            attend(self._queries_BHD, layer, self._metadata, self._spec, work)
            for layer in self._layers
        ]
        return outputs[-1]


class _VarlenStep:
    """The same attention by PyTorch's own kernel, in one split: several give wrong results."""

    def __init__(self, shape: dict[str, Any], rows: int, tokens: int, device: torch.device) -> None:
        self._device, self._tokens = device, tokens
        heads, key_heads, size = (
            shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        width = -(-tokens // VARLEN_BLOCK_SIZE)
        order = torch.randperm(rows * width, dtype=torch.int32, device=device)
        self._table = order.view(rows, width)
        self._pages = [
            torch.randn(
                rows * width, VARLEN_BLOCK_SIZE, key_heads, size, dtype=DTYPE, device=device
            )
            for _ in range(2 * LAYERS)
        ]
        self._queries_BHD = torch.randn(rows, heads, size, dtype=DTYPE, device=device)
        self._ends = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._lengths_B = torch.full((rows,), tokens, dtype=torch.int32, device=device)

    def seconds(self) -> float:
        """Return the seconds of all layers, under a CUDA graph."""
        return _seconds(self._attend, self._device)

    def _attend(self) -> torch.Tensor:
        outputs: list[Any] = [
            varlen_attn(
                self._queries_BHD,
                keys,
                values,
                self._ends,
                self._ends * self._tokens,
                1,
                self._tokens,
                window_size=(-1, 0),
                enable_gqa=True,
                seqused_k=self._lengths_B,
                block_table=self._table,
                num_splits=1,
            )
            for keys, values in zip(self._pages[::2], self._pages[1::2], strict=True)
        ]
        return outputs[-1]


def _seconds(attend: Replay, device: torch.device) -> float:
    replay = graphs.CudaCapture(device)(attend)
    replay()
    many = [timed(lambda: [replay() for _ in range(REPLAYS)]) for _ in range(3)]
    return statistics.median(many) / REPLAYS
