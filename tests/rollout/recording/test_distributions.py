import math

import numpy as np
import pytest

from cb_rollout.rollout.recording.distributions import (
    DRIFT,
    LOGPROBS,
    NUM_BINS,
    RATIO,
    TokenDistributions,
    joined_histograms,
    joined_ranges,
)

SAMPLED = [[-0.5, -1.25, -3.0], [-0.125], [-2.0, -0.75]]
TRAINED = [[-0.5, -1.5, -2.0], [-0.25], [-2.5, -0.75]]


def filled(sampled=SAMPLED, trained=TRAINED):
    distributions = TokenDistributions()
    for ours, theirs in zip(sampled, trained, strict=True):
        distributions.add_sampled(ours)
        distributions.add_compared(ours, theirs)
    return distributions


def by_hand():
    sampled = np.array([value for row in SAMPLED for value in row])
    trained = np.array([value for row in TRAINED for value in row])
    return {LOGPROBS: sampled, DRIFT: sampled - trained, RATIO: np.exp(trained - sampled)}


def test_the_drift_is_sampled_minus_trainers_and_the_ratio_trainers_over_sampled():
    drift = [0.0, 0.25, -1.0, 0.125, 0.5, 0.0]
    values = filled().values()
    assert values[DRIFT].tolist() == drift
    assert values[RATIO] == pytest.approx([math.exp(-x) for x in drift])
    assert values[LOGPROBS].tolist() == [-0.5, -1.25, -3.0, -0.125, -2.0, -0.75]


def test_the_histograms_are_numpys():
    histograms = filled().histograms()
    assert list(histograms) == [LOGPROBS, DRIFT, RATIO]
    for name, values in by_hand().items():
        counts, edges = np.histogram(values, NUM_BINS)
        assert histograms[name][0].tolist() == counts.tolist(), name
        assert histograms[name][1] == pytest.approx(edges), name


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_the_histograms_of_several_processes_are_those_of_one(num_processes):
    parts = [
        filled(SAMPLED[rank::num_processes], TRAINED[rank::num_processes])
        for rank in range(num_processes)
    ]
    ranges = joined_ranges([part.ranges() for part in parts])
    joined = joined_histograms(ranges, [part.counts(ranges) for part in parts])
    alone = filled().histograms()
    assert list(joined) == list(alone)
    for name, (counts, edges) in alone.items():
        assert joined[name][0].tolist() == counts.tolist()
        assert joined[name][1].tolist() == edges.tolist()


def test_a_process_without_a_comparison_adds_nothing_to_the_others():
    alone = TokenDistributions()
    alone.add_sampled([-1.0])
    parts = [alone, filled()]
    ranges = joined_ranges([part.ranges() for part in parts])
    joined = joined_histograms(ranges, [part.counts(ranges) for part in parts])
    assert sum(joined[LOGPROBS][0]) == 7
    assert sum(joined[DRIFT][0]) == 6


def test_values_that_are_not_finite_are_left_out_of_drift_and_ratio_alike():
    distributions = filled([[-1.0, math.nan, -1e4, -2.0]], [[-1.5, -1.0, -1.0, -math.inf]])
    values = distributions.values()
    assert values[LOGPROBS].tolist() == [-1.0, -1e4, -2.0]
    # The ratio of the third would overflow.
    assert values[DRIFT].tolist() == [0.5]
    assert distributions.comparison().num_tokens == 1


def test_equal_values_are_one_bin():
    distributions = TokenDistributions()
    distributions.add_sampled([-1.0, -1.0])
    counts, edges = distributions.histograms()[LOGPROBS]
    assert counts.max() == 2
    assert (edges[0], edges[-1]) == (-1.5, -0.5)


def test_of_nothing_there_is_no_histogram():
    assert TokenDistributions().histograms() == {}
    assert TokenDistributions().comparison() is None


def test_the_comparison_sums_up_the_tokens():
    drift = [0.0, 0.25, -1.0, 0.125, 0.5, 0.0]
    found = filled().comparison()
    assert found.num_tokens == 6
    assert found.sum_difference == sum(map(abs, drift))
    assert found.max_difference == 1.0
    assert found.sum_ratio == pytest.approx(sum(math.exp(-x) for x in drift))
    assert (found.min_ratio, found.max_ratio) == pytest.approx((math.exp(-0.5), math.e))
