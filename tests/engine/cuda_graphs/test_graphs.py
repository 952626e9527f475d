import pytest

from cb_rollout.engine.cuda_graphs.graphs import padded_rows


@pytest.mark.parametrize(
    ("rows", "padded"),
    [(1, 1), (5, 8), (129, 192), (256, 256), (257, 320), (900, 960), (1024, 1024), (1025, 1088)],
)
def test_rows_are_rounded_up_to_the_next_size_and_beyond_256_to_a_multiple_of_64(rows, padded):
    assert padded_rows(rows) == padded


def test_sizes_up_to_1024_rows_waste_little_and_are_few():
    sizes = {padded_rows(rows) for rows in range(1, 1025)}
    assert len(sizes) == 26
    assert all((padded_rows(rows) - rows) / rows < 0.25 for rows in range(257, 1025))


def test_an_interval_of_ones_own_is_kept():
    assert padded_rows(11, interval=10) == 20
