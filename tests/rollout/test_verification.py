import math

import pytest
import torch
from tiny import tiny_model

from cb_rollout import InvalidRequestError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.numerics import agreement
from cb_rollout.rollout.verification import drift


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
        noise=0.0002,
    )
    assert (report.request_id, report.position, report.first_position) == ("b", 3, 1)
    assert drift({"a": [-1.0]}, {"a": [-1.001]}, noise=0.0002).first_position is None


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


def test_rounding_is_estimated_where_a_sequence_takes_long_to_measure(monkeypatch):
    """A long sequence is not run in float64, and a short one beside it was."""
    model = tiny_model()
    num_parameters = sum(map(torch.numel, model.parameters()))
    monkeypatch.setattr(agreement, "MAX_DOUBLE_PRODUCTS", 20 * num_parameters)
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        generator.generate_batch([[3, 4, 5], [6] * 30], max_new_tokens=8)
        report = generator.verify(2)
    assert report.max <= 1e-5
    assert report.agreement


def test_a_verification_of_nothing_is_an_error_that_says_when_to_verify():
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0)) as generator:
        with pytest.raises(InvalidRequestError, match="no rollout was generated yet"):
            generator.verify(4)
        generator.generate_batch([[3, 4, 5], [6, 7]], max_new_tokens=4)
        assert generator.verify(4).num_tokens == 8
        generator.sync_weights()
        with pytest.raises(
            InvalidRequestError, match="2 were sampled before the current policy version, 1"
        ):
            generator.verify(4)


def test_sequences_that_no_plain_forward_repeats_are_no_verification():
    config = RolloutConfig(seed=0, logprobs_mode="processed")
    params = SamplingParams(max_new_tokens=4, repetition_penalty=1.5)
    with RolloutGenerator(tiny_model(), config) as generator:
        generator.generate_batch([[3, 4, 5]], sampling_params=params)
        with pytest.raises(InvalidRequestError, match="1 were sampled from changed logits"):
            generator.verify(1)
        # One that can be compared is enough.
        mixed = [params, SamplingParams(max_new_tokens=4)]
        generator.generate_batch([[3, 4, 5], [6, 7]], sampling_params=mixed)
        assert generator.verify(2).num_tokens == 4
