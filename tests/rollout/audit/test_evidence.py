"""The arithmetic of an audit, on numbers whose answer is known."""

import math

import pytest
import torch

from cb_rollout.rollout.audit import evidence
from cb_rollout.rollout.audit.report import AuditReport, Cause, Evidence


def test_a_certain_token_is_exact_and_an_uncertain_one_is_not():
    logits_NV = torch.tensor([[20.0, 0.0, 0.0], [0.0, 0.0, -30.0]])
    found = evidence.prediction(logits_NV.log_softmax(-1), torch.tensor([0, 0]))
    assert found.sizes_N.tolist() == pytest.approx([evidence.LEAST_SENSITIVITY, math.sqrt(0.5)])


def test_the_sensitivity_is_that_of_rounded_logits():
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(1, 50, generator=generator).expand(4000, -1)
    noise_NV = 1e-3 * torch.randn(4000, 50, generator=generator)
    tokens_N = torch.full((4000,), 7)
    exact = evidence.prediction(logits_NV.log_softmax(-1), tokens_N)
    rounded = evidence.prediction((logits_NV + noise_NV).log_softmax(-1), tokens_N)
    spread = float((rounded.logprobs_N - exact.logprobs_N).std())
    assert spread == pytest.approx(1e-3 * float(exact.sizes_N[0]), rel=0.05)


def test_the_density_is_a_density():
    distances_N = torch.linspace(-400, 400, 2_000_001, dtype=torch.float64)
    densities_N = evidence.log_densities(distances_N, torch.full_like(distances_N, 0.5)).exp()
    assert float(torch.trapezoid(densities_N, distances_N)) == pytest.approx(1, abs=1e-4)


def test_numbers_of_few_decimals_or_few_bits_are_known():
    values_N = -torch.rand(100, generator=torch.Generator().manual_seed(0)).double() * 5
    as_float32_N = values_N.float().double()
    assert evidence.decimal_step(as_float32_N) == 0
    assert evidence.short_dtype(as_float32_N) is None
    assert evidence.decimal_step(values_N.round(decimals=3).float().double()) == 1e-3
    assert evidence.short_dtype(values_N.bfloat16().double()) is torch.bfloat16
    assert evidence.short_dtype(values_N.half().double()) is torch.float16


def test_one_outlier_in_a_hundred_is_a_rounding_and_more_are_not():
    noise_N, distances_N = torch.ones(200), torch.ones(200)
    distances_N[:2] = 1000
    assert evidence.explains(distances_N, noise_N)
    distances_N[:3] = 1000
    assert not evidence.explains(distances_N, noise_N)
    assert not evidence.explains(torch.full((200,), 5.0), noise_N)


def test_a_change_is_found_where_it_is():
    gains_T = torch.tensor([-5.0, -5.0, 30.0, -1.0, 30.0])
    assert evidence.first_of_suffix(gains_T) == 2
    assert evidence.first_of_suffix(gains_T / 10) is None
    assert evidence.changepoint(-gains_T, torch.zeros(5)) == 2
    assert evidence.changepoint(torch.ones(5), torch.zeros(5)) == 5
    assert evidence.changepoint(torch.zeros(5), torch.ones(5)) == 0


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_a_sentence_and_advice(cause):
    own = Evidence(cause, "detail", 1.0, True, None)
    report = AuditReport((own,), None, {}, 10)
    assert report.cause is cause
    assert cause.advice.endswith(".")
    assert bool(report) is (cause is Cause.ROUNDING)
    assert (f"{cause} (detail)" in report.sentence) is (cause is not Cause.ROUNDING)


def test_a_report_is_no_alarm_only_if_numbers_and_draws_are_right():
    own = Evidence(Cause.ROUNDING, "", 0.0, True, None)
    assert AuditReport((own,), 1.0, {}, 10)
    assert not AuditReport((own,), 6.0, {}, 10)
    assert not AuditReport((own,), -6.0, {}, 10)
