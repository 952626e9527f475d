"""The host store by itself, over the pages and states of a small cache on the CPU."""

import pytest
import torch
from fake_model import request_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cb_rollout.engine.kv_cache import offloading
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.engine.kv_cache.offloading import (
    KVOffloader,
    OffloadSpeeds,
    host_budget_bytes,
    offload_obstacle,
)
from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.memory.plan import GIB, MemoryModel, TrainingBytes, create_memory_plan
from cb_rollout.engine.memory.system import DeviceMemory

CPU = torch.device("cpu")
KEYS, HALVES = TensorSpec((2, 3), torch.float32), TensorSpec((1, 5), torch.bfloat16)
STATES = LayerSpec(
    conv=(TensorSpec((4, 3), torch.float32),), recurrent=(TensorSpec((2, 2), torch.float64),)
)
ATTENTION = LayerSpec(keys=KEYS, values=HALVES)
LAYOUTS = {
    "keys": CacheLayout((ATTENTION, ATTENTION)),
    "states": CacheLayout((STATES,)),
    "both": CacheLayout((ATTENTION, STATES)),
    "experts": CacheLayout((ATTENTION,), routes=TensorSpec((2, 2), torch.uint8)),
}
BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS = 4, 24, 5


def storage_of(layout):
    model = MemoryModel(
        total_bytes=GIB,
        free_bytes=GIB,
        training=TrainingBytes(),
        max_memory_percent=1.0,
        block_size=BLOCK_SIZE,
        max_requests=NUM_ROWS,
        max_batch_tokens=64,
        bytes_per_token=layout.bytes_per_token,
        bytes_per_sequence=layout.bytes_per_sequence,
        workspace_bytes_per_request=0,
        gathered_bytes_per_token=0,
        set_blocks=NUM_BLOCKS,
    )
    storage = CacheStorage(layout, create_memory_plan(model), CPU)
    storage.allocate(NUM_BLOCKS)
    return storage


def offloader_of(layout="both", num_segments=100, segment_bytes=64, **options):
    offloader = KVOffloader(storage_of(LAYOUTS[layout]), num_segments * segment_bytes, **options)
    # Small, so that tensors lie across segments.
    offloader._segment_bytes, offloader._max_segments = segment_bytes, num_segments
    offloader.speeds = OffloadSpeeds(bus_bytes_per_second=1e30, prefill_tokens_per_second=1.0)
    return offloader


def running(name="r", num_computed=9, blocks=(5, 2, 9), row=3):
    request = request_of(list(range(num_computed + 1)), name=name)
    request.num_computed, request.block_ids, request.table_row = num_computed, list(blocks), row
    return request


def fill(offloader, request):
    """Write numbers into a sequence's blocks and states; return what was written."""
    cache, generator = offloader._storage.cache, torch.Generator().manual_seed(request.table_row)
    for tensor in contents(cache, request):
        random = torch.randint(0, 100, tensor.shape, generator=generator)
        tensor.copy_(random.to(tensor.dtype))
    return [tensor.clone() for tensor in contents(cache, request)]


