import pytest

from cb_rollout.engine.cuda_graphs.graphs import MAX_GRAPHS, ROWS, GraphSizes


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (5, 8), (129, 192), (1024, 1024)])
def test_rows_are_rounded_up_to_the_next_size(rows, padded):
    assert GraphSizes().padded(rows) == padded


def test_more_rows_than_any_size_are_rounded_to_multiples_of_the_largest():
    assert GraphSizes().padded(1025) == 2 * ROWS[-1]


def test_an_interval_of_ones_own_is_kept():
    sizes = GraphSizes(row_interval=10, key_interval=100, max_cached=3)
    assert (sizes.padded(11), sizes.padded_keys(101), sizes.max_graphs) == (20, 200, 3)
    assert GraphSizes().padded_keys(1) == GraphSizes().padded_keys(1024) == 1024
    assert GraphSizes().max_graphs == MAX_GRAPHS
