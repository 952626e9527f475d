"""A draft decides how many tokens a step brings, and nothing about which."""

import pytest
import torch
from fast_path import Playback, pretend_cuda
from tiny import plain_logprobs, tiny_model

from cb_rollout import FinishReason, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.attention import traced_forward as listed_forward
from cb_rollout.engine.attention.selector import BackendSelection
from cb_rollout.engine.cuda_graphs.graphs import GraphSizes
from cb_rollout.engine.model import check as model_check
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.spec_decode.ngram import MAX_DRAFT_ROWS

PROMPTS = [[5, 6, 7, 5, 6, 7], [8, 9, 10, 11, 12, 13]]
LOOPING = [
    SamplingParams(ignore_eos=True, temperature=temperature, max_new_tokens=40)
    for temperature in (0.0, 0.3)
]
# So cold that a random model soon repeats itself.


def looping_model(family, **settings):
    """One that has few words, and so comes back to what it said."""
    return tiny_model(family, vocab_size=24, **settings)


def outputs_of(generator, params=LOOPING, inputs=PROMPTS, num_return_sequences=1, **settings):
    """Equal prompts are a group, as the sequences of one prompt are, and may be greedy."""
    many = params if isinstance(params, list) else [params] * len(inputs)
    return list(
        generator.generate_batch(
            [prompt for prompt in inputs for _ in range(num_return_sequences)],
            sampling_params=[wanted for wanted in many for _ in range(num_return_sequences)],
            **settings,
        ).values()
    )


def without_drafts(model, *args, config=None, **settings):
    config = RolloutConfig(seed=3, num_speculative_tokens=0, **(config or {}))
    with RolloutGenerator(model, config) as generator:
        outputs = outputs_of(generator, *args, **settings)
        assert counters_of(generator).drafted_tokens == 0
        return outputs


def counters_of(generator):
    return generator.manager.counters


def assert_same(outputs, expected):
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.generated_tokens == theirs.generated_tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert ours.finish_reason == theirs.finish_reason
        assert ours.policy_versions == theirs.policy_versions


def assert_right(outputs, model):
    for output in outputs:
        temperature = 1.0 if output.prompt_ids == PROMPTS[0] else 0.3
        plain = plain_logprobs(model, output.prompt_ids, output.generated_tokens, temperature)
        assert output.logprobs == pytest.approx(plain, abs=2e-5)


def test_a_draft_that_comes_true_saves_forwards():
    model = looping_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        outputs_of(generator, LOOPING[0], PROMPTS[:1])
        counters = counters_of(generator)
        assert counters.decode_forwards == 39 - counters.accepted_tokens < 30


def gathered(monkeypatch):
    choice = BackendSelection(None, "for comparison")
    monkeypatch.setattr(model_check, "select_backend", lambda *_, **__: choice)


def traced(monkeypatch):
    monkeypatch.setattr(listed_forward, "STEPS_BEFORE_TRACE", 2)


def untraced(monkeypatch):
    monkeypatch.setattr(listed_forward, "MOST_TRACES", 0)


@pytest.mark.parametrize("path", [gathered, untraced, traced])
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "gpt_oss"),
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("deepseek_v3", "qwen3_moe", "gpt2", "mistral", "bloom")
        ),
    ],
)
def test_tokens_are_the_same_on_every_path(path, family, monkeypatch):
    model = looping_model(family)
    expected = without_drafts(model, num_return_sequences=2)
    path(monkeypatch)
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        outputs = outputs_of(generator, num_return_sequences=2)
        counters = counters_of(generator)
        assert 0 < counters.accepted_tokens <= counters.drafted_tokens
        assert generator.manager.engine.num_blocks_used == 0
    assert_same(outputs, expected)
    assert_right(outputs, model)


