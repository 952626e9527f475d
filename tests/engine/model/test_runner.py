import pytest
import torch
from tiny import tiny_model

from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.paged import PagedCache
from cb_rollout.engine.model.runner import BatchLayout, ModelRunner

BLOCKS_PER_ROW = 3
BLOCK_SIZE = 4


def prompts(*lengths):
    return [[3 + (7 * row + 5 * i) % 200 for i in range(n)] for row, n in enumerate(lengths)]


def prefilled_and_decoded(runner, rows):
    """Return logits after each row's last token but one, and after the last."""
    table_rows = list(range(len(rows)))
    cache = PagedCache(
        runner.probe(),
        num_blocks=BLOCKS_PER_ROW * len(rows),
        block_size=BLOCK_SIZE,
        num_table_rows=len(rows),
        device=runner.device,
    )
    table = BlockTable(len(rows), BLOCK_SIZE, runner.device)
    table.write(
        [
            (table_row, index, 1 + table_row * BLOCKS_PER_ROW + index)
            for table_row in table_rows
            for index in range(BLOCKS_PER_ROW)
        ]
    )
    lengths = [len(row) for row in rows]
    first = runner.logits(
        [row[:-1] for row in rows], [n - 1 for n in lengths], table_rows, cache, table
    )
    return first, runner.logits([row[-1:] for row in rows], lengths, table_rows, cache, table)


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
@pytest.mark.parametrize("batch_layout", BatchLayout)
def test_logits_are_in_the_order_of_rows_under_every_batch_layout(family, batch_layout):
    runner = ModelRunner(tiny_model(family), None)
    runner.batch_layout = batch_layout
    rows = prompts(4, 6, 5, 4, 6)
    first, second = prefilled_and_decoded(runner, rows)
    for index, row in enumerate(rows):
        plain = runner.plain_logits(row)
        torch.testing.assert_close(first[index], plain[-2], atol=1e-4, rtol=0)
        torch.testing.assert_close(second[index], plain[-1], atol=1e-4, rtol=0)
