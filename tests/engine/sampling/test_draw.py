import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from trl.trainer.utils import selective_log_softmax

from cb_rollout.config.enums import LogprobsMode
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.draw import (
    chosen_logprobs,
    create_sampling_batch,
    draw,
    exponentials,
    sample,
    uniforms,
)
from cb_rollout.engine.sampling.truncation import truncate

CPU = torch.device("cpu")
POLICY, PROCESSED = LogprobsMode.POLICY, LogprobsMode.PROCESSED
MASK_64 = (1 << 64) - 1
JUST_BELOW_1 = 1 - 2**-53
SEEDS = st.integers(-(2**63), 2**63 - 1)

TRUNCATIONS = [
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
]


def batch_of(params, seeds=None):
    requests = [
        Request("r", [1], wanted, 1, frozenset(), seed=row if seeds is None else seeds[row])
        for row, wanted in enumerate(params)
    ]
    return create_sampling_batch(requests, CPU)


def random_logits(seed, rows, vocab_size, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * spread


def warped(logits_BV, params):
    """What transformers' `generate` samples from."""
    logits_BV = TemperatureLogitsWarper(params.temperature)(None, logits_BV)
    if params.top_k:
        logits_BV = TopKLogitsWarper(params.top_k)(None, logits_BV)
    if params.top_p < 1:
        logits_BV = TopPLogitsWarper(params.top_p)(None, logits_BV)
    if params.min_p:
        logits_BV = MinPLogitsWarper(params.min_p)(None, logits_BV)
    return logits_BV


def truncated(logits_BV, params):
    truncation = batch_of([params] * len(logits_BV)).truncation
    scaled_BV = logits_BV / params.temperature
    return scaled_BV if truncation is None else truncate(scaled_BV, truncation)


def zeros(rows):
    return torch.zeros(rows, dtype=torch.int64)


def split_mix_64(seed, count):
    """The published algorithm, on Python's integers."""
    state, draws = seed & MASK_64, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK_64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
        draws.append(((z ^ (z >> 31)) >> 11) * 2.0**-53)
    return draws


@given(seed=SEEDS, count=st.integers(1, 20))
def test_uniforms_are_the_published_split_mix_64(seed, count):
    draws = uniforms(torch.full((count,), seed), torch.arange(count))
    assert draws.tolist() == split_mix_64(seed, count)
    assert all(0 <= u < 1 for u in draws.tolist())


def test_uniforms_of_seed_1234567_are_as_widely_published():
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    draws = uniforms(torch.full((3,), 1234567), torch.arange(3))
    assert draws.tolist() == [(z >> 11) * 2.0**-53 for z in published]


@given(seeds=st.lists(SEEDS, min_size=1, max_size=8), index=st.integers(0, 10**6))
def test_a_uniform_depends_on_its_own_seed_and_index_only(seeds, index):
    together = uniforms(torch.tensor(seeds), torch.full((len(seeds),), index))
    alone = [uniforms(torch.tensor([s]), torch.tensor([index])).item() for s in seeds]
    assert together.tolist() == alone


def chi_squared_is_small(counts_V, probabilities_V):
    """Within six standard deviations of chance, and no count where there is no probability."""
    possible_V = probabilities_V > 0
    expected_V = probabilities_V[possible_V].double() * counts_V.sum()
    assert expected_V.min() > 20, "too few draws for the test to mean anything"
    statistic = ((counts_V[possible_V] - expected_V) ** 2 / expected_V).sum().item()
    freedom = max(1, len(expected_V) - 1)
    return not counts_V[~possible_V].any() and statistic < freedom + 6 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("truncation", [{}, *TRUNCATIONS])
def test_tokens_are_as_frequent_as_they_are_likely(temperature, truncation):
    params = SamplingParams(temperature=temperature, **truncation)
    rows, draws_each = 3000, 4
    logits_1V = random_logits(3, 1, 8, spread=0.8)
    batch = batch_of([params] * rows)
    counts_V = torch.zeros(8)
    for index in range(draws_each):
        tokens_B, *_ = sample(logits_1V.expand(rows, 8), batch, zeros(rows) + index, POLICY)
        counts_V += tokens_B.bincount(minlength=8)
    assert chi_squared_is_small(counts_V, warped(logits_1V, params)[0].softmax(-1))
    assert not chi_squared_is_small(counts_V, (logits_1V[0] / (temperature + 0.4)).softmax(-1))


@pytest.mark.parametrize("truncation", [{}, *TRUNCATIONS])
def test_what_is_sampled_from_processed_logits_is_what_processed_logprobs_say(truncation):
    params = SamplingParams(temperature=0.8, **truncation)
    rows, draws_each = 3000, 4
    logits_1V = random_logits(3, 1, 8, spread=0.8)
    processed_1V = logits_1V.flip(-1)
    processed_1V[0, 2] = -torch.inf
    expected_V = warped(processed_1V, params)[0].log_softmax(-1)
    batch, counts_V = batch_of([params] * rows), torch.zeros(8)
    for index in range(draws_each):
        sampled = sample(
            logits_1V.expand(rows, 8),
            batch,
            zeros(rows) + index,
            PROCESSED,
            processed_1V.expand(rows, 8),
        )
        counts_V += sampled.token_ids_B.bincount(minlength=8)
        torch.testing.assert_close(
            sampled.logprobs_B, expected_V[sampled.token_ids_B], rtol=0, atol=2e-6
        )
    assert chi_squared_is_small(counts_V, expected_V.exp())
    assert not chi_squared_is_small(counts_V, logits_1V[0].softmax(-1))


def test_policy_logprobs_are_of_the_models_logits_whatever_was_processed():
    many = [SamplingParams(temperature=0.7), SamplingParams(temperature=0), SamplingParams(top_k=2)]
    logits_BV, processed_BV = random_logits(3, 3, 20), random_logits(4, 3, 20)
    sampled = sample(logits_BV, batch_of(many), zeros(3), POLICY, processed_BV)
    plain = sample(processed_BV, batch_of(many), zeros(3), POLICY)
    assert sampled.token_ids_B.tolist() == plain.token_ids_B.tolist()
    scaled_BV = logits_BV / torch.tensor([[0.7], [1.0], [1.0]])
    expected_B = scaled_BV.log_softmax(-1).gather(1, sampled.token_ids_B[:, None])[:, 0]
    torch.testing.assert_close(sampled.logprobs_B, expected_B, rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", [POLICY, PROCESSED])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(**TRUNCATIONS[-1])])
def test_a_row_that_has_no_token_left_is_told_from_one_without_a_distribution(params, mode):
    logits_BV = random_logits(4, 3, 30)
    logits_BV[2, 1] = torch.nan
    processed_BV = logits_BV.clone()
    processed_BV[1] = -torch.inf
    sampled = sample(logits_BV, batch_of([params] * 3), zeros(3), mode, processed_BV)
    assert sampled.is_valid_B.tolist() == [True, True, False]
    assert sampled.is_possible_B.tolist()[:2] == [True, False]
    plain = sample(logits_BV, batch_of([params] * 3), zeros(3), mode)
    assert sampled.token_ids_B[0] == plain.token_ids_B[0]
    assert plain.is_possible_B is None


@pytest.mark.parametrize("mode", [POLICY, PROCESSED])
def test_the_most_likely_tokens_come_with_rows_that_want_them(mode):
    many = [
        SamplingParams(top_logprobs=2, top_k=3),
        SamplingParams(),
        SamplingParams(top_logprobs=50, temperature=0.5),
    ]
    logits_BV = random_logits(5, 3, 20)
    batch = batch_of(many)
    assert batch.top_rows.tolist() == [0, 2]
    sampled = sample(logits_BV, batch, zeros(3), mode)
    ids_KN, logprobs_KN = sampled.top_KN
    assert ids_KN.shape == (2, 20)
    for place, row in enumerate((0, 2)):
        of_V = logits_BV[row] / many[row].temperature
        if mode is PROCESSED:
            of_V = warped(logits_BV[row : row + 1], many[row])[0]
        likely = of_V.log_softmax(-1).topk(5)
        assert ids_KN[place, :3].tolist() == likely.indices[:3].tolist()
        torch.testing.assert_close(logprobs_KN[place, :5], likely.values, rtol=0, atol=2e-6)


def borders_are_clear(logits_BV, params):
    """Whether no token is so near a cutoff that rounding decides."""
    ranked_BV = warped(logits_BV, replace(params, top_p=1.0, min_p=0.0))
    sorted_BV = ranked_BV.double().softmax(-1).sort(-1, descending=True).values
    top_p_gap = (sorted_BV.cumsum(-1) - params.top_p).abs().min()
    min_p_gap = (sorted_BV / sorted_BV[:, :1] - params.min_p).abs().min()
    return (params.top_p == 1 or top_p_gap > 1e-5) and (params.min_p == 0 or min_p_gap > 1e-5)


@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(1, 50),
    temperature=st.floats(0.2, 5),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_truncation_keeps_what_transformers_keeps(
    seed, vocab_size, temperature, top_k, top_p, min_p
):
    cutoffs = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    params = SamplingParams(temperature=temperature, **cutoffs)
    logits_BV = random_logits(seed, 3, vocab_size)
    if borders_are_clear(logits_BV, params):
        torch.testing.assert_close(
            truncated(logits_BV, params), warped(logits_BV, params), rtol=0, atol=0
        )


@given(
    seed=st.integers(0, 10**6),
    num_candidates=st.integers(1, 20),
    num_values=st.integers(2, 200),
    top_k=st.integers(0, 10),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_looking_at_candidates_first_keeps_what_sorting_all_keeps(
    seed, num_candidates, num_values, top_k, top_p, min_p
):
    """Whether candidates were enough or not, and where tokens are equally likely, or impossible."""
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    logits_BV = random_logits(seed, 3, 100)
    # Few different numbers, so that many are equal.
    logits_BV = (logits_BV * num_values).round() / num_values
    logits_BV[:, :: 2 + seed % 5] = -torch.inf
    truncation = batch_of([params] * 3).truncation
    if truncation is None or not borders_are_clear(logits_BV, params):
        return
    found_BV = truncate(logits_BV, replace(truncation, num_candidates=num_candidates))
    expected_BV = truncate(logits_BV, replace(truncation, num_candidates=100))
    # Of tokens that are equally likely, sorting settles which top-p cuts off.
    found_BV, expected_BV = (kept_BV.sort(-1).values for kept_BV in (found_BV, expected_BV))
    torch.testing.assert_close(found_BV, expected_BV, rtol=0, atol=0)


def test_tokens_as_likely_as_the_last_candidate_stay():
    logits_BV = torch.zeros(1, 40)
    params = SamplingParams(top_k=3)
    torch.testing.assert_close(truncated(logits_BV, params), warped(logits_BV, params))


@pytest.mark.parametrize(
    "truncation", [{"top_p": 1e-6}, {"top_p": 1e-300}, {"min_p": 1.0}, {"top_k": 1}]
)
def test_the_most_likely_token_always_stays(truncation):
    logits_BV = random_logits(5, 4, 20)
    kept_BV = truncated(logits_BV, SamplingParams(**truncation)).isfinite()
    assert kept_BV.nonzero()[:, 1].tolist() == logits_BV.argmax(-1).tolist()


def test_tokens_as_likely_as_the_k_th_stay_as_in_transformers():
    logits_BV = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0]])
    params = SamplingParams(top_k=3)
    torch.testing.assert_close(truncated(logits_BV, params), warped(logits_BV, params))