def contents(cache, request, first=0):
    """Return views of a sequence's blocks, from the first one on, and states."""
    num_blocks = -(-request.num_computed // BLOCK_SIZE)
    blocks = [
        pages.view(-1, BLOCK_SIZE, pages.shape[1])[block]
        for pages in cache.pages
        for block in request.block_ids[first:num_blocks]
    ]
    return blocks + [states[request.table_row] for states in cache.states]


def require_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("segment_bytes", [8, 64, 4096])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_states_come_back_in_every_bit_into_other_blocks_and_another_row(
    layout, segment_bytes
):
    offloader = offloader_of(layout, 2000, segment_bytes)
    request = running()
    expected = fill(offloader, request)
    assert offloader.save(request, 0)
    assert offloader.holds(request)
    for tensor in offloader._storage.cache.tensors:
        tensor.zero_()
    request.block_ids, request.table_row, request.num_computed = [1, 20, 7], 0, 0
    assert offloader.restore(request, 0)
    assert request.num_computed == 9
    require_same(contents(offloader._storage.cache, request), expected)
    assert not offloader.holds(request)


def test_blocks_of_a_shared_prefix_are_not_written():
    offloader = offloader_of("keys")
    request = running()
    expected = fill(offloader, request)
    offloader.save(request, 0)
    for tensor in offloader._storage.cache.tensors:
        tensor.zero_()
    request.block_ids, request.num_computed = [1, 20, 7], 8
    assert offloader.restore(request, 0)
    cache = offloader._storage.cache
    require_same(contents(cache, request, first=2), expected[2::3])
    assert all(
        not shared.any() for shared in contents(cache, running(blocks=(1, 20), num_computed=8))
    )


def test_keys_of_another_policy_version_are_forgotten_and_not_restored():
    offloader, request = offloader_of(), running()
    offloader.save(request, 4)
    request.num_computed = 0
    assert not offloader.restore(request, 5)
    assert request.num_computed == 0
    assert not offloader.holds(request)


def test_a_sequence_with_keys_of_an_older_policy_is_not_kept():
    offloader, request = offloader_of(), running()
    request.has_old_keys = True
    assert not offloader.save(request, 4)


def test_the_longest_kept_sequence_makes_room_and_one_too_long_takes_none():
    size = storage_of(LAYOUTS["both"]).plan
    num_bytes = 3 * size.bytes_per_block + size.bytes_per_sequence
    offloader = offloader_of("both", num_segments=2, segment_bytes=num_bytes)
    first, second, third = (running(name) for name in ("first", "second", "third"))
    for request in (first, second, third):
        fill(offloader, request)
        assert offloader.save(request, 0)
    assert offloader.num_bytes == 2 * num_bytes
    for request in (first, second, third):
        request.num_computed = 0
        # It is asked for, so that all processes of a group ask, and is computed again.
        assert offloader.holds(request)
        assert offloader.restore(request, 0) is (request is not first)
    long = running("long", 20, range(1, 6))
    offloader._max_segments = 1
    assert not offloader.save(long, 0)
    assert not offloader.holds(long)


def test_nothing_is_kept_where_a_prefill_is_faster_or_a_speed_is_unknown():
    offloader, request = offloader_of(), running()
    offloader.speeds = OffloadSpeeds(bus_bytes_per_second=1.0, prefill_tokens_per_second=1e30)
    assert not offloader.save(request, 0)
    offloader.speeds = OffloadSpeeds(bus_bytes_per_second=1e30)
    assert not offloader.save(request, 0)
    assert offloader.num_bytes == 0


def test_kept_keys_are_forgotten_where_a_shared_prefix_leaves_little_to_compute():
    offloader, request = offloader_of("keys"), running()
    plan = offloader._storage.plan
    # A block takes as long as three tokens, and each way counts when it is kept.
    speeds = OffloadSpeeds(3.5 * plan.bytes_per_block, 10.0)
    offloader.speeds = speeds
    assert not speeds.is_copy_faster(2 * 3 * plan.bytes_per_block, 9)
    speeds.prefill_tokens_per_second = 3.0
    assert offloader.save(request, 0)
    request.num_computed = 8
    speeds.prefill_tokens_per_second = 8.0
    assert not offloader.restore(request, 0)
    assert request.num_computed == 8


def test_the_fastest_prefill_counts_but_for_the_first_one():
    speeds = OffloadSpeeds(bus_bytes_per_second=100.0)
    speeds.record_prefill(1000, 1.0)
    assert not speeds.is_copy_faster(1, 1000)
    for num_tokens, seconds in ((10, 1.0), (40, 2.0), (10, 0.0)):
        speeds.record_prefill(num_tokens, seconds)
    assert speeds.prefill_tokens_per_second == 20.0
    assert speeds.is_copy_faster(99, 20)
    assert not speeds.is_copy_faster(100, 20)


def test_the_bus_is_measured_once_and_only_after_a_prefill():
    offloader = offloader_of(num_segments=4, segment_bytes=1 << 16)
    offloader.speeds = speeds = OffloadSpeeds()
    offloader.save(running(), 0)
    assert speeds.bus_bytes_per_second is None
    speeds.prefill_tokens_per_second = 1e-9
    assert offloader.save(running(), 0)
    assert speeds.bus_bytes_per_second > 0


def test_where_one_process_of_a_group_keeps_no_keys_none_does():
    for answers in ([0], [1, 0]):
        remaining = iter(answers)
        offloader = offloader_of(
            all_reduce_min=lambda value, left=remaining: min(value, next(left))
        )
        request = running()
        is_kept = offloader.save(request, 0)
        assert is_kept is bool(answers[0])
        if is_kept:
            request.num_computed = 0
            assert not offloader.restore(request, 0)
            assert request.num_computed == 0
        assert len(offloader._free_segments) == offloader._num_segments


def test_what_is_released_holds_no_byte():
    offloader = offloader_of()
    offloader.save(running(), 0)
    assert offloader.num_bytes > 0
    offloader.clear()
    assert offloader.num_bytes == len(offloader._free_segments) * 64
    offloader.save(running(), 0)
    offloader.release()
    assert offloader.num_bytes == 0
    assert not offloader.holds(running())


def test_a_host_without_memory_is_named_and_keeps_what_it_has(monkeypatch, caplog):
    offloader = offloader_of(num_segments=100, segment_bytes=1024)
    assert offloader.save(running("first"), 0)

    def refused(*sizes, **options):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(offloading.torch, "empty", refused)
    assert offloader.save(running("second"), 0)
    assert "no host memory beyond" in caplog.text
    assert "Lower cpu_offload_space" in caplog.text
    assert offloader._kept["first"] is None


def free_of(num_bytes):
    return lambda device: DeviceMemory(100 * GIB, num_bytes)


def test_the_budget_is_bounded_by_a_share_of_the_available_memory(monkeypatch, caplog):
    monkeypatch.setattr(offloading.devices, "memory", free_of(10 * GIB))
    assert host_budget_bytes(4.0, 0.8) == 4 * GIB
    assert host_budget_bytes(8.0, 0.8) == 8 * GIB
    assert not caplog.records
    assert host_budget_bytes(9.0, 0.8) == 8 * GIB
    assert "cpu_offload_space=9 GiB is more than 80% of the 10.000 GiB" in caplog.text
    assert host_budget_bytes(None, 0.5) == 5 * GIB
    assert host_budget_bytes(4.0, 0.0) == 0


def test_only_a_device_with_memory_of_its_own_has_keys_to_offload():
    assert offload_obstacle(torch.device("cuda")) == ""
    assert offload_obstacle(CPU) == "the keys of a cpu are in host memory already"


@pytest.mark.parametrize("max_bytes", [1 << 16, 3 * GIB, 1000 * GIB])
def test_segments_are_powers_of_two_within_the_budget(max_bytes):
    offloader = KVOffloader(storage_of(LAYOUTS["keys"]), max_bytes)
    size = offloader._segment_bytes
    assert size & (size - 1) == 0
    assert max_bytes // 2 < size * offloader._max_segments <= max_bytes


class StoreRuns(RuleBasedStateMachine):
    """Any order of saves, restores, drops and releases, in a store that is often full."""

    @initialize(layout=st.sampled_from(list(LAYOUTS)), num_segments=st.integers(0, 40))
    def start(self, layout, num_segments):
        self.offloader = offloader_of(layout, num_segments)
        self.expected, self.number = {}, 0

    @rule(
        num_computed=st.integers(1, 12), row=st.integers(0, NUM_ROWS - 1), first=st.integers(1, 20)
    )
    def save(self, num_computed, row, first):
        self.number += 1
        request = running(str(self.number), num_computed, range(first, first + 3), row)
        written = fill(self.offloader, request)
        if self.offloader.save(request, 0):
            self.expected[request] = num_computed, written

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), row=st.integers(0, NUM_ROWS - 1), num_shared=st.integers(0, 2))
    def restore(self, data, row, num_shared):
        request = data.draw(st.sampled_from(list(self.expected)))
        num_computed, written = self.expected.pop(request)
        num_blocks = -(-num_computed // BLOCK_SIZE)
        request.block_ids, request.table_row = [21, 22, 23], row
        request.num_computed = 0 if num_shared >= num_blocks else num_shared * BLOCK_SIZE
        first = request.num_computed // BLOCK_SIZE
        if self.offloader.restore(request, 0):
            cache = self.offloader._storage.cache
            num_pages = len(cache.pages)
            kept = [
                t for i in range(num_pages) for t in written[i * num_blocks :][first:num_blocks]
            ]
            require_same(contents(cache, request, first), kept + written[num_pages * num_blocks :])

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def drop(self, data):
        request = data.draw(st.sampled_from(list(self.expected)))
        del self.expected[request]
        self.offloader.drop(request)

    @rule(is_release=st.booleans())
    def forget(self, is_release):
        self.expected.clear()
        if is_release:
            self.offloader.release()
        else:
            self.offloader.clear()

    @invariant()
    def every_segment_is_free_or_holds_one_sequence(self):
        if not hasattr(self, "offloader"):
            return
        kept = [k for k in self.offloader._kept.values() if k is not None]
        segments = [*self.offloader._free_segments, *(s for k in kept for s in k.segments)]
        assert len({id(segment) for segment in segments}) == len(segments)
        assert len(segments) == self.offloader._num_segments <= self.offloader._max_segments
        assert set(self.offloader._kept) == {request.request_id for request in self.expected}


StoreRuns.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
test_the_store_keeps_its_accounts = StoreRuns.TestCase
