"""Test whether tokens were drawn from the distribution that the trainer's logits claim.

Arithmetic on the logits of an audit. The quantiles are randomised with numbers of a fixed seed, so
that equal rollouts give equal reports; the global random state is left as it is.

N: tokens of all sequences, V: vocabulary.
"""

import math

import torch

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.rollout.audit.readouts import Readouts, processed
from cb_rollout.rollout.audit.report import DrawTest

# Terms of Kolmogorov's series; the rest is below float64.
NUM_TERMS = 100


def draw_test(readouts: Readouts, params: SamplingParams) -> DrawTest | None:
    """Test all tokens of the readouts; None: greedy sampling draws none.

    A token's quantile is the probability of all likelier tokens and a random share of its own
    (Czado, Gneiting and Held 2009, "Predictive model assessment for count data").
    """
    if params.is_greedy:
        return None
    surprises, variances, quantiles = [], [], []
    generator = torch.Generator().manual_seed(0)
    each = zip(readouts.logits, readouts.rows, readouts.temperatures, strict=True)
    for logits_TV, row, temperature in each:
        logprobs_TV = processed(logits_TV, row, params, temperature).double()
        tokens_T1 = torch.tensor(row.completion_ids, device=logprobs_TV.device)[:, None]
        p_TV, finite_TV = logprobs_TV.exp(), logprobs_TV.clamp(min=-1e4)
        chosen_T1 = logprobs_TV.gather(-1, tokens_T1)
        entropies_T = -(p_TV * finite_TV).sum(-1)
        surprises.append(-chosen_T1[:, 0].clamp(min=-1e4) - entropies_T)
        variances.append((p_TV * finite_TV.square()).sum(-1) - entropies_T.square())
        above_T = p_TV.masked_fill(logprobs_TV <= chosen_T1, 0).sum(-1)
        shares_T = torch.rand(len(row.completion_ids), generator=generator, dtype=torch.float64)
        same_T = p_TV.masked_fill(logprobs_TV != chosen_T1, 0).sum(-1)
        quantiles.append(above_T + same_T * shares_T.to(above_T.device))
    surprises_N, variance = torch.cat(surprises), float(torch.cat(variances).sum())
    # A distribution of one token has no spread; an excluded token is 1e4 nats off.
    z_score = float(surprises_N.sum()) / math.sqrt(max(variance, 1e-6))
    quantiles_N = torch.cat(quantiles).cpu().clamp(0, 1)
    return DrawTest(float(surprises_N.mean()), z_score, _p_value(quantiles_N))


def _p_value(quantiles_N: torch.Tensor) -> float:
    """Return the p-value of Kolmogorov and Smirnov's test, by its limit with Stephens' factor."""
    N = len(quantiles_N)
    sorted_N = quantiles_N.sort().values
    steps_N = torch.arange(N, dtype=torch.float64)
    distance = float(torch.maximum(sorted_N - steps_N / N, (steps_N + 1) / N - sorted_N).max())
    scaled = (math.sqrt(N) + 0.12 + 0.11 / math.sqrt(N)) * distance
    if scaled < 0.2:
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, NUM_TERMS))
    return min(1.0, max(0.0, 2 * sum(terms)))
