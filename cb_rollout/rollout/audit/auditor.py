"""Audit recorded rollouts: score them under hypotheses, and rank the causes.

Owns the choice of the sequences and the order of the tests. Called by the thread that trains;
nothing else may run the model meanwhile.

N: tokens of all sequences, T: completion tokens of a sequence, V: vocabulary.
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

# A number so far off, in multiples of the noise, is as likely of another cause.
DOUBTFUL_MULTIPLE = 10.0

# Median distance, in multiples of the noise, that rounding alone rarely has.
DOUBTFUL_MEDIAN = 1.5


class TestedCause(NamedTuple):
    """A hypothesis, and how its prediction compares with the reported numbers."""

    hypothesis: Hypothesis
    prediction: Prediction
    noise_N: torch.Tensor
    distances_N: torch.Tensor
    log_densities_N: torch.Tensor


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
    """Name the cause of a difference between reported and recomputed log-probabilities.

    Sequences are scored by plain forwards of `model`, in evaluation mode, without gradients. Call
    it under the autocast, if any, that the trainer scores in. Takes 30 to 45 forwards of the chosen
    sequences, with images 18 more, and holds their logits: 4 bytes * `max_tokens` * vocabulary.

    Args:
        outputs: a rollout's outputs, or a dict of them, of any engine: `request_id`, `prompt_ids`
            and their `images`, `generated_tokens`, as many `logprobs` (natural logarithms), and the
            `temperature`. If none has `logprobs`, the tokens alone are tested, as draws.
        model: the trainer's causal language model as it was when it sampled, plain or wrapped by
            PEFT, DDP or accelerate, on one device.
        versions: earlier weights by name or number: a state dict of the model or of its adapter, or
            a callable that returns one. All are held at a time.
        tokenizer: the trainer's. None: causes that need it are not tested, as a second template.
        tokenizers: others by name that the engine may have had, as of another revision.
        engine: the generator of this package that sampled. Its tokenizer and `logprobs_mode` are
            the defaults, its copy of the weights is a version.
        sampling_params: truncation and penalties that tokens were sampled with. None: not known, so
            common values are tried, and draws are tested without them.
        logprobs_mode: what the trainer takes the numbers for: "policy", the default, is of the
            whole vocabulary at the temperature; "processed" after penalties and truncation too.
        num_sequences: most sequences to score, evenly chosen.
        max_tokens: most generated tokens to score in all. A sequence that alone has more is cut.

    Returns:
        The report. It is true if rounding explains the numbers and tokens fit the distribution.

    Raises:
        InvalidRequestError: no output has a token; one has no prompt, other numbers of tokens and
            log-probabilities, or a token id that the model does not know.
        ConfigurationError: the model cannot be scored here; a version does not fit it; images or
            the trainer's tokenizer are missing.
    """
    if num_sequences < 1 or max_tokens < 1:
        raise ConfigurationError(
            f"num_sequences={num_sequences} and max_tokens={max_tokens} have to be at least 1."
        )
    chosen, versions = _chosen(outputs, num_sequences, max_tokens), dict(versions or {})
    if engine is not None:
        if stale := engine.stale_weights():
            versions.setdefault("the engine's copy", stale)
        tokenizer = tokenizer or engine.tokenizer
        logprobs_mode = logprobs_mode or reported_mode(engine.config)
    if tokenizers and tokenizer is None:
        raise ConfigurationError("tokenizers are compared with the trainer's; pass tokenizer too.")
    words = {"": tokenizer, **(tokenizers or {})}
    is_processed = LogprobsMode(logprobs_mode or "policy") is LogprobsMode.PROCESSED
    return _Auditor(chosen, model, sampling_params, is_processed).report(versions, words)


def _chosen(
    outputs: Iterable[GenerationOutput] | Mapping[str, GenerationOutput],
    num_sequences: int,
    max_tokens: int,
) -> list[GenerationOutput]:
    """Return outputs within the limits, evenly chosen, with numbers for each token or for none."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    scored = [output for output in values if output.generated_tokens]
    if not scored:
        raise InvalidRequestError("no output holds a generated token; pass those of a rollout.")
    has_numbers = any(output.logprobs for output in scored)
    for output in scored:
        num, num_reported = len(output.generated_tokens), len(output.logprobs)
        if num_reported != num * has_numbers:
            raise InvalidRequestError(
                f"{output.request_id} has {num} generated tokens and {num_reported} "
                "log-probabilities; report one for each token, or none at all."
            )
    count = min(num_sequences, len(scored))
    chosen, left = [], max_tokens
    for output in (scored[index * len(scored) // count] for index in range(count)):
        if len(output.generated_tokens) <= left or not chosen:
            tokens, logprobs = output.generated_tokens[:left], output.logprobs[:left]
            chosen.append(replace(output, generated_tokens=tokens, logprobs=logprobs))
            left -= len(tokens)
    return chosen


class _Auditor:
    def __init__(
        self,
        outputs: Sequence[GenerationOutput],
        model: torch.nn.Module,
        params: SamplingParams | None,
        is_processed: bool,
    ) -> None:
        self.outputs = outputs
        self.forwards = Forwards(model, outputs)
        rows = self.forwards.rows
        self.lengths = [len(row.completion_ids) for row in rows]
        values = [value for output in outputs for value in output.logprobs]
        # Engines compute in float32, and may send more digits.
        reported_N = torch.tensor(values, dtype=torch.float32, device=self.forwards.device)
        self.reported_N = reported_N.double()
        logits = list(self._logits(Change()))
        temperatures = [output.temperature for output in outputs]
        self.readouts = Readouts(logits, rows, temperatures, self.reported_N, params, is_processed)
        trainer = self.readouts.read(self.readouts.claimed)
        cause, detail = Cause.ROUNDING, ""
        if not values:
            self.reported_N, detail = trainer.logprobs_N, NO_NUMBERS
        self.rounding = self._measured_rounding(trainer)
        self.readouts.slack = agreement.LARGEST_MULTIPLE * self.rounding
        self.step_N: float | torch.Tensor = evidence.decimal_step(self.reported_N)
        """Distance of the numbers that could be sent."""
        if (dtype := evidence.short_dtype(self.reported_N)) is not None:
            cause, detail = Cause.LOGPROBS_16BIT, str(dtype).removeprefix("torch.")
            self.step_N = self.reported_N.abs() * torch.finfo(dtype).eps
        self.clean = self._tested(Hypothesis(cause, detail, trainer))

    def _logits(self, change: Change) -> Iterator[torch.Tensor]:
        """Yield the logits of each row, `[T, V]`, by a changed forward."""
        return (self.forwards.logits(number, change) for number in range(len(self.lengths)))

    def _measured_rounding(self, trainer: Prediction) -> float:
        """Return the rounding of a logit, root-mean-square, in nats.

        Measured on the first sequences against a higher precision, where that takes seconds.
        """
        dtype, rows = self.forwards.compute_dtype(), self.forwards.rows[: agreement.NUM_MEASURED]
        higher = torch.float64 if dtype == torch.float32 else torch.float32
        num_tokens = sum(self.lengths[: agreement.NUM_MEASURED])
        sizes_N, own_N = trainer.sizes_N[:num_tokens], trainer.logprobs_N[:num_tokens]

        def values() -> torch.Tensor:
            logits = islice(self._logits(Change()), agreement.NUM_MEASURED)
            return self.readouts.read(self.readouts.claimed, logits).logprobs_N

        is_fast = agreement.is_measurable(self.forwards.inner, sum(row.num_tokens for row in rows))
        exact_N = agreement.computed_in(higher, values) if is_fast else None
        if exact_N is None:
            noise_1 = agreement.overall_noise([own_N], None, dtype)
            return float(noise_1 / sizes_N.square().mean().sqrt())
        noise = float(((own_N - exact_N) / sizes_N).square().mean().sqrt())
        return max(noise, agreement.ROUNDING * torch.finfo(dtype).eps)

    def _tested(self, hypothesis: Hypothesis) -> TestedCause:
        own, extra = hypothesis.effect, 0.0
        if isinstance(own, Change):
            own = self.readouts.read(self.readouts.claimed, self._logits(own), rows=own.rows)
        if hypothesis.noise_share:
            moved_N = evidence.differences(own.logprobs_N, self.clean.prediction.logprobs_N)
            extra = hypothesis.noise_share * float(moved_N.square().mean().sqrt())
        noise_N = (self.rounding * own.sizes_N).square() + self.step_N**2 / 12 + extra**2
        noise_N = noise_N.sqrt()
        distances_N = evidence.differences(self.reported_N, own.logprobs_N)
        densities_N = evidence.log_densities(distances_N, noise_N)
        # Its weights are let go.
        return TestedCause(hypothesis._replace(effect=own), own, noise_N, distances_N, densities_N)

    def report(self, versions: Mapping[Any, Any], tokenizers: Mapping[str, Any]) -> AuditReport:
        """Test every cause, and return the report."""
        weights = {str(name): self.forwards.weights_of(own) for name, own in versions.items()}
        found = [self.clean]
        if self.clean.hypothesis.detail != NO_NUMBERS:
            found += map(self._tested, self.readouts.all())
            for own in hypotheses(self.forwards, weights, tokenizers):
                found.append(self._tested(own))
                if own.cause is Cause.OLDER_VERSION:
                    found += map(self._tested, self._updated(found[-1], weights[own.detail]))
            found += map(self._tested, self._exchanged(found))
        ranking = self._ranked(found)
        multiple = float((self.clean.distances_N / self.clean.noise_N).median())
        is_doubtful = ranking[0][0] is self.clean and multiple > DOUBTFUL_MEDIAN
        if weights and (is_doubtful or not ranking[0][1].explains):
            found += map(self._tested, layer_hypotheses(weights))
            ranking = self._ranked(found)
        best, first = ranking[0]
        is_rounding = first.explains and first.cause is Cause.ROUNDING
        return AuditReport(
            tuple(result for _, result in ranking),
            self.readouts.draw_z_score() if is_rounding else None,
            self._starts(best if first.explains else self.clean),
            len(self.reported_N),
        )

    def _updated(self, older: TestedCause, weights: Weights) -> Iterator[Hypothesis]:
        """Yield the causes of weights that changed while sequences were sampled.

        Each sequence has its own number of tokens from the version before.
        """
        detail, num_fitted = older.hypothesis.detail, len(self.lengths)
        counts = self._leading(older, self.clean.log_densities_N)
        is_old = [torch.arange(n) < count for n, count in zip(self.lengths, counts, strict=True)]
        is_old_N = torch.cat(is_old).to(self.reported_N.device)
        both = zip(older.prediction, self.clean.prediction, strict=True)
        mixed = Prediction(*(torch.where(is_old_N, a, b) for a, b in both))
        yield Hypothesis(Cause.UPDATED, detail, mixed, num_fitted)
        if "past_key_values" in self.forwards.argument_names:
            # Neither version explains a token of new weights and old keys.
            others_N = torch.maximum(self.clean.log_densities_N, self._unsure(older))
            prompts = [len(row.prompt_ids) for row in self.forwards.rows]
            counts = self._leading(older, others_N)
            # The last sampled token has no key yet.
            cached = [n + count - 1 for n, count in zip(prompts, counts, strict=True)]
            change = Change(cached_weights=weights, num_cached=cached)
            yield Hypothesis(Cause.OLD_KEYS_KEPT, detail, change, num_fitted)

    def _exchanged(self, found: Sequence[TestedCause]) -> Iterator[Hypothesis]:
        """Yield images of another prompt for each sequence, or its own, whichever fits best."""
        cause = Cause.IMAGES_EXCHANGED
        tested = [self.clean, *(own for own in found if own.hypothesis.cause is cause)]
        parts_CT = torch.stack([own.log_densities_N for own in tested]).split(self.lengths, 1)
        best_N = torch.cat([own.sum(1).argmax().expand(own.shape[1]) for own in parts_CT])
        both = zip(*(own.prediction for own in tested), strict=True)
        mixed = Prediction(*(torch.stack(own).gather(0, best_N[None])[0] for own in both))
        if len(tested) > 1:
            yield Hypothesis(cause, "by sequence", mixed, num_fitted=len(self.lengths))

    def _leading(self, older: TestedCause, other_N: torch.Tensor) -> list[int]:
        """Return how many leading tokens of each sequence a version explains better."""
        both = (values.cpu().split(self.lengths) for values in (older.log_densities_N, other_N))
        return [evidence.changepoint(*pair) for pair in zip(*both, strict=True)]

    def _unsure(self, own: TestedCause) -> torch.Tensor:
        """Return log-densities, `[N]`, of numbers that are as likely as not of another cause."""
        return evidence.log_densities(DOUBTFUL_MULTIPLE * own.noise_N, own.noise_N)

    def _ranked(self, found: Sequence[TestedCause]) -> list[tuple[TestedCause, Evidence]]:
        """Return the causes, the best first: likelihood if they explain, else distance."""
        clean, ranking, num_tokens = self.clean, [], len(self.reported_N)
        for own in found:
            cause, detail, _, num_fitted, noise_share = own.hypothesis
            gain = float((own.log_densities_N - clean.log_densities_N).sum())
            nats = gain - num_fitted * math.log(num_tokens) / 2
            distance = float(own.distances_N.mean())
            predicted_N = own.prediction.logprobs_N.clamp(min=-evidence.LARGEST_DIFFERENCE)
            pair_N1 = self.reported_N[:, None], predicted_N[:, None]
            compared = agreement.agrees(*pair_N1, own.noise_N)
            explains = evidence.explains(own.distances_N, own.noise_N)
            if own is clean:
                # One number beyond rounding is a difference, unless 16 bits flip an expert.
                is_short = self.forwards.compute_dtype().itemsize < torch.float32.itemsize
                explains = bool(compared) or (explains and is_short)
            elif noise_share:
                # Another cause leaves the numbers closer to the trainer's than to these.
                explains &= distance < 0.9 * float(clean.distances_N.mean())
            order = -max(nats, evidence.LEAST_EVIDENCE * (own is clean))
            result = Evidence(cause, detail, nats / num_tokens, explains, compared)
            ranking.append(((not explains, order if explains else distance), own, result))
        return [(own, result) for _, own, result in sorted(ranking, key=lambda entry: entry[0])]

    def _starts(self, best: TestedCause) -> dict[str, int | None]:
        """Return the token at which each sequence leaves the trainer's numbers.

        `best` explains them; else it is the trainer's own prediction.
        """
        better_N = self._unsure(best) if best is self.clean else best.log_densities_N
        gains = (better_N - self.clean.log_densities_N).cpu().split(self.lengths)
        pairs = zip(self.outputs, gains, strict=True)
        return {output.request_id: evidence.first_of_suffix(own) for output, own in pairs}
