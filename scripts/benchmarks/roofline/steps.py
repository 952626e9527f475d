"""Trace one decode step and one prefill: of the engine, and of transformers.

The engine's own code runs, on tensors without contents: `GraphedDecoding` captures a step, and the
capture is recorded. All layers of a model are alike, so one and two layers are traced, and the
others follow.

B: rows, S: tokens of a row, V: vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import DynamicCache

from benchmarks.roofline.kernel_recorder import Kernel, KernelRecorder, Reads
from benchmarks.roofline.tensors import DEVICE, CudaTensors
from cb_rollout.config.enums import LogprobsMode
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.attention.traced_forward import TracedForward
from cb_rollout.engine.attention.triton.backend import LEAST_CAPABILITY, TritonBackend
from cb_rollout.engine.cuda_graphs.graphs import (
    GraphedDecoding,
    Replay,
)
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.draw import create_sampling_batch, sample
from cb_rollout.tools.bench import create_model

Shape = dict[str, Any]

# Sampling parameters of which a step's cost is listed, by their names.
PLAIN, TOP_P = "plain", "top-p"
SAMPLED = {
    PLAIN: SamplingParams(),
    "top-k": SamplingParams(top_k=20),
    TOP_P: SamplingParams(top_p=0.95),
    "min-p": SamplingParams(min_p=0.05),
    "top-k, top-p and min-p": SamplingParams(top_k=20, top_p=0.95, min_p=0.05),
}


class Rows(NamedTuple):
    """The rows of a step; prompts of one length each, and none of them shared."""

    num_rows: int
    num_tokens: int
    """Tokens of a row, the newest included."""

    def __str__(self) -> str:
        return f"{self.num_rows:,} x {self.num_tokens:,}"


@dataclass(frozen=True)
class Step:
    """The kernels of one step."""

    graphed: Counter[Kernel] = field(default_factory=Counter)
    """Launched by one replay of a CUDA graph."""
    eager: Counter[Kernel] = field(default_factory=Counter)
    """Launched one by one."""
    num_waits: int = 0
    """Times that the host waits for the device, besides reading the step's results."""

    @property
    def num_launches(self) -> int:
        """Return the number of kernels and copies."""
        return self.graphed.total() + self.eager.total()

    @property
    def num_bytes(self) -> int:
        """Return the bytes that all kernels read and write."""
        return sum(n * kernel.num_bytes for kernel, n in self.kernels.items())

    @property
    def kernels(self) -> Counter[Kernel]:
        """Return all kernels."""
        return self.graphed + self.eager

    def plus(self, other: "Step", times: int = 1) -> "Step":
        """Return this step's kernels and those of `times` others; negative: without them."""

        def added(mine: Counter[Kernel], others: Counter[Kernel]) -> Counter[Kernel]:
            total = Counter(mine)
            for kernel, count in others.items():
                total[kernel] += times * count
            assert min(total.values(), default=0) >= 0, "a layer's kernels differ between layers"
            return +total

        return Step(
            added(self.graphed, other.graphed),
            added(self.eager, other.eager),
            self.num_waits + times * other.num_waits,
        )


class Traced(NamedTuple):
    """A step of a whole model, and the part of one layer."""

    step: Step
    layer: Step
    num_layers: int


# Traces a step of a model with so many layers.
Trace = Callable[[int], Step]


def of_all_layers(trace: Trace, num_layers: int) -> Traced:
    """Return the step of a model of `num_layers` like layers, from traces of one and of two."""
    one = trace(1)
    layer = trace(2).plus(one, -1)
    return Traced(one.plus(layer, num_layers - 1), layer, num_layers)


@contextmanager
def on_card(num_processors: int) -> Iterator[None]:
    """Have torch describe a card with so many streaming multiprocessors, and make its tensors."""
    properties = SimpleNamespace(multi_processor_count=num_processors, major=9, minor=0)
    with (
        CudaTensors(),
        patch.object(torch.cuda, "get_device_capability", lambda *_: max(LEAST_CAPABILITY, (9, 0))),
        patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        torch.no_grad(),
    ):
        yield


@cache
def _meta_model(shape: tuple[tuple[str, Any], ...], num_layers: int) -> Any:
    return create_model(dict(shape), "meta", num_hidden_layers=num_layers)


def _model(shape: Shape, num_layers: int) -> Any:
    return _meta_model(tuple(shape.items()), num_layers).to(DEVICE)


def _runner(shape: Shape, num_layers: int) -> tuple[ModelRunner, TritonBackend, PagedCache]:
    runner = ModelRunner(_model(shape, num_layers), None)
    layout = runner.probe()
    backend = TritonBackend(layout, runner.device)
    runner.use(replace(runner.execution, attention_backend=backend))
    cache = PagedCache(layout, num_blocks=1, block_size=BLOCK_SIZE, num_table_rows=1, device=DEVICE)
    return runner, backend, cache


BLOCK_SIZE = RolloutConfig().block_size


# Returns what takes the place of a model's forward of so many layers, and reports to a recorder.
Replacement = Callable[[KernelRecorder, int], TracedForward]


def engine_layout(shape: Shape, num_layers: int) -> CacheLayout:
    """Return the cache layout of a model."""
    with on_card(1):
        return ModelRunner(_model(shape, num_layers), None).probe()


