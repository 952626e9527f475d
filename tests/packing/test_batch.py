"""Every completion token is predicted from its own prompt and the tokens before it."""

import random

import pytest
import torch

from cb_rollout.packing.batch import (
    MAX_PADDING,
    PackedRow,
    PackingLayout,
    Segment,
    pack,
    representative,
)

CPU = torch.device("cpu")
A, B = [10, 11, 12], [13]
ROWS = [
    PackedRow(A, [20, 21]),
    PackedRow(A, [22]),
    PackedRow(A, []),
    PackedRow(B, [23, 24, 25]),
    PackedRow(A, [26, 27, 28]),
]
EVERY = range(len(ROWS))


def test_a_prompt_stands_once_for_its_group():
    (batch,) = pack(ROWS, EVERY, PackingLayout.SHARED_PROMPTS, CPU)
    assert batch.rows == [0, 1, 4, 3]
    assert batch.lengths == [2, 1, 3, 3]
    assert batch.input_ids.tolist() == [[*A, 20, 26, 27, *B, 23, 24]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 0, 1, 2]]
    assert batch.predicting_K.tolist() == [2, 3, 2, 2, 4, 5, 6, 7, 8]
    assert batch.labels_K.tolist() == [20, 21, 22, 26, 27, 28, 23, 24, 25]
    # A completion of one token adds none; a group of one row is one segment.
    assert batch.segments == (
        Segment(0, 3),
        Segment(3, 1, 0, 3),
        Segment(4, 2, 0, 3),
        Segment(6, 3),
    )
    assert batch.is_token is None
    assert batch.num_tokens == 9


def test_whole_rows_keep_their_last_tokens_and_the_empty_ones():
    (batch,) = pack(ROWS, EVERY, PackingLayout.WHOLE_ROWS, CPU)
    assert batch.rows == [0, 1, 2, 3, 4]
    assert batch.input_ids.tolist() == [
        [*A, 20, 21, *A, 22, *A, *B, 23, 24, 25, *A, 26, 27, 28],
    ]
    starts = [(0, 5), (5, 4), (9, 3), (12, 4), (16, 6)]
    assert batch.segments == tuple(Segment(*start) for start in starts)
    assert batch.predicting_K.tolist() == [2, 3, 7, 12, 13, 14, 18, 19, 20]


def test_padded_rows_are_of_about_one_length():
    wide, narrow = pack(ROWS, EVERY, PackingLayout.PADDED, CPU)
    assert wide.rows == [4, 0, 1]
    assert wide.input_ids.tolist() == [[*A, 26, 27], [*A, 20, A[0]], [*A, A[0], A[0]]]
    assert wide.is_token.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert wide.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert wide.predicting_K.tolist() == [2, 3, 4, 7, 8, 12]
    assert wide.segments is None
    # With the fourth row more than a fifth of the tokens would be padding.
    assert narrow.rows == [3]
    assert narrow.num_tokens == 3


def test_a_group_that_does_not_fit_is_cut_and_each_part_has_the_prompt():
    batches = pack(ROWS, EVERY, PackingLayout.SHARED_PROMPTS, CPU, max_tokens=8)
    assert [batch.rows for batch in batches] == [[0, 1], [4], [3]]
    assert batches[1].input_ids.tolist() == [[*A, 26, 27]]
    assert [b.rows for b in pack(ROWS, EVERY, PackingLayout.SHARED_PROMPTS, CPU, 1)] == [
        [0],
        [1],
        [4],
        [3],
    ]


def test_rows_that_nobody_asked_for_are_left_out():
    (batch,) = pack(ROWS, [3, 2], PackingLayout.SHARED_PROMPTS, CPU)
    assert batch.rows == [3]
    assert pack(ROWS, [2], PackingLayout.SHARED_PROMPTS, CPU) == []


def seen_by(batch, index):
    """The packed positions that the token at `index` attends to, itself included."""
    if batch.segments is None:
        first = index - index % batch.input_ids.shape[1]
        return list(range(first, index + 1))
    (own,) = (s for s in batch.segments if s.start <= index < s.start + s.length)
    prefix = range(own.prefix_start, own.prefix_start + own.prefix_length)
    return [*prefix, *range(own.start, index + 1)]


@pytest.mark.parametrize("layout", PackingLayout)
def test_whatever_the_cuts_each_token_sees_its_own_sequence(layout):
    rng = random.Random(0)
    for _ in range(150):
        prompts = [[rng.randrange(9) for _ in range(rng.randint(1, 8))] for _ in range(3)]
        rows = [
            PackedRow(rng.choice(prompts), [rng.randrange(9) for _ in range(rng.randint(0, 9))])
            for _ in range(rng.randint(1, 10))
        ]
        numbers = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))))
        max_tokens = rng.choice([None, 1, 10, 25])
        batches = pack(rows, numbers, layout, CPU, max_tokens)
        scored = [n for n in numbers if rows[n].completion_ids or layout == "whole_rows"]
        assert sorted(n for batch in batches for n in batch.rows) == scored
        for batch in batches:
            assert max_tokens is None or batch.num_tokens <= max_tokens or len(batch.rows) == 1
            check_each_token(rows, batch)


def check_each_token(rows, batch):
    ids, positions = batch.input_ids.flatten().tolist(), batch.position_ids.flatten().tolist()
    predicting = iter(batch.predicting_K.tolist())
    for number, length in zip(batch.rows, batch.lengths, strict=True):
        prompt, completion = rows[number][:2]
        assert length == len(completion)
        for t in range(length):
            seen = seen_by(batch, next(predicting))
            assert [ids[index] for index in seen] == [*prompt, *completion[:t]]
            assert [positions[index] for index in seen] == list(range(len(prompt) + t))
    assert next(predicting, None) is None
    labels = [token for number in batch.rows for token in rows[number].completion_ids]
    assert batch.labels_K.tolist() == labels
    if batch.is_token is not None:
        assert batch.num_tokens <= MAX_PADDING * int(batch.is_token.sum())
    else:
        assert sum(segment.length for segment in batch.segments) == batch.num_tokens


def test_the_rows_to_compare_are_a_pair_of_a_group_and_the_longest():
    rows = [PackedRow(B, [1]), PackedRow([9], [2]), *ROWS, PackedRow([7], [1] * 9)]
    assert representative(rows) == [2, 3, 7, 0]
