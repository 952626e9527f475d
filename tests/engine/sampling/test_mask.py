from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import plain_logprobs, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.sampling.mask import masked_logprobs


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    vocab_size=st.integers(1, 40),
    temperature=st.floats(0.2, 2),
)
def test_they_are_a_log_softmax_of_masked_logits_with_its_gradient(
    seed, rows, vocab_size, temperature
):
    generator = torch.Generator().manual_seed(seed)
    logits_NV = 5 * torch.randn(rows, vocab_size, generator=generator)
    tokens_N = torch.randint(vocab_size, (rows,), generator=generator)
    is_kept_NV = torch.rand(rows, vocab_size, generator=generator) < 0.5
    is_kept_NV[torch.arange(rows), tokens_N] = True
    kept = [array("i", row.nonzero()[:, 0].tolist()) for row in is_kept_NV]
    ours_NV, theirs_NV = logits_NV.clone().requires_grad_(), logits_NV.clone().requires_grad_()
    logprobs_N, entropies_N = masked_logprobs(ours_NV, tokens_N, kept, temperature)
    masked_NV = (theirs_NV / temperature).masked_fill(~is_kept_NV, -torch.inf).log_softmax(-1)
    expected_N = masked_NV.gather(1, tokens_N[:, None])[:, 0]
    torch.testing.assert_close(logprobs_N, expected_N, rtol=1e-4, atol=1e-5)
    expected_N.sum().backward()
    (logprobs_N.sum() + 0 * entropies_N.sum()).backward()
    torch.testing.assert_close(ours_NV.grad, theirs_NV.grad, rtol=1e-4, atol=1e-5)
    probabilities_NV = masked_NV.detach().exp()
    entropy_N = -(probabilities_NV * masked_NV.detach().nan_to_num(neginf=0)).sum(-1)
    torch.testing.assert_close(entropies_N.detach(), entropy_N, rtol=1e-4, atol=1e-5)


def test_a_token_kept_alone_is_certain_and_has_no_gradient():
    logits = torch.randn(2, 7, requires_grad=True)
    kept = [array("i", [3]), array("i", [6])]
    logprobs, entropies = masked_logprobs(logits, torch.tensor([3, 6]), kept, 1.0)
    (logprobs + entropies).sum().backward()
    assert logprobs.tolist() == entropies.tolist() == [0, 0]
    assert logits.grad is not None
    assert not logits.grad.any()


TRUNCATED = [
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.9, "temperature": 0.7},
]


@pytest.mark.parametrize("settings", TRUNCATED, ids=str)
def test_a_generator_hands_out_what_was_kept(settings):
    model = tiny_model()
    params = SamplingParams(max_new_tokens=10, ignore_eos=True, seed=3, **settings)
    with RolloutGenerator(model, RolloutConfig(sampling_mask="replay")) as generator:
        (output,) = generator.generate_batch([[5, 6, 7]], sampling_params=params).values()
        assert generator.verify(1).max <= 1e-5
        metrics = generator.metrics()
    kept = output.kept_token_ids
    assert len(kept) == 10
    assert all(token in ids for token, ids in zip(output.generated_tokens, kept, strict=True))
    assert metrics["rollout/kept_tokens"] == sum(map(len, kept)) / 10
    whole = plain_logprobs(model, [5, 6, 7], output.generated_tokens, params.temperature)
    masses = [w - k for w, k in zip(whole, output.logprobs, strict=True)]
    assert metrics["rollout/log_kept_mass"] == pytest.approx(sum(masses) / 10, abs=1e-5)
    if settings == {"top_k": 5}:
        assert {len(ids) for ids in kept} == {5}


def test_nothing_is_kept_where_nothing_is_cut_or_nobody_asked():
    params = SamplingParams(max_new_tokens=3)
    with RolloutGenerator(tiny_model(), RolloutConfig(sampling_mask="replay")) as generator:
        (output,) = generator.generate_batch([[5, 6]], sampling_params=params).values()
        assert output.kept_token_ids is None
        assert "rollout/kept_tokens" not in generator.metrics()
    params = SamplingParams(max_new_tokens=3, top_k=5)
    with RolloutGenerator(tiny_model()) as generator:
        (output,) = generator.generate_batch([[5, 6]], sampling_params=params).values()
        assert output.kept_token_ids is None