def test_rows_are_truncated_each_by_its_own_parameters():
    many = [SamplingParams(), *(SamplingParams(**t) for t in TRUNCATIONS), SamplingParams(top_k=2)]
    logits_BV = random_logits(1, len(many), 30)
    batch = batch_of(many)
    assert batch.truncated_rows.tolist() == list(range(1, len(many)))
    kept_RV = truncate(logits_BV[1:], batch.truncation)
    expected_RV = torch.cat([warped(logits_BV[i : i + 1], many[i]) for i in range(1, len(many))])
    torch.testing.assert_close(kept_RV, expected_RV, rtol=0, atol=0)


@given(
    seed=st.integers(0, 10**6),
    is_possible=st.lists(st.booleans(), min_size=1, max_size=30).filter(any)
    | st.lists(st.booleans(), min_size=64, max_size=64).filter(any),
)
def test_a_token_of_probability_zero_is_never_drawn(seed, is_possible):
    possible_V = torch.tensor(is_possible)
    logits_1V = random_logits(seed, 1, len(is_possible), spread=10.0)
    logits_4V = logits_1V.masked_fill(~possible_V, -torch.inf).expand(4, -1)
    drawn = draw(
        exponentials(logits_4V),
        torch.tensor([0.0, 0.5, JUST_BELOW_1, 2.0**-53], dtype=torch.float64),
    )
    assert possible_V[drawn].all()
    assert drawn[0] == possible_V.nonzero()[0]


