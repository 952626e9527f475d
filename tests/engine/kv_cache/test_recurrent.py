from types import SimpleNamespace

import pytest
import torch

from cb_rollout.engine.kv_cache.layout import TensorSpec
from cb_rollout.engine.kv_cache.recurrent import PROBE_ROWS, OpaqueStateAdapter, RecurrentLayer
from cb_rollout.errors import ConfigurationError

CPU = torch.device("cpu")


def returned_by_model(rows, value=0.0):
    """Nested tensors with a row for each sequence, and a counter for all."""
    return SimpleNamespace(
        counter=torch.tensor([7]),
        layers={0: (torch.full((rows, 3), value), [torch.full((rows, 2, 2), value + 1)])},
    )


def adapter():
    return OpaqueStateAdapter(returned_by_model(PROBE_ROWS), returned_by_model(PROBE_ROWS))


def test_the_layout_is_that_of_the_tensors_with_a_row_for_each_sequence():
    (states,) = adapter().layout.layers
    assert states.recurrent == (TensorSpec((3,), torch.float32), TensorSpec((2, 2), torch.float32))
    assert states.conv == (None, None)
    assert states.keys is None


def test_states_extracted_from_one_forward_are_inserted_into_the_next_row_by_row():
    opaque = adapter()
    layer = RecurrentLayer(opaque.layout.layers[0], num_table_rows=4, device=CPU)
    layer.load(None)
    assert opaque.inserted(layer) is None
    opaque.extract(layer, returned_by_model(1, value=5.0), num_rows=1)
    layer.save(torch.tensor([2]))
    layer.load(torch.tensor([2, 0, 2]))
    inserted = opaque.inserted(layer)
    assert inserted.layers[0][0][:, 0].tolist() == [5.0, 0.0, 5.0]
    assert inserted.layers[0][1][0][:, 1, 1].tolist() == [6.0, 0.0, 6.0]
    assert inserted.counter.tolist() == [7]


def test_tensors_common_to_all_sequences_are_copied():
    opaque = adapter()
    layer = RecurrentLayer(opaque.layout.layers[0], num_table_rows=1, device=CPU)
    layer.load(torch.tensor([0]))
    opaque.inserted(layer).counter.add_(1)
    assert opaque.inserted(layer).counter.tolist() == [7]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (None, None),
        ([torch.zeros(PROBE_ROWS, 1)], [torch.zeros(PROBE_ROWS, 4)]),
        (SimpleNamespace(inner=SimpleNamespace()), SimpleNamespace(inner=SimpleNamespace())),
    ],
    ids=["nothing", "growing", "empty"],
)
def test_an_object_without_states_of_fixed_size_is_refused(short, long):
    with pytest.raises(
        ConfigurationError, match=r"of fixed size; .*model\.generate for this model\.$"
    ):
        OpaqueStateAdapter(short, long)