@pytest.mark.parametrize(
    ("use_cuda_graph", "temperature", "num_sequences"),
    [(False, 0.0, 2), (None, 0.0, 1), pytest.param(None, 0.1, 2, marks=pytest.mark.slow)],
)
def test_tokens_are_the_same_by_kernels(use_cuda_graph, temperature, num_sequences, monkeypatch):
    pytest.importorskip("triton")
    model = looping_model(
        "qwen3", num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1
    )
    params = SamplingParams(ignore_eos=True, temperature=temperature, max_new_tokens=14)
    # So long that what rows have in common, a prompt or all before a draft, is read once for all,
    # and so that a draft begins in one block and ends in another.
    inputs = [PROMPTS[0] * 12 + PROMPTS[0][:4]]
    asked = {"params": params, "inputs": inputs, "num_return_sequences": num_sequences}
    expected = without_drafts(model, **asked)
    pretend_cuda(monkeypatch)
    config = RolloutConfig(seed=3, use_cuda_graph=use_cuda_graph, block_size=8)
    with RolloutGenerator(model, config) as generator:
        outputs = outputs_of(generator, **asked)
        counters, graphs = counters_of(generator), generator.manager.engine._graphs
        assert counters.accepted_tokens > 0
    assert_same(outputs, expected)
    if use_cuda_graph is None and not torch.cuda.is_available():
        # Of as many rows as drafts may take, and none of them once the requests ran.
        assert Playback.num_captures == graphs.num_graphs == len(GraphSizes().up_to(MAX_DRAFT_ROWS))


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.0}, {"stop_token_ids": [5, 9]}],
)
def test_tokens_are_the_same_however_they_are_sampled(settings):
    model = looping_model("llama")
    params = SamplingParams(
        **{"ignore_eos": True, "temperature": 0.3, "max_new_tokens": 60} | settings
    )
    expected = without_drafts(model, params, num_return_sequences=3)
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        assert_same(outputs_of(generator, params, num_return_sequences=3), expected)
        assert counters_of(generator).accepted_tokens > 0


def test_what_truncation_left_is_remembered_of_sampled_tokens_alone():
    model = looping_model("llama")
    params = SamplingParams(ignore_eos=True, temperature=0.4, top_k=4, max_new_tokens=40)
    expected = without_drafts(model, params, config={"sampling_mask": "replay"})
    with RolloutGenerator(model, RolloutConfig(seed=3, sampling_mask="replay")) as generator:
        outputs = outputs_of(generator, params)
        counters = counters_of(generator)
        assert counters.drafted_tokens > counters.accepted_tokens > 0
        assert counters.truncated_tokens == 80
    assert_same(outputs, expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert [list(kept) for kept in ours.kept_token_ids] == [
            list(kept) for kept in theirs.kept_token_ids
        ]


@pytest.mark.parametrize("num_tokens", range(20, 32))
def test_a_sequence_with_drafts_is_as_long_as_asked(num_tokens):
    model = looping_model("qwen3")
    whole = without_drafts(model, LOOPING[0], PROMPTS[:1])[0].generated_tokens
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        (output,) = outputs_of(generator, LOOPING[0], PROMPTS[:1], max_new_tokens=num_tokens)
        assert counters_of(generator).accepted_tokens > 0
    assert output.generated_tokens == whole[:num_tokens]
    assert len(output.logprobs) == num_tokens
    assert output.finish_reason is FinishReason.LENGTH


def test_a_draft_takes_no_blocks_from_anybody():
    model = looping_model("qwen3")
    expected = without_drafts(model, num_return_sequences=2)
    config = RolloutConfig(seed=3, block_size=4, num_blocks=26)
    tight = without_drafts(
        model, num_return_sequences=2, config={"block_size": 4, "num_blocks": 26}
    )
    with RolloutGenerator(model, config) as generator:
        assert_same(outputs_of(generator, num_return_sequences=2), expected)
        assert generator.manager.engine.num_blocks_used == 0
    assert_same(tight, expected)


def test_a_forward_that_fails_with_a_draft_is_run_without(monkeypatch):
    model = looping_model("qwen3")
    expected = without_drafts(model)
    logits, num_failed = ModelRunner.logits, 0

    def fails(self, batch):
        nonlocal num_failed
        if len(set(batch.table_rows)) < len(batch):
            num_failed += 1
            raise RuntimeError("not so many")
        return logits(self, batch)

    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        with monkeypatch.context() as patched:
            patched.setattr(ModelRunner, "logits", fails)
            assert_same(outputs_of(generator), expected)
        # A group whose drafts keep failing is tried less and less.
        assert 0 < num_failed < 30
        assert counters_of(generator).drafted_tokens == 0


def test_weights_that_change_between_drafts_are_seen():
    model = looping_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        outputs_of(generator)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        generator.sync_weights()
        outputs = outputs_of(generator)
        assert_right(outputs, model)
        assert [output.policy_versions for output in outputs] == [[(1, 40)]] * 2
        assert counters_of(generator).accepted_tokens > 0


def test_a_model_with_recurrent_states_has_no_drafts():
    with RolloutGenerator(looping_model("lfm2"), RolloutConfig(seed=3)) as generator:
        outputs_of(generator)
        assert counters_of(generator).drafted_tokens == 0
