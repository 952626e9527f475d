"""Every completion token is predicted from its own prompt and the tokens before it."""

import random
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from prefix_trees import random_tree_rows

from cb_rollout.engine.images.prompt_images import Image, PromptImages
from cb_rollout.packing.batch import MAX_PADDING, PackingLayout, Segment, pack
from cb_rollout.packing.prefix_tree import in_tree_order, num_tree_tokens, representative
from cb_rollout.packing.rows import PackedRow, RowImages

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
    (batch,) = pack(ROWS, EVERY, PackingLayout.SHARED_PREFIXES, CPU)
    assert batch.rows == [3, 4, 0, 1]
    assert batch.lengths == [3, 3, 2, 1]
    assert batch.input_ids.tolist() == [[*B, 23, 24, *A, 26, 27, 20]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 3]]
    assert batch.predicting_K.tolist() == [0, 1, 2, 5, 6, 7, 5, 8, 5]
    assert batch.labels_K.tolist() == [23, 24, 25, 26, 27, 28, 20, 21, 22]
    # A row is a segment of the tokens that no row before it has; the last row has none.
    assert batch.segments == (Segment(0, 3), Segment(3, 5), Segment(8, 1, (range(3, 6),)))
    assert batch.is_token is None
    assert batch.scores_R is None
    assert batch.num_tokens == num_tree_tokens(ROWS) == 9
    assert batch.num_shared_prompts == 2


def test_the_turns_of_a_conversation_are_one_path_and_a_fork_leaves_it_anywhere():
    turns = [PackedRow(A, [20, 21]), PackedRow([*A, 20, 21, 30], [22, 23, 24])]
    fork = PackedRow([*A, 20, 21, 30], [22, 25, 26])
    retry = PackedRow([*A, 20, 21, 30], [22, 25, 27])
    (batch,) = pack([*turns, fork, retry], range(4), PackingLayout.SHARED_PREFIXES, CPU)
    assert batch.rows == [2, 3, 1, 0]
    assert batch.input_ids.tolist() == [[*A, 20, 21, 30, 22, 25, 23]]
    assert batch.position_ids.tolist() == [[*range(8), 7]]
    assert batch.segments == (Segment(0, 8), Segment(8, 1, (range(7),)))
    # Rows that take the same token after the same tokens share its score.
    assert batch.scored == [(2, 0), (2, 1), (2, 2), (3, 2), (1, 1), (1, 2), (0, 0), (0, 1)]
    assert batch.scores_R.tolist() == [0, 1, 2, 0, 1, 3, 0, 4, 5, 6, 7]
    assert batch.predicting_K.tolist() == [5, 6, 7, 7, 6, 8, 2, 3]
    assert batch.labels_K.tolist() == [22, 25, 26, 27, 23, 24, 20, 21]
    assert batch.num_shared_prompts == 3


def test_a_path_goes_through_several_segments():
    rows = [PackedRow([9], list(ids)) for ids in ((8, 7, 6, 5, 0), (8, 7, 6, 4, 0), (8, 7, 3, 0))]
    rows.append(PackedRow([9], [8, 7, 6, 4, 2, 1, 0]))
    (batch,) = pack(rows, range(4), PackingLayout.SHARED_PREFIXES, CPU)
    assert batch.input_ids.tolist() == [[9, 8, 7, 6, 5, 4, 2, 1, 3]]
    assert batch.segments == (
        Segment(0, 5),
        Segment(5, 3, (range(4),)),
        Segment(8, 1, (range(3),)),
    )
    rows.append(PackedRow([9], [8, 7, 6, 4, 1, 1]))
    (batch,) = pack(rows, range(5), PackingLayout.SHARED_PREFIXES, CPU)
    assert Segment(8, 1, (range(4), range(5, 6))) in batch.segments


def test_scores_of_other_temperatures_and_sampling_masks_are_apart():
    rows = [PackedRow(A, [20, 21], sampling_mask=[kept, kept]) for kept in (b"1", b"2", b"1")]
    rows.append(rows[0]._replace(temperature=0.5))
    (batch,) = pack(rows, range(4), PackingLayout.SHARED_PREFIXES, CPU)
    assert batch.num_tokens == len(A) + 1
    assert batch.scored == [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0), (3, 1)]
    assert batch.rows == [0, 1, 2, 3]
    assert batch.scores_R.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]