def engine_decode(
    shape: Shape,
    rows: Rows,
    num_processors: int,
    num_layers: int,
    params: SamplingParams = SAMPLED[PLAIN],
    *,
    replace: Replacement | None = None,
) -> Step:
    """Trace a decode step of the engine under CUDA graphs.

    Args:
        shape: arguments of `AutoConfig.for_model`.
        rows: the sequences.
        num_processors: streaming multiprocessors of the card, which decide how keys are split.
        num_layers: layers of the model.
        params: of every sequence.
        replace: runs in place of the model's own forward; None: that runs.
    """
    recorder = KernelRecorder(reads=_reads(rows, shape["vocab_size"], params))

    def capture(step: Replay) -> Replay:
        with recorder.recording():
            result = step()
        return lambda: result

    with on_card(num_processors):
        runner, backend, _ = _runner(shape, num_layers)
        if replace is not None:
            backend.traced_forward = replace(recorder, num_layers)
        graphs = GraphedDecoding(
            runner, backend, rows.num_rows, capture=capture, row_interval=rows.num_rows
        )
        key = graphs.key_of([rows.num_tokens] * rows.num_rows, has_shared=False)
        graphs.add(key, BLOCK_SIZE)
        assert params.can_be_graphed
        return Step(graphed=recorder.kernels, num_waits=recorder.num_waits)


def _reads(rows: Rows, vocab_size: int, params: SamplingParams) -> Reads:
    """Return what the kernels of a step read; of truncation, as if it skipped no part."""
    from cb_rollout.engine.cuda_graphs.sampling_kernels import CHUNK, NUM_DIGITS

    num_passes = NUM_DIGITS.value * bool(params.top_k)
    num_passes += (NUM_DIGITS.value + 1) * (params.top_p < 1) + params.is_truncated
    num_parts = -(-vocab_size // CHUNK)
    parts = {
        "measure_kernel": num_parts,
        "truncate_kernel": num_passes * num_parts,
        "draw_kernel": 1,
    }
    return Reads(rows.num_tokens, parts)


def _requests(rows: Rows, params: SamplingParams) -> list[Request]:
    """Return sequences of these lengths, with blocks of their own."""
    prompt, num_blocks = [0] * rows.num_tokens, -(-rows.num_tokens // BLOCK_SIZE)
    requests = [
        Request(str(row), prompt, params, 2, frozenset(), row) for row in range(rows.num_rows)
    ]
    for row, request in enumerate(requests):
        request.block_ids = list(range(row * num_blocks, (row + 1) * num_blocks))
    return requests


def _sampling(logits_BV: torch.Tensor, rows: Rows, params: SamplingParams) -> Step:
    """Trace the sampling of one token of each row, outside a graph."""
    requests = _requests(rows, params)
    batch = create_sampling_batch(requests, DEVICE)
    indices_B = torch.zeros(len(requests), dtype=torch.int64, device=DEVICE)
    # False: the candidates of the truncation were enough.
    recorder = KernelRecorder(answer=False)
    with recorder.recording():
        sample(logits_BV, batch, indices_B, LogprobsMode.POLICY)
    return Step(eager=recorder.kernels, num_waits=recorder.num_waits)


def engine_prefill(shape: Shape, rows: Rows, num_layers: int) -> Step:
    """Trace a prefill of whole prompts by the engine, with the first tokens sampled."""
    with on_card(1):
        runner, _, cache = _runner(shape, num_layers)
        count = rows.num_rows
        table = BlockTable(count, BLOCK_SIZE, DEVICE)
        recorder = KernelRecorder()
        with recorder.recording():
            tokens, lengths = [[0] * rows.num_tokens] * count, [rows.num_tokens] * count
            logits_BV = runner.logits(ForwardBatch(tokens, lengths, range(count), cache, table))
        step = Step(eager=recorder.kernels, num_waits=recorder.num_waits)
        return step.plus(_sampling(logits_BV, rows, SAMPLED[PLAIN]))


def transformers_decode(shape: Shape, rows: Rows, num_layers: int) -> Step:
    """Trace a decode step of the model's own forward, with a `DynamicCache` and sdpa."""
    with on_card(1):
        model, cache = _model(shape, num_layers), DynamicCache()
        config = model.config
        past = (
            *(rows.num_rows, config.num_key_value_heads),
            *(rows.num_tokens - 1, config.head_dim),
        )
        for layer in range(num_layers):
            keys, values = (torch.empty(past, dtype=model.dtype, device=DEVICE) for _ in range(2))
            cache.update(keys, values, layer)
        ids_B1 = torch.zeros(rows.num_rows, 1, dtype=torch.int64, device=DEVICE)
        return _transformers_step(model, ids_B1, cache)


def transformers_prefill(shape: Shape, rows: Rows, num_layers: int) -> Step:
    """Trace a prefill of whole prompts by the model's own forward, with sdpa."""
    with on_card(1):
        ids_BS = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        return _transformers_step(_model(shape, num_layers), ids_BS, DynamicCache())


def _transformers_step(model: Any, ids: torch.Tensor, cache: DynamicCache) -> Step:
    """Trace a forward, and sampling as `generate` does it, without log-probabilities."""
    recorder = KernelRecorder()
    with recorder.recording():
        outputs = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        scores_BV = outputs.logits[:, -1].float()
        torch.multinomial(scores_BV.softmax(-1), num_samples=1)
    return Step(eager=recorder.kernels, num_waits=recorder.num_waits)
