import logging

import pytest
import torch

from cb_rollout.engine.kv_cache import storage as storages
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.engine.kv_cache.paged import PagedCache
from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import MemoryModel, TrainingBytes, create_memory_plan
from cb_rollout.errors import OutOfCacheMemoryError

CPU = torch.device("cpu")
KEYS = TensorSpec((2, 4), torch.float32)
LAYOUT = CacheLayout((LayerSpec(KEYS, KEYS),))
BLOCK_SIZE = 4
BLOCK_BYTES = LAYOUT.bytes_per_token * BLOCK_SIZE


def plan_of(num_blocks, is_fixed=False):
    model = MemoryModel(
        total_bytes=num_blocks * BLOCK_BYTES,
        free_bytes=num_blocks * BLOCK_BYTES,
        training=TrainingBytes(),
        max_memory_percent=1.0,
        block_size=BLOCK_SIZE,
        max_batch_tokens=0,
        workspace_bytes_per_request=0,
        gathered_bytes_per_token=0,
        bytes_per_token=LAYOUT.bytes_per_token,
        bytes_per_sequence=0,
        max_requests=3,
        set_blocks=num_blocks if is_fixed else None,
    )
    return create_memory_plan(model)


def storage_of(num_blocks=100, **settings):
    return CacheStorage(LAYOUT, plan_of(num_blocks, **settings), CPU)


@pytest.fixture
def free(monkeypatch):
    """Set the free memory, in blocks."""

    def set_free(num_blocks):
        memory = devices.DeviceMemory(1 << 40, int(num_blocks * BLOCK_BYTES))
        monkeypatch.setattr(storages.devices, "memory", lambda _: memory)

    return set_free


@pytest.fixture
def refusing(monkeypatch):
    """Make the allocator refuse more blocks than this, whatever is free."""

    def refuse_above(most):
        class Refusing(PagedCache):
            def __init__(self, layout, *, num_blocks, **sizes):
                if num_blocks > most:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                super().__init__(layout, num_blocks=num_blocks, **sizes)

        monkeypatch.setattr(storages, "PagedCache", Refusing)

    return refuse_above


def test_memory_is_allocated_as_the_workload_needs_it_and_never_beyond_the_plan():
    storage = storage_of(100)
    assert (storage.num_bytes, storage.is_allocated) == (0, False)
    assert storage.allocate(7) == 7
    assert storage.num_bytes == 8 * BLOCK_BYTES, "with the null block"
    storage.release(LAYOUT, plan_of(100))
    assert storage.num_bytes == 0
    assert storage.allocate(1000) == 100


def test_a_fixed_pool_is_allocated_whole():
    assert storage_of(100, is_fixed=True).allocate(7) == 100


def test_growing_doubles_but_never_beyond_what_can_be_used():
    storage = storage_of(100)
    storage.allocate(10)
    assert storage.grow(1, usable=80) == 20
    assert storage.grow(1, usable=25) == 25
    assert storage.grow(1, usable=25) == 26, "a block needed now is allocated beyond what is usable"
    assert storage.grow(60, usable=1000) == 86
    assert storage.grow(60, usable=1000) == 100
    assert storage.grow(1, usable=1000) == 100


def test_too_little_memory_shrinks_the_pool_and_logs_the_numbers(free, caplog):
    free(12.5)
    with caplog.at_level(logging.WARNING):
        assert storage_of(100).allocate(50, at_least=5) == 12
    assert "no memory for 50 KV cache blocks" in caplog.text
    assert "12 are allocated" in caplog.text
    caplog.clear()
    assert storage_of(100).allocate(12, at_least=5) == 12
    assert not caplog.records


def test_an_allocator_that_refuses_is_asked_for_less(refusing, caplog):
    refusing(13)
    """For a tenth less each time: by halves it would leave up to half of the memory unused."""
    assert storage_of(100).allocate(100, at_least=5) == 13
    assert "13 are allocated" in caplog.text
    assert storage_of(100, is_fixed=True).allocate(1, at_least=1) == 13


def test_the_knob_named_is_one_that_was_turned(free, caplog):
    free(12)
    storage_of(100, is_fixed=True).allocate(1)
    assert "Lower num_blocks" in caplog.text
    assert "max_memory_percent" not in caplog.text
    caplog.clear()
    storage_of(100).allocate(100)
    assert "Lower max_memory_percent" in caplog.text
    assert "num_blocks" not in caplog.text
    free(0.5)
    with pytest.raises(OutOfCacheMemoryError, match="or lower block_size") as raised:
        storage_of(100).allocate(1)
    assert "max_new_tokens" not in str(raised.value)


def test_less_memory_than_one_request_needs_raises_with_the_plan(free, refusing):
    free(4)
    with pytest.raises(OutOfCacheMemoryError, match=r"(?s)no memory for 5 KV.*KV cache .*free"):
        storage_of(100).allocate(50, at_least=5)
    free(1000)
    refusing(4)
    with pytest.raises(OutOfCacheMemoryError, match="no memory for 5 KV cache blocks") as raised:
        storage_of(100).allocate(50, at_least=5)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_other_errors_are_raised(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(storages, "PagedCache", fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        storage_of(100).allocate(50)


def test_growing_stops_at_the_end_of_memory(free, monkeypatch):
    storage = storage_of(100)
    storage.allocate(10)
    free(5)
    assert storage.grow(20, usable=1000) == 15
    free(1000)
    grow = PagedCache.grow

    def grow_to_twenty(cache, num_blocks):
        if num_blocks > 20:
            raise MemoryError
        grow(cache, num_blocks)

    monkeypatch.setattr(PagedCache, "grow", grow_to_twenty)
    assert storage.grow(20, usable=1000) == 20