@given(st.integers(0, 10**6), st.sampled_from([7, 32, 58, 512, 513]))
def test_a_token_is_the_one_whose_share_holds_the_number(seed, vocab_size):
    """Whether the vocabulary falls into chunks (32, 58, 512) or not."""
    logits_BV = random_logits(seed, 5, vocab_size, spread=4.0)
    uniforms_B = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ends_BV = logits_BV.double().softmax(-1).cumsum(-1)
    starts_BV = torch.cat([torch.zeros(5, 1), ends_BV[:, :-1]], 1)
    tokens_B1 = draw(exponentials(logits_BV), uniforms_B)[:, None]
    assert (starts_BV.gather(1, tokens_B1)[:, 0] <= uniforms_B + 1e-6).all()
    assert (ends_BV.gather(1, tokens_B1)[:, 0] >= uniforms_B - 1e-6).all()


def test_the_first_and_last_possible_tokens_are_drawn_at_the_ends():
    logits_2V = torch.tensor([[-torch.inf, 0.0, 0.0, 0.0, -torch.inf]]).expand(2, 5)
    ends = torch.tensor([0.0, JUST_BELOW_1], dtype=torch.float64)
    assert draw(exponentials(logits_2V), ends).tolist() == [1, 3]


@pytest.mark.parametrize("mode", [POLICY, PROCESSED])
def test_logprobs_are_of_the_distribution_that_the_mode_names(mode):
    many = [SamplingParams(temperature=t, **f) for t in (0.7, 1.3) for f in ({}, *TRUNCATIONS)]
    logits_BV = random_logits(7, len(many), 40)
    tokens_B, logprobs_B, is_valid_B, *_ = sample(logits_BV, batch_of(many), zeros(len(many)), mode)
    assert is_valid_B.all()
    assert logprobs_B.dtype == torch.float32
    for logits_V, params, token, logprob in zip(logits_BV, many, tokens_B, logprobs_B, strict=True):
        of_V = logits_V / params.temperature
        if mode is PROCESSED:
            of_V = warped(logits_V[None], params)[0]
        torch.testing.assert_close(logprob, of_V.log_softmax(-1)[token], rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", [POLICY, PROCESSED])
@pytest.mark.parametrize("truncation", [{}, TRUNCATIONS[3]])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_that_are_never_sampled_count_in_the_policy_alone(temperature, truncation, mode):
    params = SamplingParams(temperature=temperature, **truncation)
    logits_1V = random_logits(3, 1, 8, spread=0.8)
    # The most likely one, and another.
    never_sampled = [logits_1V.argmax().item(), (logits_1V.argmax().item() + 3) % 8]
    left_1V = logits_1V.index_fill(1, torch.tensor(never_sampled), -torch.inf)
    rows, draws_each, counts_V = 3000, 4, torch.zeros(8)
    batch = batch_of([params] * rows)
    sampled_from_V = left_1V[0].softmax(-1)
    policy_V = logits_1V[0].log_softmax(-1)
    if temperature:
        sampled_from_V = warped(left_1V, params)[0].softmax(-1)
        policy_V = (logits_1V[0] / temperature).log_softmax(-1)
    expected_V = policy_V if mode is POLICY else sampled_from_V.log()
    if mode is PROCESSED and not temperature:
        expected_V = left_1V[0].log_softmax(-1)
    for index in range(draws_each):
        logits_BV = logits_1V.expand(rows, 8).contiguous()
        processed_BV, indices_B = left_1V.expand(rows, 8).contiguous(), zeros(rows) + index
        tokens_B, logprobs_B, is_valid_B, *_ = sample(
            logits_BV, batch, indices_B, mode, processed_BV
        )
        counts_V += tokens_B.bincount(minlength=8)
        torch.testing.assert_close(logprobs_B, expected_V[tokens_B], rtol=0, atol=2e-6)
        assert is_valid_B.all()
    if temperature:
        assert chi_squared_is_small(counts_V, sampled_from_V)
    else:
        assert counts_V[left_1V.argmax()] == rows * draws_each


@pytest.mark.parametrize("mode", [POLICY, PROCESSED])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(do_sample=False, temperature=0.3, top_k=2)],
)
def test_greedy_takes_the_most_likely_token_and_reports_temperature_1(params, mode):
    logits_BV = random_logits(8, 5, 40)
    tokens_B, logprobs_B, *_ = sample(logits_BV, batch_of([params] * 5), zeros(5), mode)
    assert tokens_B.tolist() == logits_BV.argmax(-1).tolist()
    expected_B = logits_BV.log_softmax(-1).max(-1).values
    torch.testing.assert_close(logprobs_B, expected_B, rtol=0, atol=2e-6)