def test_tokens_are_shared_as_far_as_their_experts_are():
    routes = np.zeros((4, 1, 2), np.uint8)
    others = routes.copy()
    others[2] = 1
    rows = [PackedRow(A, [20, 21], routes=own) for own in (routes, others, routes[:3], None)]
    assert num_tree_tokens(rows) == 4 + 2 + 1 + 4
    (batch,) = pack(rows, range(4), PackingLayout.SHARED_PREFIXES, CPU)
    assert [len(segment.keys) for segment in batch.segments] == [4] * 4
    # Experts of the tokens that a segment holds; -1: the router chooses.
    taken = batch.routes[..., 0, 0].tolist()
    assert sorted(taken) == sorted([0] * 4 + [1, 0] + [-1] + [-1] * 4)


def with_images(prompt, completion, stop, digest):
    images = PromptImages((Image(range(1, stop), digest, {"pixel_values": torch.ones(1)}),), 4)
    positions = torch.arange(len(prompt) + len(completion))[None]
    return PackedRow(prompt, completion, images=RowImages(images, positions))


def test_rows_share_all_of_their_images_or_nothing():
    prompt, names = [1, 5, 5, 2], frozenset({"pixel_values"})
    rows = [with_images(prompt, [20, 30], 3, b"a"), with_images(prompt, [21, 30], 3, b"a")]
    rows += [with_images(prompt, [20, 31], 3, b"b")]
    # Two images, one of them in the completion; the last row has it elsewhere.
    rows += [with_images(prompt, ids, 6, b"ab") for ids in ([20, 5, 6], [20, 5, 7, 8])]
    rows += [with_images(prompt, [20, 9, 5, 7], 7, b"ab")]
    rows += [PackedRow(prompt, [20, 31], images=RowImages(None, torch.arange(6)[None]))]
    (batch,) = pack(rows, range(7), PackingLayout.SHARED_PREFIXES, CPU, None, names)
    assert num_tree_tokens(rows) == batch.num_tokens == (5 + 1) + 5 + (7 + 0 + 7) + 5
    assert len(batch.others["pixel_values"]) == 4
    assert batch.others["position_ids"].tolist() == batch.position_ids.tolist()


def with_turns(prompt, completion, *spans, may_be_cut=True):
    """A row whose images, named by the first letter of each span, may be computed apart."""
    images = [
        Image(range(start, stop), digest, {"pixel_values": torch.ones(1)})
        for digest, start, stop in spans
    ]
    own = PromptImages(
        tuple(images), len(prompt), dims={"pixel_values": 0}, is_divided=True, may_be_cut=may_be_cut
    )
    positions = torch.arange(len(prompt) + len(completion))[None]
    return PackedRow(prompt, completion, images=RowImages(own, positions))


def test_rows_share_the_turns_before_an_image_that_they_do_not():
    names = frozenset({"pixel_values"})
    first, turn = [1, 5, 5, 2, 20], [1, 5, 5, 2, 20, 5, 5, 3]
    rows = [
        with_turns(first, [21, 22], (b"a", 1, 3)),
        with_turns(turn, [23, 24], (b"a", 1, 3), (b"b", 5, 7)),
        with_turns(turn, [23, 25], (b"a", 1, 3), (b"c", 5, 7)),
        # Another image in the first turn.
        with_turns(first, [21, 22], (b"d", 1, 3)),
        PackedRow(first, [21, 22], images=RowImages(None, torch.arange(7)[None])),
    ]
    (batch,) = pack(rows, range(5), PackingLayout.SHARED_PREFIXES, CPU, None, names)
    # Five tokens of the first turn once, one of each image apart, and all share the first token.
    assert num_tree_tokens(rows) == batch.num_tokens == 5 + 1 + 4 + 4 + 5 + 5
    assert len(batch.others["pixel_values"]) == 4
    together = [row._replace(images=row.images) for row in rows[:3]]
    for row in together:
        row.images.images.may_be_cut = False
    assert num_tree_tokens(together) == sum(row.num_tokens - 1 for row in together)


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
    assert wide.input_ids.tolist() == [[*A, 26, 27], [*A, 20, 0], [*A, 0, 0]]
    assert wide.is_token.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert wide.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert wide.predicting_K.tolist() == [2, 3, 4, 7, 8, 12]
    assert wide.segments is None
    # With the fourth row more than a fifth of the tokens would be padding.
    assert narrow.rows == [3]
    assert narrow.num_tokens == 3


