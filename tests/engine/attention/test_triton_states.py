"""Kernels move recurrent states between tables and the rows of a step, a layer at a time."""

import pytest
import torch
from kernel_faults import with_fault

pytest.importorskip("triton")

from cb_rollout.engine.attention.shared_prefix import AttentionMetadata
from cb_rollout.engine.attention.triton import kernels, launch
from cb_rollout.engine.attention.triton.states import addressed_layers
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.engine.kv_cache.paged import PagedCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# More than a program copies, and no multiple of it.
WIDE = (3, 700)
LAYOUT = CacheLayout(
    (
        LayerSpec(
            conv=(TensorSpec((5, 3), torch.bfloat16),),
            recurrent=(TensorSpec(WIDE, torch.float32),),
        ),
        LayerSpec(keys=TensorSpec((1, 8), torch.float32), values=TensorSpec((1, 8), torch.float32)),
        LayerSpec(
            conv=(TensorSpec((7,), torch.float16), TensorSpec((2,), torch.int8)),
            recurrent=(None, TensorSpec((9,), torch.float64)),
        ),
    )
)
# Row 1 is empty.
TABLE_ROWS, LENGTHS = [3, 0, 1], [5, 0, 2]


def filled():
    """Return a cache of drawn states, and a step's layers of it."""
    cache = PagedCache(LAYOUT, num_blocks=1, block_size=4, num_table_rows=4, device=DEVICE)
    torch.manual_seed(0)
    for states in (states for layer in cache.stateful.values() for states in layer.tensors):
        states.copy_(torch.randn(states.shape, device=DEVICE) * 10)
    table_rows_B, lengths_B = torch.tensor([TABLE_ROWS, LENGTHS], dtype=torch.int32, device=DEVICE)
    addresses = torch.tensor([0, 0, *cache.addresses], device=DEVICE)
    metadata = AttentionMetadata(addresses, 4, table_rows_B, lengths_B)
    layers = addressed_layers(LAYOUT, metadata)
    for layer in layers.values():
        layer.load(table_rows_B)
    return cache, layers


def names_of(layer):
    return [
        (n, i) for n, states in layer.states.items() for i, s in enumerate(states) if s is not None
    ]


def check():
    cache, layers = filled()
    for index, own in cache.stateful.items():
        for name, number in names_of(own):
            table = own.states[name][number]
            before = table.clone()
            rows = getattr(layers[index], name)[number]
            expected = before[TABLE_ROWS]
            expected[1] = 0
            assert rows.dtype == table.dtype
            assert torch.equal(rows, expected)
            rows.add_(1)
            assert torch.equal(table, before)
            layers[index].save()
            before[[3, 1]] += 1
            assert torch.equal(table, before)


def test_rows_are_loaded_and_saved_and_an_empty_row_touches_nothing():
    check()


def test_a_layer_saves_its_states_when_the_next_one_loads():
    cache, layers = filled()
    first, second = layers.values()
    first.conv_states[0].add_(1)
    kept = first.recurrent_states[0].add_(1)
    table = cache.stateful[0].states["recurrent_states"][0]
    assert not torch.equal(table[3], kept[0])
    assert second.recurrent_states[0] is None
    assert second.conv_states[1] is not None
    assert torch.equal(table[3], kept[0])
    assert not first.conv_states
    assert not first.recurrent_states
    # What is read again is what was saved.
    assert torch.equal(first.recurrent_states[0][0], kept[0])


def test_a_state_of_another_shape_is_not_saved():
    _, layers = filled()
    layers[0].conv_states[0] = layers[0].conv_states[0][:, :, :2]
    with pytest.raises(AssertionError, match="another state"):
        layers[0].save()


FAULTS = {
    "rows of the step are rows of the table": ("+ table_row * size", "+ row * size"),
    "an empty row moves": (
        "places < tl.where(tl.load(lengths + row) > 0, size, 0)",
        "places < size",
    ),
    "an empty row has old numbers": (
        "tl.load(table, mask=is_there, other=0)",
        "tl.load(table, mask=places < size, other=0)",
    ),
    "only the first chunk is saved": (
        "tl.load(own, mask=is_there), mask=is_there)",
        "tl.load(own, mask=is_there), mask=is_there & (places < 1024))",
    ),
    "only the first chunk is loaded": (
        "other=0), mask=places < size)",
        "other=0), mask=places < 9)",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="faults are interpreted")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_a_fault_is_refused(fault, tmp_path, monkeypatch):
    faulty = with_fault(kernels, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(launch, "move_states_kernel", faulty.move_states_kernel)
    with pytest.raises(AssertionError):
        check()
