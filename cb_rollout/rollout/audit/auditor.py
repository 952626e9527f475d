"""Audit recorded rollouts: score them under hypotheses, and rank the causes.

Owns the choice of the sequences and the order of the tests. Called by the thread that trains;
nothing else may run the model meanwhile.

N: tokens of all sequences, T: completion tokens of a sequence, V: vocabulary, C: causes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cb_rollout.config.enums import LogprobsMode
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.numerics import agreement
from cb_rollout.engine.sampling.sampler import reported_mode
from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.rollout.audit import evidence
from cb_rollout.rollout.audit.evidence import Prediction
from cb_rollout.rollout.audit.forwards import Change, Forwards, Weights
from cb_rollout.rollout.audit.hypotheses import Hypothesis, hypotheses, layer_hypotheses
from cb_rollout.rollout.audit.readouts import Readouts
from cb_rollout.rollout.audit.report import NO_NUMBERS, AuditReport, Cause, Evidence
from cb_rollout.types import GenerationOutput

if TYPE_CHECKING:
    from cb_rollout.rollout.generator import RolloutGenerator

# At this distance, in multiples of the noise, a number is as likely to have another, unknown cause.
DOUBTFUL_MULTIPLE = 10.0

# Median distance, in multiples of the noise, that rounding alone rarely exceeds.
DOUBTFUL_MEDIAN = 1.5


class TestedCause(NamedTuple):
    """A hypothesis, and how its prediction compares with the reported numbers."""

    hypothesis: Hypothesis
    prediction: Prediction
    noise_N: torch.Tensor
    distances_N: torch.Tensor
    log_densities_N: torch.Tensor


class RankedCause(NamedTuple):
    """A tested cause, its evidence, and its place among the others."""

    rank: tuple[int, float]
    """The smallest rank is the best."""
    tested: TestedCause
    evidence: Evidence


def audit(
    outputs: Iterable[GenerationOutput] | Mapping[str, GenerationOutput],
    model: torch.nn.Module,
    *,
    versions: Mapping[Any, Any] | None = None,
    tokenizer: Any = None,
    tokenizers: Mapping[str, Any] | None = None,
    engine: "RolloutGenerator | None" = None,
    sampling_params: SamplingParams | None = None,
    logprobs_mode: str | None = None,
    num_sequences: int = 16,
    max_tokens: int = 1024,
) -> AuditReport:
    """Find why reported log-probabilities differ from recomputed ones.

    Plain forwards of `model` score the sequences, in evaluation mode and without gradients. If the
    trainer scores under autocast, call this under the same autocast. An audit takes 30 to 45
    forwards of the chosen sequences, 18 more with images, and keeps their logits in memory: 4 bytes
    * `max_tokens` * vocabulary.

    Args:
        outputs: a rollout's outputs, or a dict of them, from any engine: `request_id`, `prompt_ids`
            and their `images`, `generated_tokens`, `logprobs` (one natural logarithm per token),
            and the `temperature`. If no output has `logprobs`, the audit only tests whether the
            tokens fit the distribution.
        model: the trainer's causal language model with the weights that sampled the tokens, plain
            or wrapped by PEFT, DDP or accelerate, on one device.
        versions: earlier weights by name or number: a state dict of the model or of its adapter, or
            a callable that returns one. All are in memory at the same time.
        tokenizer: the trainer's. None: skip causes that need it, such as a doubled chat template.
        tokenizers: other tokenizers, by name, that the engine may have used, such as another
            revision.
        engine: the generator of this package that sampled. It provides the defaults of `tokenizer`
            and `logprobs_mode`, and its copy of the weights counts as a version.
        sampling_params: truncation and penalties used in sampling. None: unknown, so common values
            are tried, and the test of the tokens assumes that there were none.
        logprobs_mode: which log-probabilities the trainer expects. "policy", the default: over the
            whole vocabulary at the temperature; "processed": after penalties and truncation too.
        num_sequences: maximum sequences to score, spread evenly over the rollout.
        max_tokens: maximum generated tokens to score in total. A longer sequence is cut.

    Returns:
        The report. It is truthy if rounding explains the numbers and the tokens fit the
        distribution.

    Raises:
        InvalidRequestError: no output has a token, or an output has no prompt, a different number
            of tokens and log-probabilities, or a token id that the model does not have.
        ConfigurationError: the model cannot be scored here, a version does not fit it, or images
            or the trainer's tokenizer are missing.
    """
    if num_sequences < 1 or max_tokens < 1:
        raise ConfigurationError(
            f"num_sequences={num_sequences} and max_tokens={max_tokens} must be at least 1."
        )
    chosen = _chosen(outputs, num_sequences, max_tokens)
    versions = dict(versions or {})
    if engine is not None:
        stale_weights = engine.stale_weights()
        if stale_weights:
            versions.setdefault("the engine's copy", stale_weights)
        tokenizer = tokenizer or engine.tokenizer
        logprobs_mode = logprobs_mode or reported_mode(engine.config)
    if tokenizers and tokenizer is None:
        raise ConfigurationError("tokenizers are compared with the trainer's; pass tokenizer too.")
    # The trainer's own tokenizer has an empty name.
    named_tokenizers = {"": tokenizer, **(tokenizers or {})}
    is_processed = LogprobsMode(logprobs_mode or "policy") is LogprobsMode.PROCESSED
    auditor = _Auditor(chosen, model, sampling_params, is_processed)
    return auditor.report(versions, named_tokenizers)


def _chosen(
    outputs: Iterable[GenerationOutput] | Mapping[str, GenerationOutput],
    num_sequences: int,
    max_tokens: int,
) -> list[GenerationOutput]:
    """Return evenly spaced outputs within the limits; all have log-probabilities, or none has."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    scored = [output for output in values if output.generated_tokens]
    if not scored:
        raise InvalidRequestError(
            "no output holds a generated token; pass the outputs of a rollout."
        )
    has_numbers = any(output.logprobs for output in scored)
    for output in scored:
        num_tokens = len(output.generated_tokens)
        num_reported = len(output.logprobs)
        num_expected = num_tokens if has_numbers else 0
        if num_reported != num_expected:
            raise InvalidRequestError(
                f"{output.request_id} has {num_tokens} generated tokens and {num_reported} "
                "log-probabilities; pass one for each token, or none at all."
            )
    num_chosen = min(num_sequences, len(scored))
    num_left = max_tokens
    chosen: list[GenerationOutput] = []
    for index in range(num_chosen):
        output = scored[index * len(scored) // num_chosen]
        if len(output.generated_tokens) > num_left and chosen:
            continue
        cut = replace(
            output,
            generated_tokens=output.generated_tokens[:num_left],
            logprobs=output.logprobs[:num_left],
        )
        chosen.append(cut)
        num_left -= len(cut.generated_tokens)
    return chosen


class _Auditor:
    """Tests the causes on chosen sequences; `report` has the order of the tests."""

    def __init__(
        self,
        outputs: Sequence[GenerationOutput],
        model: torch.nn.Module,
        params: SamplingParams | None,
        is_processed: bool,
    ) -> None:
        self.outputs = outputs
        self.forwards = Forwards(model, outputs)
        self.lengths = [len(row.completion_ids) for row in self.forwards.rows]
        reported: list[float] = []
        for output in outputs:
            reported.extend(output.logprobs)
        # Engines compute in float32, even if they send more digits.
        reported_N = torch.tensor(reported, dtype=torch.float32, device=self.forwards.device)
        self.reported_N = reported_N.double()
        self.readouts = Readouts(
            logits=list(self._logits(Change())),
            rows=self.forwards.rows,
            temperatures=[output.temperature for output in outputs],
            reported_N=self.reported_N,
            params=params,
            is_processed=is_processed,
        )
        trainer = self.readouts.read(self.readouts.claimed)
        if not reported:
            self.reported_N = trainer.logprobs_N
        self.rounding = self._measured_rounding(trainer)
        self.readouts.slack = agreement.LARGEST_MULTIPLE * self.rounding

        short_dtype = evidence.short_dtype(self.reported_N)
        self.step_N: float | torch.Tensor
        """Distance between neighbouring numbers that the engine could send; 0: any number."""
        if short_dtype is not None:
            self.step_N = self.reported_N.abs() * torch.finfo(short_dtype).eps
            detail = str(short_dtype).removeprefix("torch.")
            hypothesis = Hypothesis(Cause.LOGPROBS_16BIT, detail, trainer)
        else:
            self.step_N = evidence.decimal_step(self.reported_N)
            detail = "" if reported else NO_NUMBERS
            hypothesis = Hypothesis(Cause.ROUNDING, detail, trainer)
        self.clean = self._tested(hypothesis)

    def _logits(self, change: Change) -> Iterator[torch.Tensor]:
        """Yield the logits of each row, `[T, V]`, from a changed forward."""
        for number in range(len(self.lengths)):
            yield self.forwards.logits(number, change)

    def _measured_rounding(self, trainer: Prediction) -> float:
        """Return the rounding of a logit, root-mean-square, in nats.

        Measured on the first sequences against a higher precision, if that takes only seconds.
        """
        dtype = self.forwards.compute_dtype()
        higher = torch.float64 if dtype == torch.float32 else torch.float32
        num_measured = sum(self.lengths[: agreement.NUM_MEASURED])
        sizes_N = trainer.sizes_N[:num_measured]
        logprobs_N = trainer.logprobs_N[:num_measured]

        def measured_logprobs() -> torch.Tensor:
            logits = islice(self._logits(Change()), agreement.NUM_MEASURED)
            return self.readouts.read(self.readouts.claimed, logits).logprobs_N

        rows = self.forwards.rows[: agreement.NUM_MEASURED]
        num_tokens = sum(row.num_tokens for row in rows)
        exact_N = None
        if agreement.is_measurable(self.forwards.inner, num_tokens):
            exact_N = agreement.computed_in(higher, measured_logprobs)
        if exact_N is None:
            noise_1 = agreement.overall_noise([logprobs_N], None, dtype)
            return float(noise_1 / sizes_N.square().mean().sqrt())
        noise = float(((logprobs_N - exact_N) / sizes_N).square().mean().sqrt())
        return max(noise, agreement.ROUNDING * torch.finfo(dtype).eps)

    def _tested(self, hypothesis: Hypothesis) -> TestedCause:
        """Compare the reported numbers with those that a hypothesis predicts."""
        effect = hypothesis.effect
        if isinstance(effect, Change):
            logits = self._logits(effect)
            prediction = self.readouts.read(self.readouts.claimed, logits, rows=effect.rows)
        else:
            prediction = effect
        extra_noise = 0.0
        if hypothesis.noise_share:
            shift_N = evidence.differences(prediction.logprobs_N, self.clean.prediction.logprobs_N)
            extra_noise = hypothesis.noise_share * float(shift_N.square().mean().sqrt())
        # A number that was rounded to steps has the variance of a uniform distribution.
        variance_N = (self.rounding * prediction.sizes_N).square()
        variance_N = variance_N + self.step_N**2 / 12 + extra_noise**2
        noise_N = variance_N.sqrt()
        distances_N = evidence.differences(self.reported_N, prediction.logprobs_N)
        return TestedCause(
            # Drop the change, which frees its weights.
            hypothesis=hypothesis._replace(effect=prediction),
            prediction=prediction,
            noise_N=noise_N,
            distances_N=distances_N,
            log_densities_N=evidence.log_densities(distances_N, noise_N),
        )

    def report(self, versions: Mapping[Any, Any], tokenizers: Mapping[str, Any]) -> AuditReport:
        """Test every cause, and return the report."""
        weights: dict[str, Weights] = {}
        for name, version in versions.items():
            weights[str(name)] = self.forwards.weights_of(version)
        tested = [self.clean]
        if self.clean.hypothesis.detail != NO_NUMBERS:
            tested += map(self._tested, self.readouts.all())
            for hypothesis in hypotheses(self.forwards, weights, tokenizers):
                tested_cause = self._tested(hypothesis)
                tested.append(tested_cause)
                if hypothesis.cause is Cause.OLDER_VERSION:
                    version_weights = weights[hypothesis.detail]
                    tested += map(self._tested, self._updated(tested_cause, version_weights))
            tested += map(self._tested, self._exchanged(tested))
        ranking = self._ranked(tested)
        if weights and self._is_doubtful(ranking[0]):
            tested += map(self._tested, layer_hypotheses(weights))
            ranking = self._ranked(tested)
        best = ranking[0]
        is_rounding = best.evidence.explains and best.evidence.cause is Cause.ROUNDING
        return AuditReport(
            evidence=tuple(ranked.evidence for ranked in ranking),
            draw_z_score=self.readouts.draw_z_score() if is_rounding else None,
            starts=self._starts(best.tested if best.evidence.explains else self.clean),
            num_tokens=len(self.reported_N),
        )

    def _is_doubtful(self, best: RankedCause) -> bool:
        """Return whether the best cause explains nothing, or is unusually large rounding."""
        if not best.evidence.explains:
            return True
        multiple = float((self.clean.distances_N / self.clean.noise_N).median())
        return best.tested is self.clean and multiple > DOUBTFUL_MEDIAN

    def _updated(self, older: TestedCause, weights: Weights) -> Iterator[Hypothesis]:
        """Yield the causes in which the weights changed while sequences were sampled.

        The number of tokens from the older version is fitted for each sequence.
        """
        detail = older.hypothesis.detail
        num_fitted = len(self.lengths)
        are_old: list[torch.Tensor] = []
        num_old_tokens = self._num_leading(older, self.clean.log_densities_N)
        for length, num_old in zip(self.lengths, num_old_tokens, strict=True):
            are_old.append(torch.arange(length) < num_old)
        is_old_N = torch.cat(are_old).to(self.reported_N.device)
        before, after = older.prediction, self.clean.prediction
        mixed = Prediction(
            logprobs_N=torch.where(is_old_N, before.logprobs_N, after.logprobs_N),
            sizes_N=torch.where(is_old_N, before.sizes_N, after.sizes_N),
        )
        yield Hypothesis(Cause.UPDATED, detail, mixed, num_fitted)
        if "past_key_values" not in self.forwards.argument_names:
            return
        # Neither version explains a token that new weights computed from old keys.
        others_N = torch.maximum(self.clean.log_densities_N, self._unsure(older))
        num_old_tokens = self._num_leading(older, others_N)
        num_cached: list[int] = []
        for row, num_old in zip(self.forwards.rows, num_old_tokens, strict=True):
            # The last sampled token has no key yet.
            num_cached.append(len(row.prompt_ids) + num_old - 1)
        change = Change(cached_weights=weights, num_cached=num_cached)
        yield Hypothesis(Cause.OLD_KEYS_KEPT, detail, change, num_fitted)

    def _exchanged(self, tested: Sequence[TestedCause]) -> Iterator[Hypothesis]:
        """Yield the cause in which each sequence has the images that fit best, its own included."""
        candidates = [self.clean]
        for tested_cause in tested:
            if tested_cause.hypothesis.cause is Cause.IMAGES_EXCHANGED:
                candidates.append(tested_cause)
        if len(candidates) == 1:
            return
        densities_CN = torch.stack([candidate.log_densities_N for candidate in candidates])
        best: list[torch.Tensor] = []
        for densities_CT in densities_CN.split(self.lengths, 1):
            best_candidate = densities_CT.sum(1).argmax()
            best.append(best_candidate.expand(densities_CT.shape[1]))
        best_1N = torch.cat(best)[None]
        logprobs_CN = torch.stack([candidate.prediction.logprobs_N for candidate in candidates])
        sizes_CN = torch.stack([candidate.prediction.sizes_N for candidate in candidates])
        mixed = Prediction(
            logprobs_N=logprobs_CN.gather(0, best_1N)[0], sizes_N=sizes_CN.gather(0, best_1N)[0]
        )
        yield Hypothesis(Cause.IMAGES_EXCHANGED, "by sequence", mixed, num_fitted=len(self.lengths))

    def _num_leading(self, older: TestedCause, other_N: torch.Tensor) -> list[int]:
        """Return how many leading tokens of each sequence a version explains better."""
        older_of_sequences = older.log_densities_N.cpu().split(self.lengths)
        other_of_sequences = other_N.cpu().split(self.lengths)
        pairs = zip(older_of_sequences, other_of_sequences, strict=True)
        return [evidence.changepoint(older_T, other_T) for older_T, other_T in pairs]

    def _unsure(self, tested: TestedCause) -> torch.Tensor:
        """Return log-densities, `[N]`, that leave room for another, unknown cause."""
        return evidence.log_densities(DOUBTFUL_MULTIPLE * tested.noise_N, tested.noise_N)

    def _ranked(self, tested: Sequence[TestedCause]) -> list[RankedCause]:
        """Return the causes, best first: those that explain by likelihood, others by distance."""
        ranking = [self._with_rank(tested_cause) for tested_cause in tested]
        return sorted(ranking, key=lambda ranked: ranked.rank)

    def _with_rank(self, tested: TestedCause) -> RankedCause:
        hypothesis = tested.hypothesis
        clean = self.clean
        num_tokens = len(self.reported_N)
        gain = float((tested.log_densities_N - clean.log_densities_N).sum())
        nats = gain - hypothesis.num_fitted * math.log(num_tokens) / 2
        distance = float(tested.distances_N.mean())
        predicted_N = tested.prediction.logprobs_N.clamp(min=-evidence.LARGEST_DIFFERENCE)
        compared = agreement.agrees(self.reported_N[:, None], predicted_N[:, None], tested.noise_N)
        explains = evidence.explains(tested.distances_N, tested.noise_N)
        if tested is clean:
            # One number beyond rounding is a difference; in 16 bits it may be a flipped expert.
            is_short = self.forwards.compute_dtype().itemsize < torch.float32.itemsize
            explains = bool(compared) or (explains and is_short)
        elif hypothesis.noise_share:
            # If another cause is at work, the numbers are closer to the trainer's than to these.
            explains = explains and distance < 0.9 * float(clean.distances_N.mean())
        if not explains:
            rank = (1, distance)
        elif tested is clean:
            # Another cause has to be clearly better.
            rank = (0, -max(nats, evidence.LEAST_EVIDENCE))
        else:
            rank = (0, -max(nats, 0.0))
        return RankedCause(
            rank=rank,
            tested=tested,
            evidence=Evidence(
                cause=hypothesis.cause,
                detail=hypothesis.detail,
                nats_per_token=nats / num_tokens,
                explains=explains,
                agreement=compared,
            ),
        )

    def _starts(self, best: TestedCause) -> dict[str, int | None]:
        """Return the token at which each sequence departs from the trainer's numbers.

        `best` explains the reported numbers; if no cause does, it is the trainer's own prediction.
        """
        better_N = self._unsure(best) if best is self.clean else best.log_densities_N
        gains_N = (better_N - self.clean.log_densities_N).cpu()
        starts: dict[str, int | None] = {}
        for output, gains_T in zip(self.outputs, gains_N.split(self.lengths), strict=True):
            starts[output.request_id] = evidence.first_of_suffix(gains_T)
        return starts