def test_a_prompt_comes_before_the_completions_that_go_on_from_it():
    forked, alone, other = pack(ROWS, EVERY, PackingLayout.FORKED_STATES, CPU)
    assert forked.rows == [4, 0]
    assert forked.shared_ids.tolist() == [A]
    assert forked.input_ids.tolist() == [[26, 27], [20, 0]]
    assert forked.position_ids.tolist() == [[3, 4]] * 2
    # The prompt predicts the first token of each.
    assert forked.predicting_K.tolist() == [2, 3, 4, 2, 5]
    assert forked.is_token is forked.segments is None
    assert forked.num_tokens == 7
    assert forked.num_shared_prompts == 1
    # With the third row more than a fifth of the tokens would be padding.
    assert alone.rows == [1]
    assert alone.shared_ids.tolist() == [A]
    assert alone.input_ids.shape == (1, 0)
    assert other.rows == [3]
    assert other.shared_ids.tolist() == [B]


def test_a_group_that_does_not_fit_is_cut_and_each_part_has_the_prompt():
    batches = pack(ROWS, EVERY, PackingLayout.SHARED_PREFIXES, CPU, max_tokens=8)
    assert [batch.rows for batch in batches] == [[3], [4, 0], [1]]
    assert batches[1].input_ids.tolist() == [[*A, 26, 27, 20]]
    assert batches[2].input_ids.tolist() == [A]
    alone = pack(ROWS, EVERY, PackingLayout.SHARED_PREFIXES, CPU, 1)
    assert [batch.rows for batch in alone] == [[3], [4], [0], [1]]


def test_a_tree_is_cut_where_least_is_computed_again():
    rng = random.Random(1)
    num_cut = 0
    for _ in range(60):
        rows = [PackedRow(*row) for row in random_tree_rows(rng, rng.choice([4, 7]))]
        ordered = in_tree_order(rows, [n for n, row in enumerate(rows) if row.completion_ids])
        longest = max((rows[number].num_tokens for number, _ in ordered), default=1)
        max_tokens = longest + rng.choice([0, 3, 10])
        batches = pack(rows, range(len(rows)), PackingLayout.SHARED_PREFIXES, CPU, max_tokens)
        places = range(1, len(ordered))
        every = (cuts for size in range(len(ordered)) for cuts in combinations(places, size))
        least = min(
            (len(cuts), sum(ordered[place][1] for place in cuts))
            for cuts in every
            if all(tokens <= max_tokens for tokens in tokens_of_parts(rows, ordered, cuts))
        )
        again = sum(batch.num_tokens for batch in batches) - num_tree_tokens(rows)
        assert (len(batches) - 1, again) == least
        num_cut += least[0]
    assert num_cut > 60


def tokens_of_parts(rows, ordered, cuts):
    """The tokens of each part, the first row of which is whole."""
    for first, end in pairwise([0, *cuts, len(ordered)]):
        part = [(number, 0 if n == 0 else s) for n, (number, s) in enumerate(ordered[first:end])]
        yield sum(rows[number].num_tokens - num_shared for number, num_shared in part)


def test_rows_that_nobody_asked_for_are_left_out():
    (batch,) = pack(ROWS, [3, 2], PackingLayout.SHARED_PREFIXES, CPU)
    assert batch.rows == [3]
    assert pack(ROWS, [2], PackingLayout.SHARED_PREFIXES, CPU) == []


def seen_by(batch, index):
    """The packed positions that the token at `index` attends to, itself included."""
    if batch.segments is None:
        num_shared = 0 if batch.shared_ids is None else batch.shared_ids.numel()
        shared = range(min(num_shared, index + 1))
        if index < num_shared:
            return [*shared]
        first = index - (index - num_shared) % batch.input_ids.shape[1]
        return [*shared, *range(first, index + 1)]
    (own,) = (s for s in batch.segments if s.start <= index < s.start + s.length)
    return own.keys[: own.prefix_length + index + 1 - own.start]


@pytest.mark.parametrize("layout", PackingLayout)
def test_whatever_the_cuts_each_token_sees_its_own_sequence(layout):
    rng = random.Random(0)
    for _ in range(150):
        rows = [PackedRow(*row) for row in random_tree_rows(rng, rng.choice([5, 9]))]
        numbers = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))))
        max_tokens = rng.choice([None, 1, 10, 25])
        batches = pack(rows, numbers, layout, CPU, max_tokens)
        scored = [n for n in numbers if rows[n].completion_ids or layout == "whole_rows"]
        if layout == "shared_prefixes" and max_tokens is None and scored:
            assert batches[0].num_tokens == tokens_of_tree([rows[n] for n in scored])
        assert sorted(n for batch in batches for n in batch.rows) == scored
        for batch in batches:
            assert max_tokens is None or batch.num_tokens <= max_tokens or len(batch.rows) == 1
            check_each_token(rows, batch)


