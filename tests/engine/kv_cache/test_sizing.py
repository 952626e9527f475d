"""The workspace that is planned holds what prefills of continuations gather.

B: rows, S: tokens of the longest row, H: query heads, K: key heads, D: size of a head.
"""

import pytest
import torch
from fake_model import request_of
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.sizes import QWEN3
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.kv_cache.sizing import gathered_bytes_per_token, workspace_bytes_per_request
from cb_rollout.engine.memory.plan import GIB, MemoryModel, TrainingBytes, create_memory_plan
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Limits, Prefill
from cb_rollout.engine.scheduler.scheduler import MAX_GATHER_RATIO, Scheduler
from cb_rollout.metrics.registry import EngineCounters

CPU = torch.device("cpu")
SHAPE = QWEN3["8B"]
MAX_BATCH_TOKENS = 8192


@pytest.fixture(scope="module")
def plan():
    """Plan an 80 GiB card that holds the weights of the 8B shape, in bfloat16."""
    keys = TensorSpec((SHAPE["num_key_value_heads"], SHAPE["head_dim"]), torch.bfloat16)
    layout = CacheLayout((LayerSpec(keys, keys),) * SHAPE["num_hidden_layers"])
    num_heads = SHAPE["num_attention_heads"]
    model = MemoryModel(
        total_bytes=80 * GIB,
        free_bytes=62 * GIB,
        training=TrainingBytes(),
        max_memory_percent=RolloutConfig.max_memory_percent,
        block_size=RolloutConfig.block_size,
        max_requests=256,
        max_batch_tokens=MAX_BATCH_TOKENS,
        bytes_per_token=layout.bytes_per_token,
        bytes_per_sequence=layout.bytes_per_sequence,
        workspace_bytes_per_request=workspace_bytes_per_request(SHAPE["vocab_size"]),
        gathered_bytes_per_token=gathered_bytes_per_token(layout, num_heads, torch.bfloat16),
        history_factor=MAX_GATHER_RATIO,
        max_sequence_tokens=SHAPE["max_position_embeddings"],
    )
    return create_memory_plan(model)


def gathered_bytes(num_tokens):
    """Bytes of a layer's keys and values, and of both repeated for every query head."""
    K, H, D = (SHAPE[name] for name in ("num_key_value_heads", "num_attention_heads", "head_dim"))
    return num_tokens * 2 * (K + H) * D * torch.bfloat16.itemsize


def scheduled(rows, is_packed):
    """The first prefill of rows of cached and new tokens: how many rows, and tokens gathered."""
    limits = Limits(32, MAX_BATCH_TOKENS, 256, True, True, is_packed=is_packed)
    scheduler = Scheduler(limits, EngineCounters(), lambda _: 0)
    for num_cached, num_new in rows:
        request = request_of([0] * (num_cached + num_new))
        request.num_computed = num_cached
        scheduler.prefilling.append(Prefill(request))
    chosen = scheduler.schedule_prefill()
    lengths = [p.leader.num_computed + p.num_scheduled for p in chosen]
    return len(chosen), sum(lengths) if is_packed else len(chosen) * max(lengths)


@pytest.mark.parametrize("is_packed", [True, False])
def test_256_continuations_of_long_histories_fit_two_gib_by_the_plan_and_the_scheduler(
    plan, is_packed
):
    num_rows, num_gathered = scheduled([(8000, 20)] * 256, is_packed)
    assert num_rows > 1
    assert gathered_bytes(num_gathered) <= plan.gathered_bytes_of(plan.num_blocks) < 2 * GIB


# Rows of few new tokens are scheduled together, whatever their history.
LOADS = st.sampled_from([40, 20_000]).flatmap(
    lambda most_new: st.lists(
        st.tuples(st.integers(1, 20_000), st.integers(1, most_new)), min_size=1, max_size=40
    )
)


@given(is_packed=st.booleans(), rows=LOADS)
def test_no_prefill_gathers_more_than_is_planned(plan, is_packed, rows):
    _, num_gathered = scheduled(rows, is_packed)
    assert gathered_bytes(num_gathered) <= plan.gathered_bytes_of(plan.num_blocks)


class ResultsOfSizes(TorchDispatchMode):
    """Keeps the memory of results that have one of these numbers of bytes."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes, self.found = sizes, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.nbytes() in self.sizes:
                    self.found[storage.data_ptr()] = storage
        return result


def test_the_planned_bytes_of_a_token_are_those_that_a_forward_makes():
    num_heads, num_layers, B, S = 6, 2, 3, 31
    model = tiny_model(
        "qwen3", num_attention_heads=num_heads, num_key_value_heads=2, num_hidden_layers=num_layers
    )
    runner = ModelRunner(model, None)
    layout = runner.probe()
    K, D = layout.layers[0].keys.shape
    cache = PagedCache(layout, num_blocks=B * S, block_size=1, num_table_rows=B, device=CPU)
    table = BlockTable(B, 1, CPU)
    table.write([(row, i, 1 + row * S + i) for row in range(B) for i in range(S)])
    sizes = (4 * B * heads * S * D for heads in (K, num_heads))
    with ResultsOfSizes(*sizes) as results, torch.no_grad():
        # Rows of two lengths, so that there is a mask, and attention repeats keys itself.
        rows = [[1, 2, 3], [1, 2], [1, 2]], [S, S - 1, S], [0, 1, 2]
        runner.logits(ForwardBatch(*rows, cache, table))
    per_token = gathered_bytes_per_token(layout, num_heads, torch.float32)
    num_bytes = sum(storage.nbytes() for storage in results.found.values())
    assert num_bytes == num_layers * per_token * B * S
