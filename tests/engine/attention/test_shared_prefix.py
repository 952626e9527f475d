import pytest

from cb_rollout.engine.attention.shared_prefix import (
    MAX_STRETCHES,
    Tile,
    is_cut,
    max_stretches,
    shared_tiles,
)

PROMPT, OTHER = [1, 2, 3, 4], [11, 12, 13, 14]


def test_neighbours_share_their_leading_whole_blocks():
    rows = [[*PROMPT, 5], [*PROMPT, 6, 7], [*OTHER, 8], [*OTHER, 9], [*OTHER, 10]]
    assert shared_tiles(rows, 32, 8) == [Tile(0, 2, 128), Tile(2, 3, 128)]


def test_the_last_block_of_a_row_is_never_shared():
    assert shared_tiles([PROMPT, PROMPT], 32, 8) == [Tile(0, 2, 96)]


def test_what_is_short_or_alone_is_read_by_each_row():
    assert shared_tiles([[1, 5], [1, 6]], 32, 8) == []
    assert shared_tiles([[*PROMPT, 5], [*OTHER, 6], [*PROMPT, 7]], 32, 8) == []
    assert shared_tiles([[1], [1]], 128, 8) == []
    assert shared_tiles([[*PROMPT, 5]], 32, 8) == []
    assert shared_tiles([], 32, 8) == []


def test_a_prompt_that_only_begins_alike_is_shared_as_far_as_it_does():
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 6], [1, 2, 3, 4, 7]]
    assert shared_tiles(rows, 32, 8) == [Tile(0, 3, 96)]


def test_a_large_group_fills_several_tiles():
    rows = [[*PROMPT, 20 + row] for row in range(5)]
    assert shared_tiles(rows, 32, 2) == [Tile(0, 2, 128), Tile(2, 2, 128), Tile(4, 1, 128)]


def test_an_h100_is_full_with_four_stretches_for_each_processor():
    assert max_stretches(num_key_heads=8, num_processors=132) == 66
    assert max_stretches(num_key_heads=1, num_processors=132) == MAX_STRETCHES


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([800] * 256, False),  # the device is busy with whole rows
        ([4500] * 256, False),
        ([300] * 255 + [8192], True),  # the others would wait for one row
        ([200], False),  # too short to cut
        ([4096], True),
    ],
)
def test_keys_are_cut_where_a_row_is_long_beside_the_others(lengths, expected):
    assert is_cut(lengths, num_stretches=66) is expected