def test_greedy_and_sampled_rows_share_a_batch():
    many = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=1)] * 2
    logits_BV = random_logits(9, 6, 40)
    tokens_B, *_ = sample(logits_BV, batch_of(many), zeros(6), POLICY)
    most_likely_B = logits_BV.argmax(-1)
    expected_B = draw(exponentials(logits_BV), uniforms(torch.arange(6), zeros(6)))
    for row in range(6):
        expected = expected_B[row] if row % 3 == 1 else most_likely_B[row]
        assert tokens_B[row] == expected


def test_a_row_draws_the_same_alone_as_in_any_batch():
    many = [SamplingParams(), *(SamplingParams(**t) for t in TRUNCATIONS)] * 4
    seeds = [7 * row - 50 for row in range(len(many))]
    logits_BV, indices_B = random_logits(2, len(many), 60), torch.arange(len(many))
    tokens_B, logprobs_B, *_ = sample(logits_BV, batch_of(many, seeds), indices_B, PROCESSED)
    for row in range(len(many)):
        alone = batch_of([many[row]], [seeds[row]])
        one = slice(row, row + 1)
        token, logprob, *_ = sample(logits_BV[one], alone, indices_B[one], PROCESSED)
        assert (token.item(), logprob.item()) == (tokens_B[row].item(), logprobs_B[row].item())


