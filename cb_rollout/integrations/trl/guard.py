"""Compare sampled log-probabilities with the trainer's own forward.

Owns the schedule of checks, their metrics, the fallback or error when they differ too much, and
the settings under which the two are not of one distribution: the loss of TRL 1.16 takes a
log-softmax of logits/temperature over the whole vocabulary. Called by the trainer, on its thread;
with several processes all of them call it together.

B: rows of a batch, T: tokens of a completion.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cb_rollout.compat.accelerate import shards_models
from cb_rollout.compat.torch import compute_dtype
from cb_rollout.config import enums
from cb_rollout.config.combinations import refused
from cb_rollout.config.hf import COUNTERPARTS
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.numerics import agreement
from cb_rollout.engine.sampling.sampler import reported_mode
from cb_rollout.errors import LogprobDriftError
from cb_rollout.integrations.trl.backend import AttachedGenerator
from cb_rollout.integrations.trl.images import image_arguments
from cb_rollout.integrations.trl.rows.loss_rows import UNKNOWN_ID, LossBatch, LossRow
from cb_rollout.rollout.audit.drift_audit import MAX_TOKENS, audit_drift, holds_whole_model
from cb_rollout.rollout.audit.report import AuditReport
from cb_rollout.rollout.distributed import largest_of_all
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.rollout.saved import SavedRollouts
from cb_rollout.rollout.verification import DriftReport, drift
from cb_rollout.types import GenerationOutput

# Share of a rollout's ratios that rounding alone may clip; a clipped one has no gradient.
MAX_CLIPPED_SHARE = 0.01

# Tokens before a difference that are audited with it.
NUM_BEFORE = 16

# Metrics that are fields of a `DriftReport`.
LOGGED = (
    *("rollout/logprob_drift_max", "rollout/logprob_drift_mean", "rollout/logprob_drift_k1"),
    *("rollout/logprob_drift_k3", "rollout/logprob_drift_chi_squared"),
    "rollout/logprob_drift_effective_sample_size",
)

# Losses of trl 1.16 that weigh ratios smoothly.
UNCLIPPED_LOSSES = ("sapo", "vespo")


class ComparedRow(NamedTuple):
    """Log-probabilities of a row, sampled and by the trainer."""

    row: LossRow
    positions: list[int]
    """Indices of the completion's tokens that are compared."""
    sampled: list[float]
    trained: list[float]

    def first_difference(self, limit: float, temperature: float) -> GenerationOutput | None:
        """Return the tokens around the first difference beyond `limit`, in nats.

        None: no difference is, or a number is not finite. Tokens before become the prompt.
        """
        pairs = enumerate(zip(self.sampled, self.trained, strict=True))
        first = next((i for i, (a, b) in pairs if not abs(a - b) <= limit), None)
        if first is None:
            return None
        begin = max(0, first - NUM_BEFORE)
        # Tokens of tools and of older policies stand between the others.
        gap = self.positions[first] - first
        run = [i for i, t in enumerate(self.positions) if i >= begin and t - i == gap]
        start, ids = self.positions[run[0]], self.row.completion_ids
        logprobs = [self.sampled[i] for i in run[:MAX_TOKENS]]
        if not all(map(math.isfinite, logprobs)):
            return None
        return GenerationOutput(
            self.row.name,
            [*self.row.prompt_ids, *ids[:start]],
            ids[start : start + len(logprobs)],
            logprobs,
            temperature=temperature,
        )