def tokens_of_tree(rows):
    """The number of different beginnings, by the definition."""
    sequences = [(*row.prompt_ids, *row.completion_ids[:-1]) for row in rows]
    return len({ids[:n] for ids in sequences for n in range(1, len(ids) + 1)})


def check_each_token(rows, batch):
    ids, positions = batch.input_ids.flatten().tolist(), batch.position_ids.flatten().tolist()
    if batch.shared_ids is not None:
        shared = batch.shared_ids.flatten().tolist()
        ids, positions = shared + ids, [*range(len(shared)), *positions]
    predicting_K, labels_K, scores_R = batch.predicting_K, batch.labels_K, batch.scores_R
    assert len(predicting_K) == len(labels_K) == len(batch.scored)
    for label, (number, t) in zip(labels_K.tolist(), batch.scored, strict=True):
        assert rows[number].completion_ids[t] == label
    if scores_R is not None:
        predicting_K, labels_K = predicting_K[scores_R], labels_K[scores_R]
    predicting = iter(predicting_K.tolist())
    for number, length in zip(batch.rows, batch.lengths, strict=True):
        prompt, completion = rows[number][:2]
        assert length == len(completion)
        for t in range(length):
            seen = seen_by(batch, next(predicting))
            assert [ids[index] for index in seen] == [*prompt, *completion[:t]]
            assert [positions[index] for index in seen] == list(range(len(prompt) + t))
    assert next(predicting, None) is None
    labels = [token for number in batch.rows for token in rows[number].completion_ids]
    assert labels_K.tolist() == labels
    if batch.is_token is not None:
        assert batch.num_tokens <= MAX_PADDING * int(batch.is_token.sum())
    elif batch.shared_ids is not None:
        # One token after a prompt is padded to two.
        completions = [2 if length == 2 else length - 1 for length in batch.lengths]
        num_useful = batch.shared_ids.numel() + sum(completions)
        assert batch.num_tokens <= MAX_PADDING * num_useful
    else:
        assert sum(segment.length for segment in batch.segments) == batch.num_tokens


def test_the_rows_to_compare_are_two_that_go_on_apart_and_the_longest():
    rows = [PackedRow(B, [1]), PackedRow([9], [2]), *ROWS, PackedRow([7], [1] * 9)]
    numbers, chosen = representative(rows)
    # Row 3 has the prompt of rows 2 and 6 too, and no token of its own.
    assert numbers == [6, 2, 7, 5]
    assert chosen == [rows[number] for number in numbers]


def test_rows_of_one_token_to_compare_go_on_from_a_part_of_their_prompt():
    _, chosen = representative([PackedRow(A, [1]), PackedRow(A, [2])])
    (batch,) = pack(chosen, range(len(chosen)), PackingLayout.SHARED_PREFIXES, CPU)
    assert {segment.length for segment in batch.segments if segment.prefix} == {1}


@pytest.mark.parametrize("max_tokens", [None, 6])
def test_a_fork_of_one_token_is_padded_to_two(max_tokens):
    """A recurrent layer would compute the one by a step of decoding, over its own state."""
    rows = [PackedRow(A, [20, 21]), PackedRow(A, [22, 23]), PackedRow(A, [24])]
    batches = pack(rows, range(3), PackingLayout.FORKED_STATES, CPU, max_tokens)
    forks = [batch.input_ids.tolist() for batch in batches]
    # A completion of one token is predicted by the prompt alone.
    of_one = [[]]
    if max_tokens is None:
        assert forks == [[[20, 0], [22, 0]], of_one]
    else:
        assert forks == [[[20, 0]], [[22, 0]], of_one]


def test_where_no_rows_share_anything_the_longest_shares_its_prompt_with_itself():
    for rows in ([ROWS[0]], [ROWS[0], ROWS[0]], [ROWS[0], PackedRow(B, [1])]):
        numbers, chosen = representative(rows)
        assert numbers[:2] == [0, 0]
        (batch,) = pack(chosen, range(len(chosen)), PackingLayout.SHARED_PREFIXES, CPU)
        lengths = {segment.length for segment in batch.segments if segment.prefix}
        assert lengths == {1}
