"""Read log-probabilities from logits in the ways that engines report them.

Owns temperature, penalties, truncation and short dtypes, and the test of the draw. Runs no model.

N: tokens of all sequences, T: completion tokens, V: vocabulary, M: most likely tokens.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.sampling.truncation import (
    CUMULATIVE_UNITS,
    create_truncation,
    cumulative_units,
    truncate,
)
from cb_rollout.packing.rows import PackedRow
from cb_rollout.rollout.audit.evidence import Prediction, prediction
from cb_rollout.rollout.audit.hypotheses import Hypothesis
from cb_rollout.rollout.audit.report import Cause

# Number of most likely tokens in which truncation is searched for.
NUM_CANDIDATES = 1024

# Parameters that are tried if the caller names none.
TOP_KS = (5, 10, 20, 30, 40, 50, 64, 100, 200)
TOP_PS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
MIN_PS = (0.01, 0.02, 0.05, 0.1, 0.2)
REPETITION_PENALTIES = (1.05, 1.1, 1.2, 1.3, 1.5)

NUM_NEWTON_STEPS = 20

# If truncation kept more than this share of a distribution, a number says too little about it.
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

    The computation is the engine's, but without bans, biases and grammars.

    Args:
        logits_TV: the model's logits of the completion tokens, float32.
        row: the sequence.
        params: penalties and truncation.
        temperature: divides the logits.
        slack: a sampled token within this many nats of a kept one is kept, because only rounding
            excluded it.
    """
    if params.is_penalized:
        logits_TV = _penalised(logits_TV, row, params)
    logits_TV = logits_TV / temperature
    if not params.is_truncated:
        return logits_TV.log_softmax(-1)
    truncation = create_truncation([params] * len(logits_TV), logits_TV.device)
    assert truncation is not None
    kept_TV = truncate(logits_TV, truncation)
    least_kept_T1 = kept_TV.masked_fill(kept_TV.isinf(), torch.inf).amin(-1, keepdim=True)
    tokens_T1 = torch.tensor(row.completion_ids, device=logits_TV.device)[:, None]
    sampled_T1 = logits_TV.gather(-1, tokens_T1)
    is_kept_T1 = sampled_T1 >= least_kept_T1 - slack
    sampled_T1 = sampled_T1.where(is_kept_T1, -torch.inf)
    return kept_TV.scatter(-1, tokens_T1, sampled_T1).log_softmax(-1)


def _penalised(logits_TV: torch.Tensor, row: PackedRow, params: SamplingParams) -> torch.Tensor:
    """Return a copy of the logits in which tokens before each step are penalised."""
    logits_TV = logits_TV.clone()
    factor = params.repetition_penalty
    # How often each token was sampled so far, and whether it is in the prompt or was sampled.
    counts_V = torch.zeros(logits_TV.shape[1], device=logits_TV.device)
    is_used_V = counts_V.bool()
    is_used_V[list(row.prompt_ids)] = True
    for step, token in enumerate(row.completion_ids):
        logits_V = logits_TV[step]
        repeated_V = torch.where(logits_V > 0, logits_V / factor, logits_V * factor)
        logits_V.copy_(torch.where(is_used_V, repeated_V, logits_V))
        frequency_V = params.frequency_penalty * counts_V
        presence_V = params.presence_penalty * (counts_V > 0)
        logits_V -= frequency_V + presence_V
        counts_V[token] += 1
        is_used_V[token] = True
    return logits_TV