class LogprobGuard:
    """Decides whether sampled log-probabilities may be used as the trainer's."""

    def __init__(
        self,
        trainer: Any,
        generator: AttachedGenerator,
        recompute: Callable[[LossBatch], torch.Tensor],
    ) -> None:
        """Let `recompute` return the trainer's log-probabilities, (rows, T), of some rows."""
        config = generator.config
        self._trainer, self._generator, self._config = trainer, generator, config
        self._recompute = recompute
        self._num_rollouts = 0
        self.is_due = False
        """True until this rollout's log-probabilities were compared."""
        self._is_auto = config.old_logps == enums.OldLogps.AUTO
        self._was_said = False
        self.is_trusted = config.old_logps == enums.OldLogps.ROLLOUT
        """True: sampled log-probabilities are used as the old ones."""

    @property
    def replaces_loss(self) -> bool:
        """True: the old ones are the sampled ones, even where the trainer takes its loss's own."""
        return self.is_trusted and not self._is_auto

    def begin_rollout(self, is_training: bool) -> None:
        every = self._config.verify_every_steps
        self.is_due = False
        if is_training and every and are_comparable(self._config, self._generator.manager.defaults):
            self._num_rollouts += 1
            # Saved rollouts drift from a policy that learns otherwise than the one that sampled.
            is_always_due = self._is_auto and isinstance(self._generator, SavedRollouts)
            self.is_due = is_always_due or (self._num_rollouts - 1) % every == 0

    def check(self, batch: LossBatch, recomputed_BT: torch.Tensor | None = None) -> None:
        """Compare tokens of some rows by the current policy, once for each rollout that is due.

        Args:
            batch: all rows; unknown rows, and tokens that its mask leaves out, are skipped.
            recomputed_BT: log-probabilities of all rows; old_logps="auto" then compares all. None:
                they are computed here.

        Raises:
            LogprobDriftError: they differ by more than `max_logprob_drift`.
        """
        rows, version = batch.rows, self._generator.policy_version
        known = [number for number, row in enumerate(rows) if row.id != UNKNOWN_ID]
        is_unfit = not known or any(rows[number].logprobs is None for number in known)
        if not self.is_due or largest_of_all(self._trainer.accelerator, is_unfit):
            return
        self.is_due = False
        is_of_all = recomputed_BT is not None and self._is_auto
        num_chosen = len(known) if is_of_all else self._config.verify_num_sequences
        stride = max(1, len(known) // num_chosen)
        # Other rows each time, so that every row is checked at some time.
        first = (self._num_rollouts - 1) // self._config.verify_every_steps % stride
        chosen = known[first::stride][:num_chosen]
        if recomputed_BT is None:
            trained_BT = self._recompute(batch.at(chosen, len(chosen)))
        else:
            trained_BT = recomputed_BT[chosen]
        compared: dict[str, ComparedRow] = {}
        masks = batch.completion_mask[chosen].tolist()
        for number, values, mask in zip(chosen, trained_BT.float().tolist(), masks, strict=True):
            row = rows[number]
            assert row.logprobs is not None
            positions = [
                t
                for t, is_sampled in enumerate(row.is_sampled)
                if is_sampled and mask[t] and row.versions[t] in (None, version)
            ]
            pair = ([nats[t] for t in positions] for nats in (row.logprobs, values))
            compared[f"row {number}, {row.name}"] = ComparedRow(row, positions, *pair)
        some = chosen[: agreement.NUM_MEASURED]
        measured = list(compared.values())[: agreement.NUM_MEASURED]
        noise = self._noise(measured, trained_BT, batch.at(some, len(some)))
        sampled = {name: row.sampled for name, row in compared.items()}
        trained = {name: row.trained for name, row in compared.items()}
        report = drift(sampled, trained, float(noise))
        worst = compared.get(report.request_id)
        if worst is not None:
            metrics = {name: getattr(report, name.rpartition("drift_")[2]) for name in LOGGED}
            if report.first_position is not None:
                position = worst.positions[report.first_position]
                metrics["rollout/logprob_drift_first_token"] = position
            for name, value in metrics.items():
                self._trainer._metrics["train"][name].append(value)
        rows = [row for row in compared.values() if row.sampled]
        self._act(report, worst, batch, rows)
        if self._is_auto:
            self._choose(rows, noise, batch)

    def are_usable(self, sampled_BT: torch.Tensor | None, rows: Sequence[LossRow]) -> bool:
        """Return whether sampled log-probabilities may be the old ones, on every process.

        With old_logps="auto" only those of the trainer's own version: there the two are equal.
        """
        if not self.is_trusted:
            return False
        is_older = self._is_auto and any(
            version != self._generator.policy_version
            for row in rows
            for version, is_sampled in zip(row.versions, row.is_sampled, strict=True)
            if is_sampled
        )
        return not largest_of_all(self._trainer.accelerator, float(sampled_BT is None or is_older))

    def _noise(
        self, some: list[ComparedRow], trained_BT: torch.Tensor, batch: LossBatch
    ) -> torch.Tensor:
        """Return the rounding, in nats, of some rows' log-probabilities, `[1]`."""
        model, accelerator = self._trainer.model, self._trainer.accelerator
        dtype = compute_dtype(model, accelerator.mixed_precision)
        is_coarse = dtype.itemsize < torch.float32.itemsize
        positions = [compared.positions for compared in some]
        num_tokens = sum(len(c.row.prompt_ids) + len(c.row.completion_ids) for c in some)
        precise = None
        is_measured = is_coarse or agreement.is_measurable(model, num_tokens)
        if is_measured and not shards_models(accelerator):
            higher = torch.float32 if is_coarse else torch.float64
            precise = agreement.computed_in(higher, lambda: _at(self._recompute(batch), positions))
        return agreement.overall_noise(_at(trained_BT, positions), precise, dtype)

    def _choose(
        self, compared: Sequence[ComparedRow], noise: torch.Tensor, batch: LossBatch
    ) -> None:
        """Trust the sampled ones from now on if they are the trainer's to rounding.

        And if the loss would clip next to none of the ratios that rounding leaves.
        """
        sampled = [torch.tensor(row.sampled) for row in compared]
        trained = [torch.tensor(row.trained) for row in compared]
        found = agreement.agrees(sampled, trained, noise.expand(len(compared)))
        log_ratios = [ours - theirs for ours, theirs in zip(trained, sampled, strict=True)]
        clipped = _clipped_share(self._trainer, log_ratios)
        is_here = bool(compared) and bool(found) and clipped <= MAX_CLIPPED_SHARE
        self.is_trusted = not largest_of_all(self._trainer.accelerator, float(not is_here))
        if self.is_trusted or is_here or not compared or self._was_said:
            return
        self._was_said = True
        reason, said = f"sampled log-probabilities are off the trainer's by {found}", ""
        if not found:
            rows = zip(compared, sampled, trained, strict=True)
            differing = [row for row, a, b in rows if not agreement.agrees([a], [b], noise)]
            _, said = self._audited(batch, differing, agreement.TYPICAL_MULTIPLE * float(noise))
        else:
            reason = (
                f"rounding alone would clip {clipped:.0%} of the ratios (epsilon="
                f"{self._trainer.epsilon_low:g}, and {found.noise:.2g} nats of rounding)"
            )
        warnings.warn(
            f"old_logps='auto': {reason}; old ones are recomputed by the trainer.{said}",
            stacklevel=2,
        )

    def _act(
        self,
        report: DriftReport,
        worst: ComparedRow | None,
        batch: LossBatch,
        rows: Sequence[ComparedRow],
    ) -> None:
        allowed = self._config.max_logprob_drift
        if allowed is None and self._config.numerics == enums.Numerics.BITWISE:
            allowed = 0.0
        if allowed is None or largest_of_all(self._trainer.accelerator, report.max) <= allowed:
            return
        message = "on another process"
        if worst is not None and report.max > allowed:
            message = self._description(report, worst)
        message += f", max_logprob_drift={allowed:.3g}; "
        if self._config.on_logprob_drift == enums.OnLogprobDrift.RAISE:
            message += "raise it, or look for what changes the forward between rollout and loss."
            audited, said = self._audited(batch, rows, allowed)
            raise LogprobDriftError(message + said, audited)
        if self.is_trusted:
            message += "old log-probabilities are recomputed by the trainer from now on."
            warnings.warn(message + self._audited(batch, rows, allowed)[1], stacklevel=2)
        self.is_trusted = False

    def _audited(
        self, batch: LossBatch, rows: Sequence[ComparedRow], limit: float
    ) -> tuple[AuditReport | None, str]:
        """Return why rows have differences beyond `limit`, in nats, and a sentence that says it.

        None and "": none of them has, or the model and its inputs cannot be audited here.
        """
        trainer, generator = self._trainer, self._generator
        found = [row.first_difference(limit, trainer.temperature) for row in rows]
        outputs = [output for output in found if output is not None]
        if not holds_whole_model(trainer) or image_arguments(batch.settings):
            return None, ""
        report = audit_drift(
            outputs,
            trainer,
            engine=generator if isinstance(generator, RolloutGenerator) else None,
            sampling_params=generator.manager.defaults,
            logprobs_mode=reported_mode(self._config),
        )
        return report, "" if report is None else f" {report.sentence}"

    def _description(self, report: DriftReport, worst: ComparedRow) -> str:
        position = worst.positions[report.position]
        text = self._trainer.processing_class.decode([worst.row.completion_ids[position]])
        message = f"{report.request_id}, generated token {position} ({text!r}): sampled "
        message += f"log-probability is {report.max:.3g} nats from the trainer's forward"
        if report.first_position is not None and report.first_position < report.position:
            message += f", the first difference at token {worst.positions[report.first_position]}"
        return message


def _at(values_BT: torch.Tensor, positions: Sequence[list[int]]) -> list[torch.Tensor]:
    """Return the values of each of the first rows at its positions."""
    rows = zip(values_BT[: len(positions)], positions, strict=True)
    return [row_T[torch.tensor(at, dtype=torch.int64)] for row_T, at in rows]


def updates_once(trainer: Any) -> bool:
    """Return True if each rollout trains one optimizer step (trl 1.16); False for RLOO.

    Such a loss can take its own log-probabilities as the old ones: every ratio is exactly 1.
    """
    if not hasattr(trainer, "vllm_importance_sampling_correction"):
        return False
    args = trainer.args
    steps_per_rollout = args.steps_per_generation * trainer.num_iterations
    return bool(args.gradient_accumulation_steps % steps_per_rollout == 0)


def _clipped_share(trainer: Any, log_ratios: Sequence[torch.Tensor]) -> float:
    """Return the share of a loss's ratios that it clips in the first update (trl 1.16).

    Ratios are of tokens, or of sequences: GSPO's of the mean of the tokens' `log_ratios`, RLOO's of
    the sum.
    """
    if not log_ratios or updates_once(trainer):
        return 0.0
    level = getattr(trainer, "importance_sampling_level", "sum")
    if level == "token":
        values = torch.cat(list(log_ratios))
    else:
        values = torch.stack([r_T.sum() if level == "sum" else r_T.mean() for r_T in log_ratios])
    loss = getattr(trainer, "loss_type", "grpo")
    low, high = math.inf, math.inf
    if loss == "cispo":
        high = math.log(max(trainer.epsilon_high, 1.0))
    elif loss not in UNCLIPPED_LOSSES:
        low = -math.log1p(-min(trainer.epsilon_low, 1 - 1e-9))
        high = math.log1p(trainer.epsilon_high)
    is_clipped = (values > high) | (values < -low)
    return float(is_clipped.double().mean())


def are_comparable(config: RolloutConfig, params: SamplingParams) -> bool:
    """Return True if sampled and recomputed log-probabilities are of one distribution."""
    if config.sampling_mask == enums.SamplingMaskMode.REPLAY:
        return True
    return config.logprobs_mode == enums.LogprobsMode.POLICY or not params.is_processed


def require_one_distribution(config: RolloutConfig, params: SamplingParams) -> None:
    """Refuse settings under which the old log-probabilities are of another distribution."""
    if config.sampling_mask == enums.SamplingMaskMode.REPLAY and params.is_adjusted:
        raise refused("replay, adjusted")
    if config.old_logps == enums.OldLogps.ROLLOUT and not are_comparable(config, params):
        raise refused("sampled old logps, processed")


def warn_of_bias(trainer: Any, config: RolloutConfig, params: SamplingParams) -> None:
    """Warn, with numbers, where the loss and the samples are of different distributions."""
    effect = "nothing corrects for it"
    corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
    # The trainer's ratios are of the distribution that was sampled from.
    if corrects and config.logprobs_mode == enums.LogprobsMode.PROCESSED:
        effect = "the importance-sampling correction multiplies the difference into the loss"
    biases = []
    if params.temperature != trainer.temperature:
        biases.append(
            f"generation_kwargs sample at temperature={params.temperature:g}, and the loss divides "
            f"logits by {trainer.temperature:g}: its ratios are of another policy. Set temperature "
            "in the trainer's config instead."
        )
    if params.is_truncated and config.sampling_mask != enums.SamplingMaskMode.REPLAY:
        truncations, bound = _truncations(params, trainer.args.max_completion_length)
        biases.append(
            f"{truncations}: completions are sampled from part of the distribution{bound}, the "
            f"loss is of all of it; {effect}. rollout/log_kept_mass says how much is cut. Set "
            "sampling_mask='replay' for exact ratios, or switch truncation off."
        )
    if adjustments := _adjustments(trainer, params):
        biases.append(
            f"{adjustments}: completions are sampled from changed logits, the loss is of the "
            f"model's own; {effect}, and the drift does not show it. Take it out of the trainer's "
            "settings, generation_kwargs and model.generation_config."
        )
    for bias in biases:
        # The caller of attach().
        warnings.warn(bias, stacklevel=3)


def _truncations(params: SamplingParams, length: int) -> tuple[str, str]:
    """Return the settings that truncate, and a bound of the probability that is left."""
    rest = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    settings = {k: value for k in rest if (value := getattr(params, k)) != rest[k]}
    bound = ""
    if settings.keys() == {"top_p"}:
        lowest = length * math.log(params.top_p)
        bound = f" (at least {params.top_p:g} a token; e**{lowest:.0f} over {length} tokens)"
    return ", ".join(f"{k}={v:g}" for k, v in settings.items()), bound


def _adjustments(trainer: Any, params: SamplingParams) -> str:
    """Return the settings that change logits, by our names and the trainer's."""
    adjustments = dict(params.adjustments)
    # TRL 1.16 itself forbids the image token of a vision-language model.
    image_token = getattr(getattr(trainer.model, "config", None), "image_token_id", None)
    if adjustments.get("logit_bias") == {image_token: -math.inf}:
        del adjustments["logit_bias"]
    names = ((name, COUNTERPARTS.get(name, name)) for name in adjustments)
    return ", ".join(
        name if theirs in (name, "") else f"{name} ({theirs})" for name, theirs in names
    )
