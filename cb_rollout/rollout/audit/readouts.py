"""Read log-probabilities from logits in the ways that engines report them.

Owns temperature, penalties, truncation and short dtypes. Runs no model.

N: tokens of all sequences, T: completion tokens, V: vocabulary, M: most likely tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.sampling.truncation import create_truncation, truncate
from cb_rollout.packing.batch import PackedRow
from cb_rollout.rollout.audit.evidence import Prediction, prediction
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

PENALTY_FIELDS = ("repetition_penalty", "presence_penalty", "frequency_penalty")
CAUSES = {"top_k": Cause.TOP_K, "top_p": Cause.TOP_P, "min_p": Cause.MIN_P}
CAUSES |= dict.fromkeys(PENALTY_FIELDS, Cause.PENALTIES)
OFF = SamplingParams()


class Readout(NamedTuple):
    """A way to read log-probabilities from the trainer's logits."""

    cause: Cause
    detail: str
    prediction: Prediction
    num_fitted: int = 0
    noise_share: float = 0.0
    """Rounding of its own, as `Hypothesis.noise_share`."""


def processed(
    logits_TV: torch.Tensor,
    row: PackedRow,
    params: SamplingParams,
    temperature: float,
    slack: float = 0.0,
) -> torch.Tensor:
    """Return log-probabilities after penalties, temperature and truncation, `[T, V]`, float32.

    In the order and by the formulas of the engine. Bans, biases and grammars are not applied. A
    sampled token that lies within `slack` nats of a kept one is kept: rounding excluded it.
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


class Readouts:
    """The readouts of the trainer's logits that can explain reported numbers."""

    def __init__(
        self,
        logits: Sequence[torch.Tensor],
        rows: Sequence[PackedRow],
        temperatures: Sequence[float],
        reported_N: torch.Tensor,
        params: SamplingParams | None,
        is_processed: bool,
    ) -> None:
        """Take each row's logits, `[T, V]`, and temperature; `params`: None if not known."""
        self.logits, self.rows, self.temperatures = logits, rows, temperatures
        self.reported_N, self.params, self.is_processed = reported_N, params, is_processed
        self.slack = 0.0
        """Nats by which rounding may exclude a sampled token."""
        self.claimed = (is_processed and params) or OFF
        """What the trainer takes the numbers for."""
        tokens = [token for row in rows for token in row.completion_ids]
        self.tokens_N = torch.tensor(tokens, device=reported_N.device)

    def of(self, params: SamplingParams, factor: float = 1.0) -> Prediction:
        """Return the prediction by these parameters; `factor` multiplies the temperatures."""
        each = zip(self.logits, self.rows, self.temperatures, strict=True)
        own = [processed(own, row, params, t * factor, self.slack) for own, row, t in each]
        return self._read(own)

    def _read(self, logprobs: Sequence[torch.Tensor]) -> Prediction:
        return prediction(torch.cat(list(logprobs)), self.tokens_N)

    def all(self) -> Iterator[Readout]:
        """Yield every readout but the claimed one."""
        if any(t != 1 for t in self.temperatures):
            raw = [own.log_softmax(-1) for own in self.logits]
            yield Readout(Cause.TEMPERATURE, "not applied", self._read(raw))
        factor = self._fitted_factor()
        fitted = ", ".join(f"{factor * t:.4g}" for t in dict.fromkeys(self.temperatures))
        detail = f"temperature={fitted}"
        yield Readout(Cause.TEMPERATURE, detail, self.of(self.claimed, factor), num_fitted=1)
        yield from self._of_params()
        if self.params is None:
            yield from self._truncated()
            for value in REPETITION_PENALTIES:
                own = self.of(replace(OFF, repetition_penalty=value))
                yield Readout(Cause.PENALTIES, f"repetition_penalty={value}", own, num_fitted=1)
        yield from self._short()

    def _of_params(self) -> Iterator[Readout]:
        """Yield the caller's parameters, each alone and all, where these are not claimed."""
        if self.params is None:
            return
        names = [name for name in CAUSES if getattr(self.params, name) != getattr(OFF, name)]
        how = "left out" if self.is_processed else "applied"
        for name in names:
            value = getattr(OFF if self.is_processed else self.params, name)
            own = replace(self.claimed, **{name: value})
            detail = f"{name}={getattr(self.params, name)} {how}"
            yield Readout(CAUSES[name], detail, self.of(own))
        if len(names) > 1:
            own = OFF if self.is_processed else self.params
            yield Readout(Cause.SAMPLING_PARAMS, f"all {how}", self.of(own))

    def _fitted_factor(self) -> float:
        """Return the factor of the temperatures that fits the reported numbers best.

        Gauss and Newton's steps on log factor, of at most a doubling; a token's derivative is its
        expected logit less its own.
        """
        each = zip(self.logits, self.temperatures, strict=True)
        scaled_NV = torch.cat([logits / t for logits, t in each])
        chosen_N = scaled_NV.gather(-1, self.tokens_N[:, None])[:, 0]
        log_factor = torch.zeros(())
        for _ in range(NUM_NEWTON_STEPS):
            factor = log_factor.exp()
            logprobs_NV = (scaled_NV / factor).log_softmax(-1)
            found_N = logprobs_NV.gather(-1, self.tokens_N[:, None])[:, 0]
            slopes_N = ((logprobs_NV.exp() * scaled_NV).sum(-1) - chosen_N) / factor
            errors_N = (self.reported_N - found_N).clamp(-1, 1)
            step = (slopes_N * errors_N).sum() / slopes_N.square().sum().clamp(min=1e-12)
            log_factor = (log_factor + step.clamp(-0.7, 0.7).float().cpu()).clamp(-4, 4)
        return float(log_factor.exp())

    def _truncated(self) -> Iterator[Readout]:
        """Yield top-k, top-p and min-p of common values, and of those that the numbers imply."""
        base = self.of(OFF)
        each = zip(self.logits, self.temperatures, strict=True)
        logprobs_NV = torch.cat([(own / t).log_softmax(-1) for own, t in each])
        M = min(NUM_CANDIDATES, logprobs_NV.shape[1])
        p_NM = logprobs_NV.topk(M).values.exp().double()
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
            yield Readout(cause, detail, base._replace(logprobs_N=own_N), num_fitted=1)

    def _short(self) -> Iterator[Readout]:
        """Yield logits in 16 bits, and numbers that are of the token before or after."""
        each = list(zip(self.logits, self.temperatures, strict=True))
        for dtype in (torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            short = [(own.to(dtype).float() / t).log_softmax(-1) for own, t in each]
            # Rounding in float32 turns the rounding of some logits.
            yield Readout(Cause.LOGITS_16BIT, name, self._read(short), noise_share=0.05)
        claimed = self.of(self.claimed)
        lengths = [len(row.completion_ids) for row in self.rows]
        for step, name in ((1, "the token before"), (-1, "the token after")):
            parts = claimed.logprobs_N.split(lengths), self.reported_N.split(lengths)
            moved = [_moved(own, seen, step) for own, seen in zip(*parts, strict=True)]
            own = claimed._replace(logprobs_N=torch.cat(moved))
            yield Readout(Cause.NEIGHBOUR, name, own)


def _moved(own_T: torch.Tensor, reported_T: torch.Tensor, step: int) -> torch.Tensor:
    """Return the values of the token `step` before each; at the end that has none, the reported."""
    moved_T = own_T.roll(step)
    moved_T[0 if step > 0 else -1] = reported_T[0 if step > 0 else -1]
    return moved_T