@pytest.mark.parametrize("mode", [POLICY, PROCESSED])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(**TRUNCATIONS[-1])])
def test_rows_without_a_distribution_are_reported_and_leave_the_others_alone(params, mode):
    sound_BV = random_logits(4, 6, 30)
    broken_BV = sound_BV.clone()
    broken_BV[1, 5] = torch.nan
    broken_BV[2, 0] = torch.inf
    broken_BV[4] = -torch.inf
    batch = batch_of([params] * 6)
    tokens_B, logprobs_B, is_valid_B, *_ = sample(broken_BV, batch, zeros(6), mode)
    assert is_valid_B.tolist() == [True, False, False, True, False, True]
    assert ((tokens_B >= 0) & (tokens_B < 30)).all()
    sound_tokens_B, sound_logprobs_B, *_ = sample(sound_BV, batch, zeros(6), mode)
    assert torch.equal(tokens_B[is_valid_B], sound_tokens_B[is_valid_B])
    assert torch.equal(logprobs_B[is_valid_B], sound_logprobs_B[is_valid_B])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_greedy_row_without_a_distribution_is_reported(broken):
    logits_BV = random_logits(4, 1, 30)
    logits_BV[0, 3] = broken
    batch = batch_of([SamplingParams(temperature=0)])
    _, _, is_valid_B, *_ = sample(logits_BV, batch, zeros(1), POLICY)
    assert is_valid_B.tolist() == [False]


def test_a_forbidden_token_leaves_a_distribution():
    logits_BV = torch.tensor([[0.0, -torch.inf, 1.0]])
    _, logprobs_B, is_valid_B, *_ = sample(
        logits_BV, batch_of([SamplingParams()]), zeros(1), POLICY
    )
    assert is_valid_B.all()
    assert logprobs_B.isfinite().all()


def test_no_global_generator_is_touched():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    many = [SamplingParams(), SamplingParams(top_k=3), SamplingParams(temperature=0)]
    sample(random_logits(1, 3, 30), batch_of(many), zeros(3), POLICY)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    vocab_size=st.integers(1, 300),
    spread=st.floats(0, 20),
)
def test_chosen_logprobs_are_a_log_softmax_as_trl_recomputes_it(seed, rows, vocab_size, spread):
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(rows, vocab_size, generator=generator) * spread
    tokens_B = torch.randint(vocab_size, (rows,), generator=generator)
    logprobs_B = chosen_logprobs(logits_BV, tokens_B)
    expected_B = logits_BV.double().log_softmax(-1).gather(1, tokens_B[:, None])[:, 0]
    tolerance = 3e-7 * (10 + 8 * spread)
    torch.testing.assert_close(logprobs_B, expected_B.float(), rtol=0, atol=tolerance)
    assert torch.equal(logprobs_B, selective_log_softmax(logits_BV, tokens_B))