@dataclass
class Readouts:
    """The readouts of the trainer's logits that can explain reported numbers."""

    logits: Sequence[torch.Tensor]
    """Logits of each row, `[T, V]`, float32."""
    rows: Sequence[PackedRow]
    temperatures: Sequence[float]
    reported_N: torch.Tensor
    params: SamplingParams | None
    is_processed: bool
    slack: float = 0.0
    """Margin in nats within which rounding may have excluded a sampled token."""

    def __post_init__(self) -> None:
        self.claimed = OFF
        """Penalties and truncation that the trainer expects in the numbers."""
        if self.is_processed and self.params is not None:
            self.claimed = self.params

    def read(
        self,
        params: SamplingParams,
        logits: Iterable[torch.Tensor] | None = None,
        factor: float = 1.0,
        rows: Sequence[PackedRow] | None = None,
    ) -> Prediction:
        """Return the numbers of an engine that reads logits in this way.

        Args:
            params: penalties and truncation.
            logits: `[T, V]`, float32, of each row or only of the first rows; None: the trainer's.
            factor: multiplies the temperatures.
            rows: the sequences; None: the trainer's.
        """
        # There may be logits for the first rows only.
        sequences = zip(logits or self.logits, rows or self.rows, self.temperatures, strict=False)
        predictions: list[Prediction] = []
        for logits_TV, row, temperature in sequences:
            logprobs_TV = processed(logits_TV, row, params, temperature * factor, self.slack)
            tokens_T = torch.tensor(row.completion_ids, device=logprobs_TV.device)
            predictions.append(prediction(logprobs_TV, tokens_T))
        return Prediction(
            logprobs_N=torch.cat([each.logprobs_N for each in predictions]),
            sizes_N=torch.cat([each.sizes_N for each in predictions]),
        )

    def all(self) -> Iterator[Hypothesis]:
        """Yield every readout but the claimed one."""
        if any(temperature != 1 for temperature in self.temperatures):
            # `read` divides by the temperature again.
            pairs = zip(self.logits, self.temperatures, strict=True)
            multiplied = (logits_TV * temperature for logits_TV, temperature in pairs)
            yield Hypothesis(Cause.TEMPERATURE, "not applied", self.read(OFF, multiplied))
        factor = self._fitted_factor()
        fitted = [f"{factor * temperature:.4g}" for temperature in dict.fromkeys(self.temperatures)]
        yield Hypothesis(
            Cause.TEMPERATURE,
            f"temperature={', '.join(fitted)}",
            self.read(self.claimed, factor=factor),
            num_fitted=1,
        )
        if self.params is not None:
            yield from self._of_params(self.params)
        else:
            yield from self._truncated()
            for value in REPETITION_PENALTIES:
                yield Hypothesis(
                    Cause.PENALTIES,
                    f"repetition_penalty={value}",
                    self.read(replace(OFF, repetition_penalty=value)),
                    num_fitted=1,
                )
        for dtype in (torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            rounded = self.read(OFF, (logits_TV.to(dtype).float() for logits_TV in self.logits))
            # Rounding in float32 turns around the rounding of some logits to 16 bits.
            yield Hypothesis(Cause.LOGITS_16BIT, name, rounded, noise_share=0.05)
        yield from self._moved()

    def _of_params(self, params: SamplingParams) -> Iterator[Hypothesis]:
        """Yield the caller's parameters as applied, or as left out if the trainer expects them.

        Yields them one by one, and all together.
        """
        names = [name for name in CAUSES if getattr(params, name) != getattr(OFF, name)]
        if self.is_processed:
            how = "left out"
            tested = OFF
        else:
            how = "applied"
            tested = params
        for name in names:
            with_one_changed = replace(self.claimed, **{name: getattr(tested, name)})
            detail = f"{name}={getattr(params, name)} {how}"
            yield Hypothesis(CAUSES[name], detail, self.read(with_one_changed))
        if len(names) > 1:
            yield Hypothesis(Cause.SAMPLING_PARAMS, f"all {how}", self.read(tested))

    def _scaled(self) -> Iterator[torch.Tensor]:
        """Yield each row's logits divided by its temperature."""
        for logits_TV, temperature in zip(self.logits, self.temperatures, strict=True):
            yield logits_TV / temperature

    def _fitted_factor(self) -> float:
        """Return the factor of the temperatures that fits the reported numbers best.

        Takes Gauss-Newton steps on the factor's logarithm, each at most a doubling. The derivative
        for a token is the expected logit minus the token's own.
        """
        scaled_NV = torch.cat(list(self._scaled()))
        tokens: list[int] = []
        for row in self.rows:
            tokens.extend(row.completion_ids)
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
        """Yield top-k, top-p and min-p at common values, and at values that the numbers imply."""
        base = self.read(OFF)
        M = min(NUM_CANDIDATES, self.logits[0].shape[1])
        likeliest = [scaled_TV.log_softmax(-1).topk(M).values for scaled_TV in self._scaled()]
        p_NM = torch.cat(likeliest).exp().double()
        mass_NM = cumulative_units(p_NM, torch.ones_like(p_NM[:, :1])) / CUMULATIVE_UNITS
        ranks_M = torch.arange(M, device=p_NM.device)
        peak_N1 = p_NM[:, :1]

        # Truncation divides by the mass that it keeps, so a reported number implies that mass.
        implied_mass_N = (base.logprobs_N - self.reported_N).exp()
        last_kept_N1 = (mass_NM - implied_mass_N[:, None]).abs().argmin(-1, keepdim=True)
        is_cut_N = implied_mass_N < MOST_MASS
        top_ks: list[int] = list(TOP_KS)
        top_ps: list[float] = list(TOP_PS)
        min_ps: list[float] = list(MIN_PS)
        if is_cut_N.any():
            top_ks.append(int(last_kept_N1[is_cut_N, 0].mode().values) + 1)
            kept_mass_N1 = mass_NM.gather(-1, last_kept_N1)
            top_ps.append(float(kept_mass_N1[is_cut_N].quantile(0.02)))
            relative_N1 = p_NM.gather(-1, last_kept_N1) / peak_N1
            min_ps.append(float(relative_N1[is_cut_N].quantile(0.02)))

        def truncated(cause: Cause, detail: str, is_kept_NM: torch.Tensor) -> Hypothesis:
            mass_N = p_NM.masked_fill(~is_kept_NM, 0).sum(-1).clamp(max=1)
            least_N = p_NM.masked_fill(~is_kept_NM, torch.inf).amin(-1)
            is_out_N = base.logprobs_N < least_N.log() - self.slack
            logprobs_N = (base.logprobs_N - mass_N.log()).masked_fill(is_out_N, -torch.inf)
            return Hypothesis(cause, detail, base._replace(logprobs_N=logprobs_N), num_fitted=1)

        for k in top_ks:
            yield truncated(Cause.TOP_K, f"top_k={k}", (ranks_M < k).expand_as(p_NM))
        for p in top_ps:
            yield truncated(Cause.TOP_P, f"top_p={p:.3g}", mass_NM - p_NM < p)
        for p in min_ps:
            yield truncated(Cause.MIN_P, f"min_p={p:.3g}", p_NM >= p * peak_N1)

    def _moved(self) -> Iterator[Hypothesis]:
        """Yield the numbers of neighbouring tokens; at an end without a neighbour, the reported."""
        claimed = self.read(self.claimed)
        lengths = [len(row.completion_ids) for row in self.rows]
        for step, name in ((1, "the token before"), (-1, "the token after")):
            end = 0 if step > 0 else -1
            moved: list[torch.Tensor] = []
            logprobs_of_rows = claimed.logprobs_N.split(lengths)
            reported_of_rows = self.reported_N.split(lengths)
            for logprobs_T, reported_T in zip(logprobs_of_rows, reported_of_rows, strict=True):
                moved_T = logprobs_T.roll(step)
                moved_T[end] = reported_T[end]
                moved.append(moved_T)
            neighbours = claimed._replace(logprobs_N=torch.cat(moved))
            yield Hypothesis(Cause.NEIGHBOUR, name, neighbours)

    def draw_z_score(self) -> float | None:
        """Test whether tokens were drawn from the claimed distribution; None: greedy decoding.

        Returns the number of standard deviations by which the mean of -logprob exceeds the mean
        entropy.
        """
        params = self.params or OFF
        if params.is_greedy:
            return None
        surprises: list[torch.Tensor] = []
        variances: list[torch.Tensor] = []
        sequences = zip(self.logits, self.rows, self.temperatures, strict=True)
        for logits_TV, row, temperature in sequences:
            logprobs_TV = processed(logits_TV, row, params, temperature)
            logprobs_TV = logprobs_TV.double().clamp(min=EXCLUDED)
            tokens_T1 = torch.tensor(row.completion_ids, device=logits_TV.device)[:, None]
            p_TV = logprobs_TV.exp()
            entropies_T = -(p_TV * logprobs_TV).sum(-1)
            surprises.append(-logprobs_TV.gather(-1, tokens_T1)[:, 0] - entropies_T)
            variances.append((p_TV * logprobs_TV.square()).sum(-1) - entropies_T.square())
        surprise = float(torch.cat(surprises).sum())
        variance = float(torch.cat(variances).sum())
        # A distribution of one token has no spread.
        return surprise / math.sqrt(max(variance, 1e-6))
