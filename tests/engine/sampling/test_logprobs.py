import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import selective_log_softmax

from cb_rollout.engine.sampling.logprobs import chosen_logprobs, drift


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    vocab_size=st.integers(1, 300),
    spread=st.floats(0, 20),
)
def test_chosen_logprobs_are_a_log_softmax_and_what_trl_recomputes(seed, rows, vocab_size, spread):
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(rows, vocab_size, generator=generator) * spread
    tokens_B = torch.randint(vocab_size, (rows,), generator=generator)
    logprobs_B, normalizers_B = chosen_logprobs(logits_BV, tokens_B)
    expected_B = logits_BV.double().log_softmax(-1).gather(1, tokens_B[:, None])[:, 0]
    torch.testing.assert_close(
        logprobs_B, expected_B.float(), rtol=0, atol=3e-7 * (10 + 8 * spread)
    )
    torch.testing.assert_close(normalizers_B, logits_BV.logsumexp(-1))
    torch.testing.assert_close(
        logprobs_B, selective_log_softmax(logits_BV, tokens_B), rtol=0, atol=0
    )


def test_a_row_that_makes_no_distribution_has_no_finite_normalizer():
    rows = [[0.0, torch.nan], [torch.inf, 0.0], [-torch.inf, -torch.inf], [-torch.inf, 0.0]]
    _, normalizers_B = chosen_logprobs(torch.tensor(rows), torch.zeros(4, dtype=torch.int64))
    assert normalizers_B.isfinite().tolist() == [False, False, False, True]


def test_drift_is_the_largest_and_the_mean_difference_and_says_where():
    report = drift({"a": [-1.0, -2.0], "b": [-3.0]}, {"a": [-1.5, -2.0], "b": [-3.25]})
    assert (report.max, report.mean, report.num_tokens) == (0.5, 0.25, 3)
    assert (report.request_id, report.position) == ("a", 0)


def test_the_estimates_are_those_of_the_probability_ratios():
    sampled, recomputed = [-1.0, -2.0, -3.0, -1.0], [-1.2, -1.9, -3.0, -1.001]
    report = drift({"a": sampled}, {"a": recomputed})
    logs = [b - a for a, b in zip(sampled, recomputed, strict=True)]
    ratios = [math.exp(log) for log in logs]
    squares = sum(ratio**2 for ratio in ratios)
    assert report.k1 == pytest.approx(-sum(logs) / 4)
    assert report.k3 == pytest.approx((sum(ratios) - 4 - sum(logs)) / 4)
    assert report.chi_squared == pytest.approx(squares / 4 - 1)
    assert report.effective_sample_size == pytest.approx(sum(ratios) ** 2 / (4 * squares))


def test_the_first_notable_difference_is_of_the_worst_sequence():
    report = drift(
        {"a": [-1.0, -1.0], "b": [-1.0, -1.0, -1.0, -1.0]},
        {"a": [-1.1, -1.0], "b": [-1.001, -1.02, -1.0, -3.0]},
    )
    assert (report.request_id, report.position, report.first_position) == ("b", 3, 1)
    assert drift({"a": [-1.0]}, {"a": [-1.001]}).first_position is None


@pytest.mark.parametrize("recomputed", [math.nan, -math.inf, math.inf])
def test_an_infinite_difference_gives_no_nan(recomputed):
    report = drift({"a": [-1.0, -2.0]}, {"a": [-1.0, recomputed]})
    assert report.max == report.mean == math.inf
    assert not any(map(math.isnan, (report.k1, report.k3, report.chi_squared)))
    assert 0 <= report.effective_sample_size <= 1


def test_nothing_compared_is_no_drift():
    report = drift({}, {})
    assert (report.max, report.mean, report.num_tokens, report.request_id) == (0.0, 0.0, 0, "")


def test_sequences_of_unequal_length_are_not_compared():
    with pytest.raises(ValueError, match="zip"):
        drift({"a": [-1.0, -2.0]}, {"a": [-1.0]})


def test_a_sequence_that_was_not_recomputed_is_an_error():
    with pytest.raises(KeyError):
        drift({"a": [-1.0]}, {})


def test_a_logprob_that_is_no_number_is_never_within_a_limit():
    report = drift({"a": [-1.0, -2.0, -3.0]}, {"a": [-1.1, math.nan, -3.0]})
    assert not report.max <= 1000
