"""Audit recorded rollouts: score them under hypotheses, and rank the causes.

Owns the choice of the sequences and the order of the tests. Called by the thread that trains;
nothing else may run the model meanwhile.

N: tokens of all sequences, T: completion tokens of a sequence, V: vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.multimodal import text_tokenizer
from cb_rollout.config.enums import LogprobsMode
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.numerics.agreement import (
    LARGEST_MULTIPLE,
    NUM_MEASURED,
    ROUNDING,
    agrees,
    computed_in,
    is_measurable,
    overall_noise,
)
from cb_rollout.engine.sampling.sampler import reported_mode
from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.packing.batch import PackedRow
from cb_rollout.rollout.audit import evidence
from cb_rollout.rollout.audit.draw import draw_test
from cb_rollout.rollout.audit.evidence import Prediction
from cb_rollout.rollout.audit.forwards import Change, Forwards
from cb_rollout.rollout.audit.hypotheses import Hypothesis, hypotheses, layer_hypotheses
from cb_rollout.rollout.audit.readouts import OFF, Readouts, processed
from cb_rollout.rollout.audit.report import AuditReport, Cause, Evidence
from cb_rollout.types import GenerationOutput

if TYPE_CHECKING:
    from cb_rollout.rollout.generator import RolloutGenerator

# A number so far off, in multiples of the noise, is as likely of another cause.
DOUBTFUL_MULTIPLE = 10.0

# Median distance, in multiples of the noise, that rounding alone rarely has.
DOUBTFUL_MEDIAN = 1.5


class TestedCause(NamedTuple):
    """A cause, and how its predictions compare with the reported numbers."""

    cause: Cause
    detail: str
    prediction: Prediction
    noise_N: torch.Tensor
    distances_N: torch.Tensor
    log_densities_N: torch.Tensor
    price: float
    """Nats for fitted parameters."""
    is_coarse: bool
    """True: a computation in 16 bits, whose rounding could hide another cause."""


def audit(
    outputs: Iterable[GenerationOutput],
    model: torch.nn.Module,
    *,
    versions: Mapping[Any, Any] | None = None,
    tokenizer: Any = None,
    engine: "RolloutGenerator | None" = None,
    sampling_params: SamplingParams | None = None,
    logprobs_mode: str | None = None,
    num_sequences: int = 16,
    max_tokens: int = 1024,
) -> AuditReport:
    """Name the cause of a difference between reported and recomputed log-probabilities.

    Sequences are scored by plain forwards of `model`, in its mode for evaluation and without
    gradients, under each hypothesis that the arguments allow. Nothing is written to the model. Call
    it under the autocast, if any, that the trainer scores in. Takes 25 to 40 forwards of the chosen
    sequences, and holds their logits: 4 bytes * `max_tokens` * vocabulary.

    Args:
        outputs: a rollout's outputs, of any engine: `request_id`, `prompt_ids`, at least one
            `generated_tokens`, as many `logprobs` (natural logarithms), and the `temperature`.
        model: the trainer's causal language model as it was when it sampled, plain or wrapped by
            PEFT, DDP or accelerate, on one device.
        versions: earlier weights by name or number: a state dict of the model or of its adapter, or
            a callable without arguments that returns one, called once. All are held at a time.
        tokenizer: of the model; None: causes that need one are not tested, as a retokenised prompt.
        engine: the generator that sampled, if it is one of this package; its tokenizer and its
            `logprobs_mode` count where none is given here.
        sampling_params: truncation and penalties that tokens were sampled with. None: not known, so
            common values are tried, and draws are tested without them.
        logprobs_mode: a `LogprobsMode`: what the trainer takes the numbers for. "policy", the
            default: of the whole vocabulary at the temperature; "processed": after penalties and
            truncation too.
        num_sequences: most sequences to score, evenly chosen.
        max_tokens: most generated tokens to score in all. A sequence that alone has more is cut.

    Returns:
        The report. It is true if rounding explains the numbers and tokens fit the distribution.

    Raises:
        InvalidRequestError: no output has a token; one has no prompt, other numbers of tokens and
            log-probabilities, images, or a token id that the model does not know.
        ConfigurationError: the model cannot be scored here; a version does not fit it.
    """
    if num_sequences < 1 or max_tokens < 1:
        raise ConfigurationError(
            f"num_sequences={num_sequences} and max_tokens={max_tokens} have to be at least 1."
        )
    chosen = _chosen(outputs, model, num_sequences, max_tokens)
    if engine is not None:
        tokenizer = tokenizer or engine.tokenizer
        logprobs_mode = logprobs_mode or reported_mode(engine.config)
    mode = LogprobsMode(logprobs_mode or LogprobsMode.POLICY)
    is_processed = mode is LogprobsMode.PROCESSED
    return _Auditor(chosen, model, sampling_params, is_processed).report(versions or {}, tokenizer)


def _chosen(
    outputs: Iterable[GenerationOutput], model: Any, num_sequences: int, max_tokens: int
) -> list[GenerationOutput]:
    """Return outputs within the limits, evenly chosen, checked."""
    scored = [output for output in outputs if output.generated_tokens]
    if not scored:
        raise InvalidRequestError("no output holds a generated token; pass those of a rollout.")
    vocab_size = hf_compat.vocab_size(hf_compat.unwrap(model))
    for output in scored:
        num, num_reported = len(output.generated_tokens), len(output.logprobs)
        if num != num_reported or not output.prompt_ids or output.images is not None:
            raise InvalidRequestError(
                f"{output.request_id} has {len(output.prompt_ids)} prompt tokens, {num} generated "
                f"tokens and {num_reported} log-probabilities; each generated token needs one, and "
                "the first a prompt, without images."
            )
        ids = [*output.prompt_ids, *output.generated_tokens]
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequestError(
                f"{output.request_id} holds a token id outside the model's vocabulary of "
                f"{vocab_size}; was it generated by another model?"
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
        self.outputs, self.params = outputs, params
        rows = [PackedRow(o.prompt_ids, o.generated_tokens, o.routed_experts) for o in outputs]
        self.forwards = Forwards(model, rows)
        self.lengths = [len(row.completion_ids) for row in rows]
        values = [value for output in outputs for value in output.logprobs]
        # Engines compute in float32, and may send more digits.
        reported_N = torch.tensor(values, dtype=torch.float32, device=self.forwards.device)
        self.reported_N = reported_N.double()
        self.step = evidence.decimal_step(self.reported_N)
        logits = [self.forwards.logits(number, Change()) for number in range(len(rows))]
        temperatures = [output.temperature for output in outputs]
        self.readouts = Readouts(logits, rows, temperatures, self.reported_N, params, is_processed)
        trainer = self.readouts.of(self.readouts.claimed)
        self.rounding = self._measured_rounding(trainer)
        self.readouts.slack = LARGEST_MULTIPLE * self.rounding
        self.clean = self._candidate(Cause.ROUNDING, "", trainer)

    def _measured_rounding(self, trainer: Prediction) -> float:
        """Return the rounding of a logit, root-mean-square, in nats.

        Measured on the first sequences against a higher precision, where that takes seconds.
        """
        dtype, rows = self.forwards.compute_dtype(), self.forwards.rows[:NUM_MEASURED]
        higher = torch.float64 if dtype == torch.float32 else torch.float32
        num_tokens = sum(self.lengths[:NUM_MEASURED])
        sizes_N, own_N = trainer.sizes_N[:num_tokens], trainer.logprobs_N[:num_tokens]

        def values() -> torch.Tensor:
            return torch.cat([self._row(n, Change()).logprobs_N for n in range(len(rows))])

        is_fast = is_measurable(self.forwards.inner, sum(row.num_tokens for row in rows))
        exact_N = computed_in(higher, values) if is_fast else None
        if exact_N is None:
            return float(overall_noise([own_N], None, dtype) / sizes_N.square().mean().sqrt())
        noise = float(((own_N - exact_N) / sizes_N).square().mean().sqrt())
        return max(noise, ROUNDING * torch.finfo(dtype).eps)

    def _row(self, number: int, change: Change) -> Prediction:
        """Return what a forward predicts for one sequence."""
        row = self.forwards.rows[number]
        logits_TV = self.forwards.logits(number, change)
        claimed, slack = self.readouts.claimed, self.readouts.slack
        logprobs_TV = processed(logits_TV, row, claimed, self.outputs[number].temperature, slack)
        tokens_T = torch.tensor(row.completion_ids, device=logprobs_TV.device)
        return evidence.prediction(logprobs_TV, tokens_T)

    def _predicted(self, change: Change, *, is_whole: bool = True) -> Prediction:
        """Return what a changed forward predicts.

        Unless `is_whole`, sequences after those that refute it are not computed: they are taken to
        be as far off.
        """
        rows, num_tokens = [], 0
        for number, length in enumerate(self.lengths):
            rows.append(self._row(number, change))
            num_tokens += length
            own, seen_N = evidence.joined(rows), self.reported_N[:num_tokens]
            distances_N = evidence.differences(seen_N, own.logprobs_N)
            limit = evidence.max_outliers(len(self.reported_N))
            if not is_whole and evidence.num_outliers(distances_N, self._noise(own)) > limit:
                rest_N = self.reported_N[num_tokens:] - distances_N.mean()
                sizes_N = self.clean.prediction.sizes_N[num_tokens:]
                return evidence.joined([own, Prediction(rest_N, sizes_N)])
        return evidence.joined(rows)

    def _noise(self, own: Prediction, extra_N: float | torch.Tensor = 0.0) -> torch.Tensor:
        """Return the rounding of predictions and reports, `[N]`; `extra_N`: of a cause itself."""
        noise_N = (self.rounding * own.sizes_N).square() + self.step**2 / 12
        return (noise_N + torch.as_tensor(extra_N, device=noise_N.device).square()).sqrt()

    def _candidate(
        self,
        cause: Cause,
        detail: str,
        own: Prediction,
        price: float = 0.0,
        extra_N: float | torch.Tensor = 0.0,
    ) -> TestedCause:
        noise_N = self._noise(own, extra_N)
        distances_N = evidence.differences(self.reported_N, own.logprobs_N)
        densities_N = evidence.log_densities(distances_N, noise_N)
        return TestedCause(cause, detail, own, noise_N, distances_N, densities_N, price, False)

    def _tested(self, hypothesis: Hypothesis) -> TestedCause:
        # A version is held against each sequence later on.
        is_whole = hypothesis.noise_share > 0 or hypothesis.cause is Cause.OLDER_VERSION
        own = self._predicted(hypothesis.change, is_whole=is_whole)
        return self._coarse(hypothesis.cause, hypothesis.detail, own, hypothesis.noise_share)

    def _coarse(
        self, cause: Cause, detail: str, own: Prediction, share: float, price: float = 0.0
    ) -> TestedCause:
        """Compare a prediction that has rounding of its own, if `share` is above 0."""
        moved_N = evidence.differences(own.logprobs_N, self.clean.prediction.logprobs_N)
        extra = share * float(moved_N.square().mean().sqrt())
        found = self._candidate(cause, detail, own, price, extra)
        return found._replace(is_coarse=share > 0)

    def _short(self, dtype: torch.dtype) -> TestedCause:
        """Return the cause that numbers are of 16 bits, where each of them is."""
        own = self.clean.prediction
        half_step_N = own.logprobs_N.abs() * torch.finfo(dtype).eps / 2
        detail = str(dtype).removeprefix("torch.")
        found = self._candidate(Cause.LOGPROBS_16BIT, detail, own, extra_N=half_step_N)
        # A number on a coarse grid is as probable as all float32 numbers around it.
        spare_N = (self.reported_N != 0) * evidence.SPARE_NATS[dtype]
        return found._replace(log_densities_N=found.log_densities_N + spare_N)

    def report(self, versions: Mapping[Any, Any], tokenizer: Any) -> AuditReport:
        """Test every cause, and return the report."""
        weights = {str(name): self.forwards.weights_of(own) for name, own in versions.items()}
        words = None if tokenizer is None else text_tokenizer(tokenizer)
        found = [self.clean]
        for own in self.readouts.all():
            price = own.num_fitted * math.log(len(self.reported_N)) / 2
            found.append(self._coarse(*own[:3], own.noise_share, price))
        dtype = evidence.short_dtype(self.reported_N)
        found += [self._short(dtype)] if dtype else []
        for hypothesis in hypotheses(self.forwards, weights, words):
            found.append(self._tested(hypothesis))
            if hypothesis.cause is Cause.OLDER_VERSION:
                found += self._updated(found[-1], hypothesis)
        ranking = self._ranked(found)
        multiple = float((self.clean.distances_N / self.clean.noise_N).median())
        is_doubtful = ranking[0][0] is self.clean and multiple > DOUBTFUL_MEDIAN
        if weights and (is_doubtful or not ranking[0][1].explains):
            layers = list(layer_hypotheses(weights))
            price = math.log(len(layers))
            found += (self._tested(layer)._replace(price=price) for layer in layers)
            ranking = self._ranked(found)
        best, first = ranking[0]
        is_rounding = first.explains and best is self.clean
        draw = draw_test(self.readouts, self.params or OFF) if is_rounding else None
        results = tuple(result for _, result in ranking)
        return AuditReport(
            results,
            draw,
            self._starts(best if first.explains else self.clean),
            len(self.reported_N),
        )

    def _updated(self, older: TestedCause, hypothesis: Hypothesis) -> Iterator[TestedCause]:
        """Yield the causes of weights that changed while sequences were sampled.

        Each sequence has its own number of tokens from the version before.
        """
        price, detail = 2.0 * len(self.lengths), hypothesis.detail
        counts = self._leading(older, self.clean.log_densities_N)
        places_N = torch.cat([torch.arange(n) for n in self.lengths])
        counts_N = torch.tensor(counts).repeat_interleave(torch.tensor(self.lengths))
        is_old_N = (places_N < counts_N).to(self.reported_N.device)
        both = zip(older.prediction, self.clean.prediction, strict=True)
        mixed = Prediction(*(torch.where(is_old_N, a, b) for a, b in both))
        yield self._candidate(Cause.UPDATED, detail, mixed, price)
        if "past_key_values" not in self.forwards.argument_names:
            return
        prompts = [len(row.prompt_ids) for row in self.forwards.rows]
        kept = []
        for ends in (counts, self._leading(older, self._unsure(older))):
            # The last sampled token has no key yet.
            cached = [n + count - 1 for n, count in zip(prompts, ends, strict=True)]
            change = Change(cached_weights=hypothesis.change.weights, num_cached=cached)
            own = self._predicted(change)
            kept.append(self._candidate(Cause.OLD_KEYS_KEPT, detail, own, price))
        yield self._joined(kept)

    def _joined(self, found: Sequence[TestedCause]) -> TestedCause:
        """Return the candidate that has for each sequence the prediction of the likeliest one."""
        sums = torch.stack(
            [torch.stack([x.sum() for x in c.log_densities_N.split(self.lengths)]) for c in found]
        )
        best_N = sums.argmax(0).cpu().repeat_interleave(torch.tensor(self.lengths))
        best_1N = best_N.to(self.reported_N.device)[None]
        fields = zip(*(own.prediction for own in found), strict=True)
        own = Prediction(*(torch.stack(field).gather(0, best_1N)[0] for field in fields))
        return self._candidate(found[0].cause, found[0].detail, own, found[0].price)

    def _leading(self, older: TestedCause, other_N: torch.Tensor) -> list[int]:
        """Return how many leading tokens of each sequence a version explains better."""
        both = (values.cpu().split(self.lengths) for values in (older.log_densities_N, other_N))
        return [evidence.changepoint(*pair) for pair in zip(*both, strict=True)]

    def _unsure(self, own: TestedCause) -> torch.Tensor:
        """Return log-densities, `[N]`, of numbers that are as likely as not of another cause."""
        return evidence.log_densities(DOUBTFUL_MULTIPLE * own.noise_N, own.noise_N)

    def _ranked(self, found: Sequence[TestedCause]) -> list[tuple[TestedCause, Evidence]]:
        """Return the candidates, the best first: likelihood if they explain, else distance."""
        clean, ranking = self.clean, []
        for own in found:
            nats = float((own.log_densities_N - clean.log_densities_N).sum()) - own.price
            predicted_N = own.prediction.logprobs_N.clamp(min=-evidence.LARGEST_DIFFERENCE)
            agreement = agrees(self.reported_N[:, None], predicted_N[:, None], own.noise_N)
            explains = evidence.explains(own.distances_N, own.noise_N)
            if own is clean:
                # One number beyond rounding is a difference.
                explains = bool(agreement)
            elif own.is_coarse:
                # Another cause leaves the numbers closer to the trainer's than to these.
                explains &= float(own.distances_N.mean()) < 0.9 * float(clean.distances_N.mean())
            per_token = nats / len(self.reported_N)
            result = Evidence(own.cause, own.detail, per_token, explains, agreement)
            order = -max(nats, evidence.LEAST_EVIDENCE * (own is clean))
            rank = order if explains else float(own.distances_N.mean())
            ranking.append(((not explains, rank), own, result))
        return [(own, result) for _, own, result in sorted(ranking, key=lambda entry: entry[0])]

    def _starts(self, best: TestedCause) -> dict[str, int | None]:
        """Return the token at which each sequence leaves the trainer's numbers.

        `best` explains them; else it is the trainer's own prediction.
        """
        better_N = self._unsure(best) if best is self.clean else best.log_densities_N
        gains = (better_N - self.clean.log_densities_N).cpu().split(self.lengths)
        pairs = zip(self.outputs, gains, strict=True)
        return {output.request_id: evidence.first_of_suffix(own) for output, own in pairs}
