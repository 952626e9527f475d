"""Rows of a batch are matched with records by what they are."""

import torch

from cb_rollout.integrations.trl.rows.loss_rows import UNKNOWN_ID, LossBatch, LossRow
from cb_rollout.integrations.trl.rows.row_index import RowIndex

PROMPT = [3, 4]


def record(number, completion, prompt=PROMPT):
    size = len(completion)
    logprobs = [-float(number)] * size
    return LossRow(number, prompt, completion, [True] * size, logprobs, [1] * size, f"req_{number}")


def batch_of(*rows, masks=None):
    """Rows of prompt and completion, padded with 0 at both sides."""
    P, T = (max(len(row[side]) for row in rows) for side in (0, 1))
    ids, mask = torch.zeros(len(rows), P + T, dtype=torch.int64), torch.zeros(len(rows), P + T)
    for number, (prompt, completion) in enumerate(rows):
        columns = slice(P - len(prompt), P + len(completion))
        ids[number, columns] = torch.tensor(prompt + completion)
        mask[number, columns] = 1
        for column in masks[number] if masks else ():
            mask[number, P + column] = 0
    return LossBatch(ids, mask.long(), T)


def index_of(*rows, num_earlier=0):
    index = RowIndex(num_earlier)
    index.begin_rollout(is_training=True)
    index.add(rows)
    return index


def ids_of(rows):
    return [row.id for row in rows]


def test_rows_are_found_in_any_order():
    index = index_of(record(0, [5, 6]), record(1, [7]), record(2, [5, 6, 7], [9]))
    batch = batch_of(([9], [5, 6, 7]), (PROMPT, [5, 6]), (PROMPT, [7]))
    assert ids_of(index.rows_of(batch, [])) == [2, 0, 1]


def test_equal_rows_take_records_in_turn_and_a_suggestion_decides_between_them():
    equal = [record(number, [5, 6]) for number in range(3)]
    index = index_of(*equal)
    batch = batch_of(*[(PROMPT, [5, 6])] * 4)
    assert ids_of(index.rows_of(batch, [])) == [0, 1, 2, 0]
    assert ids_of(index.rows_of(batch, [[equal[2], equal[2], equal[0], equal[1]]])) == [2, 2, 0, 1]


def test_a_suggestion_with_other_tokens_or_of_another_length_is_not_believed():
    first, second = record(0, [5, 6]), record(1, [5, 8])
    index, batch = index_of(first, second), batch_of((PROMPT, [5, 8]), (PROMPT, [5, 6]))
    for suggested in ([first, second], [first], [None, None], [first, second, first]):
        assert ids_of(index.rows_of(batch, [suggested])) == [1, 0]


def test_a_shorter_row_gets_the_start_of_its_record():
    index = index_of(record(0, [5, 6, 7, 8]), record(1, [5, 9, 7]))
    (row,) = index.rows_of(batch_of((PROMPT, [5, 6])), [])
    assert (row.id, row.completion_ids, row.logprobs, row.versions) == (0, [5, 6], [0, 0], [1, 1])
    assert row.finish_reason is None
    assert not row.is_stopped


def test_tokens_that_the_mask_leaves_out_need_not_be_equal():
    index = index_of(record(0, [5, 6, 7]), record(1, [5, 9, 7]))
    masked = batch_of((PROMPT, [5, 9, 3]), (PROMPT, [5, 6, 7]), masks=[[2], [0, 1, 2]])
    rows = index.rows_of(masked, [])
    assert ids_of(rows) == [1, 0]
    assert [len(row.completion_ids) for row in rows] == [2, 3]


def test_a_whole_row_is_preferred_to_the_start_of_a_longer_one():
    index = index_of(record(0, [5, 6, 7]), record(1, [5, 6]))
    assert ids_of(index.rows_of(batch_of((PROMPT, [5, 6])), [])) == [1]


def test_a_row_with_one_more_token_or_another_prompt_is_unknown():
    index = index_of(record(0, [5, 6]))
    rows = index.rows_of(batch_of((PROMPT, [5, 6, 7]), ([4], [5, 6])), [])
    assert ids_of(rows) == [UNKNOWN_ID] * 2
    assert [row.completion_ids for row in rows] == [[5, 6, 7], [5, 6]]
    assert rows[0].logprobs is None


def test_earlier_training_rollouts_are_kept_and_evaluations_are_not():
    index = index_of(record(0, [5]), num_earlier=2)
    for number, is_training in ((1, False), (2, True), (3, False), (4, True)):
        index.begin_rollout(is_training)
        index.add([record(number, [5 + number])])
    batch = batch_of(*[(PROMPT, [5 + number]) for number in range(5)])
    assert ids_of(index.rows_of(batch, [])) == [0, UNKNOWN_ID, 2, UNKNOWN_ID, 4]
    index.begin_rollout(is_training=True)
    assert ids_of(index.rows_of(batch, [])) == [UNKNOWN_ID] * 2 + [2, UNKNOWN_ID, 4]
    assert index.with_id(0) is None
    assert index.with_id(2).completion_ids == [7]


def test_the_latest_of_equal_rows_is_taken_first():
    index = index_of(record(0, [5]), num_earlier=1)
    index.begin_rollout(is_training=True)
    index.add([record(1, [5])])
    assert ids_of(index.rows_of(batch_of((PROMPT, [5]), (PROMPT, [5])), [])) == [1, 0]
