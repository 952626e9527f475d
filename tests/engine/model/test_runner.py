from dataclasses import replace

import pytest
import torch
from tiny import plain_logprobs, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.attention import packed
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.model.runner import BatchLayout, ModelRunner

BLOCK_SIZE = 4


def prompts(*lengths):
    return [[3 + (7 * row + 5 * i) % 200 for i in range(n)] for row, n in enumerate(lengths)]


def runner_of(model, batch_layout):
    runner = ModelRunner(model, None)
    runner.use(replace(runner.execution, batch_layout=batch_layout))
    return runner


class Pages:
    """Forwards of one model over rows on pages."""

    def __init__(self, runner, rows, layout=None):
        self.runner, self.rows = runner, rows
        self.num_computed = [0] * len(rows)
        blocks_per_row = -(-max(map(len, rows)) // BLOCK_SIZE)
        self.cache = PagedCache(
            layout or runner.probe(),
            num_blocks=blocks_per_row * len(rows),
            block_size=BLOCK_SIZE,
            num_table_rows=len(rows),
            device=runner.device,
        )
        self.table = BlockTable(len(rows), BLOCK_SIZE, runner.device)
        self.table.write(
            [
                (row, index, 1 + row * blocks_per_row + index)
                for row in range(len(rows))
                for index in range(blocks_per_row)
            ]
        )

    def logits(self, ends):
        """Compute rows up to these ends, `{row: end}`; return logits after each, `[B, V]`."""
        new = [self.rows[row][self.num_computed[row] : end] for row, end in ends.items()]
        for row, end in ends.items():
            self.num_computed[row] = end
        pages = self.cache, self.table
        return self.runner.logits(ForwardBatch(new, list(ends.values()), list(ends), *pages))


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
@pytest.mark.parametrize("batch_layout", BatchLayout)
def test_logits_are_in_the_order_of_rows_under_every_batch_layout(family, batch_layout):
    if (family, batch_layout) == ("lfm2", BatchLayout.PACKED):
        pytest.skip("recurrent layers are not packed")
    runner = runner_of(tiny_model(family), batch_layout)
    rows = prompts(4, 6, 5, 4, 6)
    pages = Pages(runner, rows)
    first = pages.logits({row: len(ids) - 1 for row, ids in enumerate(rows)})
    second = pages.logits({row: len(ids) for row, ids in enumerate(rows)})
    for index, row in enumerate(rows):
        plain = runner.plain_logits(row)
        torch.testing.assert_close(first[index], plain[-2], atol=1e-4, rtol=0)
        torch.testing.assert_close(second[index], plain[-1], atol=1e-4, rtol=0)


# Rows that begin, with lengths far apart; some that continue beside others that begin, out of
# order and by one token too; all that are left; and a decode step.
CHUNKS = [{0: 3, 2: 40, 1: 1}, {3: 9, 2: 41, 0: 30}, {0: 33, 1: 70, 3: 60}, {1: 71, 0: 34, 3: 61}]

KINDS = {
    "groups of heads": ("qwen3", {}),
    "experts": ("qwen3_moe", {}),
    "windows": ("mistral", {"sliding_window": 5}),
    "sinks and windows": ("gpt_oss", {"sliding_window": 5}),
    "eager": ("llama", {"attn_implementation": "eager"}),
    "values of another size": ("deepseek_v3", {}),
    "learned positions": ("gpt2", {}),
}


def packed_runner(family, **settings):
    return runner_of(tiny_model(family, **settings), BatchLayout.PACKED)


@pytest.mark.parametrize(("family", "settings"), KINDS.values(), ids=KINDS)
def test_a_packed_prefill_computes_what_the_plain_forward_does(family, settings):
    runner = packed_runner(family, **settings)
    pages = Pages(runner, prompts(34, 71, 41, 61))
    plain = [runner.plain_logits(row).log_softmax(-1) for row in pages.rows]
    for ends in CHUNKS:
        found = pages.logits(ends).log_softmax(-1)
        expected = torch.stack([plain[row][end - 1] for row, end in ends.items()])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_in_16_bits_packed_rows_are_as_exact_as_padded_ones():
    half, exact = tiny_model("qwen3").bfloat16(), tiny_model("qwen3")
    exact.load_state_dict(half.state_dict())
    rows = prompts(34, 71, 41, 61)
    plain = [ModelRunner(exact, None).plain_logits(row).log_softmax(-1) for row in rows]
    errors = {}
    for batch_layout in (BatchLayout.PACKED, BatchLayout.PADDED):
        pages = Pages(runner_of(half, batch_layout), rows)
        found = torch.cat([pages.logits(ends).log_softmax(-1) for ends in CHUNKS])
        places = [place for ends in CHUNKS for place in ends.items()]
        expected = torch.stack([plain[row][end - 1] for row, end in places])
        errors[batch_layout] = (found - expected).square().mean().sqrt().item()
    assert errors[BatchLayout.PACKED] <= 1.1 * errors[BatchLayout.PADDED]


def test_a_prefill_computes_each_new_token_once_and_no_mask_of_all(monkeypatch):
    runner = packed_runner("qwen3")
    pages = Pages(runner, prompts(34, 71, 41, 61))
    tokens, masks, heads = [], [], []
    runner.model.model.layers[0].mlp.register_forward_hook(
        lambda _, args, out: tokens.append(args[0].shape[:-1].numel())
    )
    runner.model.lm_head.register_forward_hook(
        lambda _, args, out: heads.append(args[0].shape[:-1].numel())
    )
    own = packed.PackedAttention._mask

    def counted(*arguments):
        masks.append(own(*arguments).numel())
        return own(*arguments)

    monkeypatch.setattr(packed.PackedAttention, "_mask", counted)
    pages.logits({0: 34, 1: 50, 2: 41})
    assert (tokens, heads, masks) == ([34 + 50 + 41], [3], []), "no row has a history"
    pages.logits({1: 71, 3: 61})
    assert (tokens[1], heads[1]) == (21 + 61, 2)
    assert max(masks) == 21 * 71


def test_prompts_of_different_lengths_are_one_forward_of_as_many_tokens():
    model = tiny_model()
    inputs = prompts(3, 90, 17, 40, 50)
    shapes = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    with RolloutGenerator(model, RolloutConfig(max_batch_tokens=200, seed=0)) as generator:
        shapes.clear()
        params = SamplingParams(max_new_tokens=1)
        outputs = list(generator.generate_batch(inputs, sampling_params=params).values())
    assert shapes == [(1, 200)]
    for output in outputs:
        plain = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
        assert output.logprobs == pytest.approx(plain, abs=1e-5)
