"""Read log-probabilities from logits in the ways that engines report them.

Owns temperature, penalties, truncation and short dtypes, and the test of the draw. Runs no model.

N: tokens of all sequences, T: completion tokens, V: vocabulary, M: most likely tokens.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.sampling.truncation import create_truncation, truncate
from cb_rollout.packing.batch import PackedRow
from cb_rollout.rollout.audit.evidence import Prediction, prediction
from cb_rollout.rollout.audit.hypotheses import Hypothesis
from cb_rollout.rollout.audit.report import Cause

# Most likely tokens among which truncation is looked for.
NUM_CANDIDATES = 1024

# Parameters that are tried where the caller names none.
TOP_KS, TOP_PS = (5, 10, 20, 30, 40, 50, 64, 100, 200), (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
MIN_PS = (0.01, 0.02, 0.05, 0.1, 0.2)
REPETITION_PENALTIES = (1.05, 1.1, 1.2, 1.3, 1.5)

NUM_NEWTON_STEPS = 20

# Share of a distribution beyond which what was removed tells too little.
MOST_MASS = 0.98

# Log-probability of an excluded token: far, and finite.
EXCLUDED = -1e4

PENALTY_FIELDS = ("repetition_penalty", "presence_penalty", "frequency_penalty")
CAUSES = {"top_k": Cause.TOP_K, "top_p": Cause.TOP_P, "min_p": Cause.MIN_P}
CAUSES |= dict.fromkeys(PENALTY_FIELDS, Cause.PENALTIES)
OFF = SamplingParams()


def processed(
    logits_TV: torch.Tensor,
    row: PackedRow,
    params: SamplingParams,
    temperature: float,
    slack: float = 0.0,
) -> torch.Tensor:
    """Return log-probabilities after penalties, temperature and truncation, `[T, V]`, float32.

    As in the engine, without bans, biases and grammars. A sampled token that lies within `slack`
    nats of a kept one is kept: rounding excluded it.
    """
    logits_TV = _penalised(logits_TV, row, params) if params.is_penalized else logits_TV
    logits_TV = logits_TV / temperature
    if not params.is_truncated:
        return logits_TV.log_softmax(-1)
    truncation = create_truncation([params] * len(logits_TV), logits_TV.device)
    assert truncation is not None
    kept_TV = truncate(logits_TV, truncation)
    least_T1 = kept_TV.masked_fill(kept_TV.isinf(), torch.inf).amin(-1, keepdim=True)
    tokens_T1 = torch.tensor(row.completion_ids, device=logits_TV.device)[:, None]
    own_T1 = logits_TV.gather(-1, tokens_T1)
    own_T1 = own_T1.where(own_T1 >= least_T1 - slack, -torch.inf)
    return kept_TV.scatter(-1, tokens_T1, own_T1).log_softmax(-1)


def _penalised(logits_TV: torch.Tensor, row: PackedRow, params: SamplingParams) -> torch.Tensor:
    logits_TV = logits_TV.clone()
    counts_V = torch.zeros(logits_TV.shape[1], device=logits_TV.device)
    is_used_V = counts_V.bool()
    is_used_V[list(row.prompt_ids)] = True
    for step, token in enumerate(row.completion_ids):
        own_V, factor = logits_TV[step], params.repetition_penalty
        changed_V = torch.where(own_V > 0, own_V / factor, own_V * factor)
        own_V.copy_(torch.where(is_used_V, changed_V, own_V))
        own_V -= params.frequency_penalty * counts_V + params.presence_penalty * (counts_V > 0)
        counts_V[token] += 1
        is_used_V[token] = True
    return logits_TV


@dataclass
class Readouts:
    """The readouts of the trainer's logits that can explain reported numbers."""

    logits: Sequence[torch.Tensor]
    """Of each row, `[T, V]`, float32."""
    rows: Sequence[PackedRow]
    temperatures: Sequence[float]
    reported_N: torch.Tensor
    params: SamplingParams | None
    is_processed: bool
    slack: float = 0.0
    """Nats by which rounding may exclude a sampled token."""

    def __post_init__(self) -> None:
        self.claimed = (self.is_processed and self.params) or OFF
        """What the trainer takes the numbers for."""

    def read(
        self,
        params: SamplingParams,
        logits: Iterable[torch.Tensor] | None = None,
        factor: float = 1.0,
        rows: Sequence[PackedRow] | None = None,
    ) -> Prediction:
        """Return the prediction by logits of the first rows; `factor` multiplies temperatures.

        `logits` and `rows` None: the trainer's own.
        """
        # The logits, or the rows, may be of the first rows alone.
        each = zip(logits or self.logits, rows or self.rows, self.temperatures, strict=False)
        predictions = []
        for own_TV, row, temperature in each:
            logprobs_TV = processed(own_TV, row, params, temperature * factor, self.slack)
            tokens_T = torch.tensor(row.completion_ids, device=logprobs_TV.device)
            predictions.append(prediction(logprobs_TV, tokens_T))
        return Prediction(*map(torch.cat, zip(*predictions, strict=True)))

    def all(self) -> Iterator[Hypothesis]:
        """Yield every readout but the claimed one."""
        if any(t != 1 for t in self.temperatures):
            raw = (own * t for own, t in zip(self.logits, self.temperatures, strict=True))
            yield Hypothesis(Cause.TEMPERATURE, "not applied", self.read(OFF, raw))
        factor = self._fitted_factor()
        fitted = ", ".join(f"{factor * t:.4g}" for t in dict.fromkeys(self.temperatures))
        own = self.read(self.claimed, factor=factor)
        yield Hypothesis(Cause.TEMPERATURE, f"temperature={fitted}", own, num_fitted=1)
        if self.params is not None:
            yield from self._of_params(self.params)
        else:
            yield from self._truncated()
            for value in REPETITION_PENALTIES:
                own = self.read(replace(OFF, repetition_penalty=value))
                detail = f"repetition_penalty={value}"
                yield Hypothesis(Cause.PENALTIES, detail, own, num_fitted=1)
        for dtype in (torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            own = self.read(OFF, (own.to(dtype).float() for own in self.logits))
            # Rounding in float32 turns the rounding of some logits.
            yield Hypothesis(Cause.LOGITS_16BIT, name, own, noise_share=0.05)
        yield from self._moved()

    def _of_params(self, params: SamplingParams) -> Iterator[Hypothesis]:
        """Yield the caller's parameters, each alone and all, where these are not claimed."""
        names = [name for name in CAUSES if getattr(params, name) != getattr(OFF, name)]
        how, other = ("left out", OFF) if self.is_processed else ("applied", params)
        for name in names:
            own = self.read(replace(self.claimed, **{name: getattr(other, name)}))
            yield Hypothesis(CAUSES[name], f"{name}={getattr(params, name)} {how}", own)
        if len(names) > 1:
            yield Hypothesis(Cause.SAMPLING_PARAMS, f"all {how}", self.read(other))

    def _scaled(self) -> Iterator[torch.Tensor]:
        """Yield each row's logits divided by its temperature."""
        return (own / t for own, t in zip(self.logits, self.temperatures, strict=True))

    def _fitted_factor(self) -> float:
        """Return the factor of the temperatures that fits the reported numbers best.

        Gauss and Newton's steps on log factor, of at most a doubling; a token's derivative is its
        expected logit less its own.
        """
        scaled_NV = torch.cat(list(self._scaled()))
        tokens = [token for row in self.rows for token in row.completion_ids]
        tokens_N1 = torch.tensor(tokens, device=scaled_NV.device)[:, None]
        chosen_N = scaled_NV.gather(-1, tokens_N1)[:, 0]
        log_factor = torch.zeros(())
        for _ in range(NUM_NEWTON_STEPS):
            factor = log_factor.exp()
            logprobs_NV = (scaled_NV / factor).log_softmax(-1)
            slopes_N = ((logprobs_NV.exp() * scaled_NV).sum(-1) - chosen_N) / factor
            errors_N = (self.reported_N - logprobs_NV.gather(-1, tokens_N1)[:, 0]).clamp(-1, 1)
            step = (slopes_N * errors_N).sum() / slopes_N.square().sum().clamp(min=1e-12)
            log_factor = (log_factor + step.clamp(-0.7, 0.7).float().cpu()).clamp(-4, 4)
        return float(log_factor.exp())

    def _truncated(self) -> Iterator[Hypothesis]:
        """Yield top-k, top-p and min-p of common values, and of those that the numbers imply."""
        base = self.read(OFF)
        M = min(NUM_CANDIDATES, self.logits[0].shape[1])
        likeliest = [own.log_softmax(-1).topk(M).values for own in self._scaled()]
        p_NM = torch.cat(likeliest).exp().double()
        mass_NM, ranks_M = p_NM.cumsum(-1), torch.arange(M, device=p_NM.device)
        implied_N = (base.logprobs_N - self.reported_N).exp()
        last_N1 = (mass_NM - implied_N[:, None]).abs().argmin(-1, keepdim=True)
        is_cut_N = implied_N < MOST_MASS
        top_ks, top_ps, min_ps = list(TOP_KS), list(TOP_PS), list(MIN_PS)
        if is_cut_N.any():
            top_ks.append(int(last_N1[is_cut_N, 0].mode().values) + 1)
            top_ps.append(float(mass_NM.gather(-1, last_N1)[is_cut_N].quantile(0.02)))
            min_ps.append(float((p_NM.gather(-1, last_N1) / p_NM[:, :1])[is_cut_N].quantile(0.02)))
        kept = [(Cause.TOP_K, f"top_k={k}", (ranks_M < k).expand_as(p_NM)) for k in top_ks]
        kept += [(Cause.TOP_P, f"top_p={p:.3g}", mass_NM - p_NM < p) for p in top_ps]
        kept += [(Cause.MIN_P, f"min_p={p:.3g}", p_NM >= p * p_NM[:, :1]) for p in min_ps]
        for cause, detail, is_kept_NM in kept:
            mass_N = p_NM.masked_fill(~is_kept_NM, 0).sum(-1).clamp(max=1)
            least_N = p_NM.masked_fill(~is_kept_NM, torch.inf).amin(-1)
            is_out_N = base.logprobs_N < least_N.log() - self.slack
            own_N = (base.logprobs_N - mass_N.log()).masked_fill(is_out_N, -torch.inf)
            yield Hypothesis(cause, detail, base._replace(logprobs_N=own_N), num_fitted=1)

    def _moved(self) -> Iterator[Hypothesis]:
        """Yield the numbers of the token before and after; at an end without one, the reported."""
        claimed = self.read(self.claimed)
        lengths = [len(row.completion_ids) for row in self.rows]
        for step, name in ((1, "the token before"), (-1, "the token after")):
            moved = [own_T.roll(step) for own_T in claimed.logprobs_N.split(lengths)]
            for own_T, seen_T in zip(moved, self.reported_N.split(lengths), strict=True):
                end = 0 if step > 0 else -1
                own_T[end] = seen_T[end]
            own = claimed._replace(logprobs_N=torch.cat(moved))
            yield Hypothesis(Cause.NEIGHBOUR, name, own)

    def draw_z_score(self) -> float | None:
        """Test that tokens were drawn from the claimed distribution; None: greedy draws none.

        Return by how many standard deviations the mean of -logprob is above the mean entropy.
        """
        params = self.params or OFF
        if params.is_greedy:
            return None
        surprises, variances = [], []
        for own_TV, row, temperature in zip(self.logits, self.rows, self.temperatures, strict=True):
            logprobs_TV = processed(own_TV, row, params, temperature).double().clamp(min=EXCLUDED)
            tokens_T1 = torch.tensor(row.completion_ids, device=own_TV.device)[:, None]
            p_TV = logprobs_TV.exp()
            entropies_T = -(p_TV * logprobs_TV).sum(-1)
            surprises.append(-logprobs_TV.gather(-1, tokens_T1)[:, 0] - entropies_T)
            variances.append((p_TV * logprobs_TV.square()).sum(-1) - entropies_T.square())
        surprise, variance = (float(torch.cat(x).sum()) for x in (surprises, variances))
        # A distribution of one token has no spread.
        return surprise / math.sqrt(max(variance, 1e-6))
