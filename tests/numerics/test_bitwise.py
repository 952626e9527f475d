"""numerics="bitwise": rollout log-probabilities are the trainer's forward's, bit for bit."""

import random

import pytest
import torch
from tiny import largest_difference, tiny_model
from transformers import PreTrainedModel

import cb_rollout
from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams, bitwise
from cb_rollout.engine.attention.traced_forward import STEPS_BEFORE_TRACE
from cb_rollout.engine.numerics import attention, operators

LENGTHS = (3, 26, 1, 17)


def rows_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(3, 250) for _ in range(length)] for length in lengths]


def padded(
    model: PreTrainedModel, rows: list[list[int]], starts: list[int], width: int
) -> list[torch.Tensor]:
    """Each row's logits, by one forward of a batch in which it begins at that column."""
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[index, start : start + len(row)] = torch.tensor(row)
        mask[index, start : start + len(row)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [logits[i, s : s + len(r)] for i, (r, s) in enumerate(zip(rows, starts, strict=True))]


def alone(model: PreTrainedModel, rows: list[list[int]]) -> list[torch.Tensor]:
    return [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]


def are_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "bloom", "gpt_oss"])
def test_a_row_is_the_same_bits_padded_on_either_side(family, dtype):
    model, rows = tiny_model(family).to(dtype), rows_of(LENGTHS)
    with bitwise(model):
        with torch.no_grad():
            expected = alone(model, rows)
        for starts in ([0] * 4, [30 - len(row) for row in rows], [4, 1, 9, 2]):
            assert are_equal(padded(model, rows, starts, 30), expected)


def test_gradients_are_the_plain_forwards():
    model, rows = tiny_model("gpt_oss"), rows_of(LENGTHS)
    starts = [30 - len(row) for row in rows]

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        # With a mask and no positions, the plain forward counts columns.
        torch.cat(padded(model, rows[1:2], [0], 26)).logsumexp(-1).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    with bitwise(model):
        found = gradients()
        assert any("sinks" in name for name in found)
        torch.cat(padded(model, rows, starts, 30)).sum().backward()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.fast_cases("mistral-settings2")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"block_size": 3, "max_batch_tokens": 16}),
        ("qwen3", {"num_blocks": 20, "block_size": 4}),
        ("mistral", {"use_cuda_graph": False}),
        pytest.param("qwen3_moe", {"allow_block_sharing": False}, marks=pytest.mark.slow),
        pytest.param("bloom", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.slow),
        pytest.param("lfm2", {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"block_size": 5}, marks=pytest.mark.slow),
        pytest.param("llama", {"max_batch_tokens": 8}, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
    ],
)
def test_sampled_logprobs_are_those_of_a_plain_forward(family, settings):
    model = tiny_model(family)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.7)
    config = RolloutConfig(numerics="bitwise", seed=1, **settings)
    with RolloutGenerator(model, config) as generator:
        outputs = generator.generate_batch(
            rows_of(LENGTHS), sampling_params=params, num_return_sequences=2
        )
    assert not operators.are_installed()
    with bitwise(model):
        assert largest_difference(model, outputs.values(), temperature=0.7) == 0


def test_tokens_do_not_depend_on_what_else_is_in_the_batch():
    model, rows = tiny_model(), rows_of(LENGTHS)
    mixed = [
        SamplingParams(max_new_tokens=40, ignore_eos=True, seed=index, **more)
        for index, more in enumerate(({}, {"top_k": 5}, {"temperature": 0.0}, {"min_p": 0.1}))
    ]
    config = RolloutConfig(numerics="bitwise")
    with RolloutGenerator(model, config) as generator:
        together = generator.generate_batch(rows, sampling_params=mixed)
        for row, params, beside in zip(rows, mixed, together.values(), strict=True):
            (single,) = generator.generate_batch([row], sampling_params=[params]).values()
            assert single.generated_tokens == beside.generated_tokens
            assert single.logprobs == beside.logprobs


@pytest.mark.slow
def test_long_rollouts_run_from_a_trace():
    config = RolloutConfig(numerics="bitwise")
    params = SamplingParams(max_new_tokens=STEPS_BEFORE_TRACE + 20, ignore_eos=True)
    with RolloutGenerator(tiny_model(), config) as generator:
        outputs = generator.generate_batch(rows_of(LENGTHS), sampling_params=params)
        assert "from a trace" in generator.manager.decode_path
    with bitwise(generator.manager.model):
        assert largest_difference(generator.manager.model, outputs.values()) == 0


@pytest.mark.fast_cases("qwen3_5_text")
@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
def test_a_hybrid_that_chunks_its_scan_is_refused(family):
    with pytest.raises(ConfigurationError, match="computes different bits"):
        RolloutGenerator(tiny_model(family), RolloutConfig(numerics="bitwise"))


def test_what_cannot_be_bitwise_is_refused_in_one_sentence():
    for model, reason in (
        (tiny_model().double(), "computes in torch.float64"),
        (tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "rope_type"),
        (tiny_model("gpt2", resid_pdrop=0.1).train(), "drops activations at random"),
        (tiny_model().to("meta"), "it runs on a CPU"),
    ):
        with pytest.raises(ConfigurationError, match=reason), bitwise(model):
            pass
    for settings in (
        {"rollout_dtype": "bfloat16"},
        {"use_default_compile_configs": True},
    ):
        with pytest.raises(ConfigurationError, match="numerics='bitwise'"):
            RolloutConfig(numerics="bitwise", **settings)


def test_the_public_name_is_the_context_manager():
    assert cb_rollout.bitwise is bitwise


@pytest.mark.parametrize(
    ("arguments", "mask", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, None, "attends with position_bias"),
        ({"dropout": 0.1}, None, r"\(rate 0.1\); set attention_dropout=0"),
        ({}, torch.ones(2, 2, dtype=torch.bool), "a mask of 2 dimensions"),
        ({}, None, "from 2 queries to 3 keys without a mask"),
    ],
)
def test_attention_that_has_no_kernel_is_refused_in_one_sentence(arguments, mask, reason):
    module = tiny_model().model.layers[0].self_attn
    query, key = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 3, 8)
    with pytest.raises(ConfigurationError, match=f"numerics='bitwise': .*{reason}"):
        attention.attend(lambda: None, module, query, key, key, mask, **arguments)


def test_attention_in_another_dtype_or_by_other_kernels_is_refused(monkeypatch):
    module, states = tiny_model().model.layers[0].self_attn, torch.zeros(1, 4, 2, 8)
    with pytest.raises(ConfigurationError, match=r"attends in torch\.float64 on cpu"):
        attention.attend(lambda: None, module, *[states.double()] * 3, None)
    monkeypatch.setattr(module.config, "_attn_implementation", "flex_attention")
    with pytest.raises(ConfigurationError, match="attn_implementation='flex_attention' computes"):
        attention.attend(lambda: None, module, *[states] * 3, None)
