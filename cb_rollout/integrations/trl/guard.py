"""Compare sampled log-probabilities with the trainer's own forward.

Owns the schedule of checks, their metrics, the fallback or error when they differ too much, and
the settings under which the two are not of one distribution: the loss of TRL 1.16 takes a
log-softmax of logits/temperature over the whole vocabulary. Called by the trainer, on its thread;
with several processes all of them call it together. Reads the trainer's attributes and imports no
trl.

B: rows of a batch, T: tokens of a completion.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cb_rollout.compat.torch import compute_dtype
from cb_rollout.compat.zero3 import shards_models
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import (
    LogprobsMode,
    Numerics,
    OldLogps,
    OnLogprobDrift,
    SamplingMaskMode,
)
from cb_rollout.config.hf import COUNTERPARTS
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.numerics.agreement import (
    NUM_MEASURED,
    agrees,
    computed_in,
    is_measurable,
    overall_noise,
)
from cb_rollout.errors import LogprobDriftError
from cb_rollout.integrations.trl.loss_rows import LossBatch, LossRow
from cb_rollout.rollout.distributed import largest_of_all
from cb_rollout.rollout.verification import DriftReport, drift

# Share of a rollout's ratios that rounding alone may clip; a clipped one has no gradient.
MAX_CLIPPED_SHARE = 0.01

# Losses of trl 1.16 that weigh ratios smoothly.
UNCLIPPED_LOSSES = ("sapo", "vespo")

# Warnings point at the caller of attach().
STACKLEVEL = 3


class ComparedRow(NamedTuple):
    """Log-probabilities of one row, sampled and by the trainer."""

    row: LossRow
    positions: list[int]
    """Indices of the completion's tokens that are compared."""
    sampled: list[float]
    trained: list[float]


class LogprobGuard:
    """Decides whether sampled log-probabilities may be used as the trainer's."""

    def __init__(self, trainer: Any, config: RolloutConfig, params: SamplingParams) -> None:
        self._trainer, self._config = trainer, config
        self._are_comparable = are_comparable(config, params)
        self._num_rollouts = 0
        self.is_due = False
        """True until this rollout's log-probabilities were compared."""
        self._is_auto = config.old_logps == OldLogps.AUTO
        self._was_said = False
        self.is_trusted = config.old_logps == OldLogps.ROLLOUT
        """True: sampled log-probabilities are used as the old ones."""

    @property
    def replaces_loss(self) -> bool:
        """Return True if the sampled ones are used where the trainer would take its loss's own."""
        return self.is_trusted and not self._is_auto

    def begin_rollout(self, is_training: bool) -> None:
        """Count a rollout, and find whether it is checked."""
        every = self._config.verify_every_steps
        self.is_due = False
        if is_training and every and self._are_comparable:
            self._num_rollouts += 1
            self.is_due = (self._num_rollouts - 1) % every == 0

    def check(
        self,
        batch: LossBatch,
        policy_version: int,
        recompute: Callable[[LossBatch], torch.Tensor],
        recomputed_BT: torch.Tensor | None = None,
    ) -> None:
        """Compare some rows, once for each rollout that is due.

        Args:
            batch: all rows; tokens that its mask leaves out are skipped.
            policy_version: the trainer's; tokens of older ones are skipped.
            recompute: returns the trainer's log-probabilities, (rows, T), of some rows.
            recomputed_BT: what it returns for all rows; old_logps="auto" then compares all. None:
                it has to run.

        Raises:
            LogprobDriftError: they differ by more than `max_logprob_drift`.
        """
        rows = batch.rows or ()
        if not self.is_due or largest_of_all(
            self._trainer.accelerator, any(row.logprobs is None for row in rows)
        ):
            return
        self.is_due = False
        is_of_all = recomputed_BT is not None and self._is_auto
        num_chosen = len(rows) if is_of_all else self._config.verify_num_sequences
        stride = max(1, len(rows) // num_chosen)
        # Other rows each time, so that every row is checked at some time.
        first = (self._num_rollouts - 1) // self._config.verify_every_steps % stride
        chosen = list(range(first, len(rows), stride))[:num_chosen]
        if recomputed_BT is None:
            found_BT = recompute(batch.at(chosen, len(chosen)))
        else:
            found_BT = recomputed_BT[chosen]
        compared: dict[str, ComparedRow] = {}
        masks = batch.completion_mask[chosen].tolist()
        for number, values, mask in zip(chosen, found_BT.float().tolist(), masks, strict=True):
            row = rows[number]
            assert row.logprobs is not None
            positions = [
                t
                for t, own in enumerate(row.is_sampled)
                if own and mask[t] and row.versions[t] in (None, policy_version)
            ]
            sampled, trained = ([of[t] for t in positions] for of in (row.logprobs, values))
            compared[f"row {number}, {row.name}"] = ComparedRow(row, positions, sampled, trained)
        some = chosen[:NUM_MEASURED]
        noise = self._noise(
            list(compared.values())[:NUM_MEASURED],
            found_BT,
            lambda: recompute(batch.at(some, len(some))),
        )
        report = drift(
            {name: one.sampled for name, one in compared.items()},
            {name: one.trained for name, one in compared.items()},
            float(noise),
        )
        worst = compared.get(report.request_id)
        if worst is not None:
            self._log(report, worst.positions)
        self._act(report, worst)
        if self._is_auto:
            self._choose([one for one in compared.values() if one.sampled], noise)

    def are_usable(
        self, sampled_BT: torch.Tensor | None, rows: Sequence[LossRow], policy_version: int
    ) -> bool:
        """Return whether sampled log-probabilities may be the old ones, on every process.

        With old_logps="auto" only those of the trainer's own version: there the two are equal.
        """
        if not self.is_trusted:
            return False
        is_older = self._is_auto and any(
            version != policy_version
            for row in rows
            for version, own in zip(row.versions, row.is_sampled, strict=True)
            if own
        )
        return not largest_of_all(self._trainer.accelerator, float(sampled_BT is None or is_older))

    def _noise(
        self, some: list[ComparedRow], found_BT: torch.Tensor, recompute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return the rounding of the trainer's log-probabilities, a number of nats, `[1]`."""
        model, accelerator = self._trainer.model, self._trainer.accelerator
        dtype = compute_dtype(model, accelerator.mixed_precision)
        is_coarse = dtype.itemsize < torch.float32.itemsize
        positions = [one.positions for one in some]
        num_tokens = sum(len(one.row.prompt_ids) + len(one.row.completion_ids) for one in some)
        precise = None
        if (is_coarse or is_measurable(model, num_tokens)) and not shards_models(accelerator):
            higher = torch.float32 if is_coarse else torch.float64
            precise = computed_in(higher, lambda: _at(recompute(), positions))
        return overall_noise(_at(found_BT, positions), precise, dtype)

    def _choose(self, compared: Sequence[ComparedRow], noise: torch.Tensor) -> None:
        """Trust the sampled ones from now on if they are the trainer's to rounding.

        And if the loss would clip next to none of the ratios that rounding leaves.
        """
        pairs = [(torch.tensor(one.sampled), torch.tensor(one.trained)) for one in compared]
        agreement = agrees(
            [one for one, _ in pairs], [other for _, other in pairs], noise.expand(len(pairs))
        )
        clipped = _clipped_share(self._trainer, [other - one for one, other in pairs])
        accelerator = self._trainer.accelerator
        is_here = bool(pairs) and bool(agreement) and clipped <= MAX_CLIPPED_SHARE
        self.is_trusted = not largest_of_all(accelerator, float(not is_here))
        if self.is_trusted or is_here or not pairs or self._was_said:
            return
        self._was_said = True
        reason = f"sampled log-probabilities are off the trainer's by {agreement}"
        if agreement:
            reason = (
                f"rounding alone would clip {clipped:.0%} of the ratios (epsilon="
                f"{self._trainer.epsilon_low:g}, and {agreement.noise:.2g} nats of rounding)"
            )
        warnings.warn(
            f"old_logps='auto': {reason}; old ones are recomputed by the trainer.", stacklevel=2
        )

    def _log(self, report: DriftReport, positions: list[int]) -> None:
        metrics = {
            "rollout/logprob_drift_max": report.max,
            "rollout/logprob_drift_mean": report.mean,
            "rollout/logprob_drift_k1": report.k1,
            "rollout/logprob_drift_k3": report.k3,
            "rollout/logprob_drift_chi_squared": report.chi_squared,
            "rollout/logprob_drift_effective_sample_size": report.effective_sample_size,
        }
        if report.first_position is not None:
            metrics["rollout/logprob_drift_first_token"] = positions[report.first_position]
        for name, value in metrics.items():
            self._trainer._metrics["train"][name].append(value)

    def _act(self, report: DriftReport, worst: ComparedRow | None) -> None:
        """Raise, or fall back to recomputing, where the drift is above `max_logprob_drift`."""
        allowed = self._config.max_logprob_drift
        if allowed is None and self._config.numerics == Numerics.BITWISE:
            allowed = 0.0
        if allowed is None:
            return
        if largest_of_all(self._trainer.accelerator, report.max) <= allowed:
            return
        message = "on another process"
        if worst is not None and report.max > allowed:
            message = self._description(report, worst)
        message += f", max_logprob_drift={allowed:.3g}; "
        if self._config.on_logprob_drift == OnLogprobDrift.RAISE:
            message += "raise it, or look for what changes the forward between rollout and loss."
            raise LogprobDriftError(message)
        if self.is_trusted:
            message += "old log-probabilities are recomputed by the trainer from now on."
            warnings.warn(message, stacklevel=2)
        self.is_trusted = False

    def _description(self, report: DriftReport, worst: ComparedRow) -> str:
        """Name the sequence and token, the drift, and the first token that differs."""
        position = worst.positions[report.position]
        text = self._trainer.processing_class.decode([worst.row.completion_ids[position]])
        message = f"{report.request_id}, generated token {position} ({text!r}): sampled "
        message += f"log-probability is {report.max:.3g} nats from the trainer's forward"
        if report.first_position is not None and report.first_position < report.position:
            message += f", the first difference at token {worst.positions[report.first_position]}"
        return message


def _at(values_BT: torch.Tensor, positions: Sequence[list[int]]) -> list[torch.Tensor]:
    """Return the values of each of the first rows at its positions."""
    rows = zip(values_BT, positions, strict=False)
    return [row_T[torch.tensor(own, dtype=torch.int64)] for row_T, own in rows]


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
    """Return the share of the loss's ratios that it clips (trl 1.16), in the first update.

    Args:
        trainer: its loss takes ratios of tokens, or of sequences: GSPO's of the mean, RLOO's of
            the sum.
        log_ratios: of each sequence, of its tokens.
    """
    if not log_ratios or updates_once(trainer):
        return 0.0
    level = getattr(trainer, "importance_sampling_level", "sum")
    if level == "token":
        values = torch.cat(list(log_ratios))
    else:
        values = torch.stack([one.sum() if level == "sum" else one.mean() for one in log_ratios])
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
    if config.sampling_mask == SamplingMaskMode.REPLAY:
        return True
    return config.logprobs_mode == LogprobsMode.POLICY or not params.is_processed


def require_one_distribution(config: RolloutConfig, params: SamplingParams) -> None:
    """Refuse settings under which the old log-probabilities are of another distribution."""
    if config.sampling_mask == SamplingMaskMode.REPLAY and params.is_adjusted:
        raise refused("replay, adjusted")
    if config.old_logps == OldLogps.ROLLOUT and not are_comparable(config, params):
        raise refused("sampled old logps, processed")


def warn_of_bias(trainer: Any, config: RolloutConfig, params: SamplingParams) -> None:
    """Warn, with numbers, where the loss and the samples are of different distributions."""
    if params.temperature != trainer.temperature:
        warnings.warn(
            f"generation_kwargs sample at temperature={params.temperature:g}, and the loss divides "
            f"logits by {trainer.temperature:g}: its ratios are of another policy. Set temperature "
            "in the trainer's config instead.",
            stacklevel=STACKLEVEL,
        )
    if params.is_truncated and config.sampling_mask != SamplingMaskMode.REPLAY:
        _warn_of_truncation(trainer, config, params)
    _warn_of_adjustments(trainer, config, params)


def _warn_of_truncation(trainer: Any, config: RolloutConfig, params: SamplingParams) -> None:
    rest = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    settings = {name: getattr(params, name) for name in rest}
    truncations = ", ".join(f"{k}={v:g}" for k, v in settings.items() if v != rest[k])
    length = trainer.args.max_completion_length
    bound = ""
    if {name for name in rest if settings[name] != rest[name]} == {"top_p"}:
        lowest = length * math.log(params.top_p)
        bound = f" (at least {params.top_p:g} a token; e**{lowest:.0f} over {length} tokens)"
    effect = _effect(trainer, config, "that mass")
    warnings.warn(
        f"{truncations}: completions are sampled from part of the distribution{bound}, the loss is "
        f"of all of it; {effect}. rollout/log_kept_mass says how much is cut. Set "
        "sampling_mask='replay' for exact ratios, or switch truncation off.",
        stacklevel=STACKLEVEL + 1,
    )


def _warn_of_adjustments(trainer: Any, config: RolloutConfig, params: SamplingParams) -> None:
    adjustments = dict(params.adjustments)
    # TRL 1.16 itself forbids the image token of a vision-language model.
    image_token = getattr(getattr(trainer.model, "config", None), "image_token_id", None)
    if adjustments.get("logit_bias") == {image_token: -math.inf}:
        del adjustments["logit_bias"]
    if not adjustments:
        return
    named = ", ".join(
        name if name == (theirs := COUNTERPARTS.get(name)) or not theirs else f"{name} ({theirs})"
        for name in adjustments
    )
    effect = _effect(trainer, config, "the difference")
    warnings.warn(
        f"{named}: completions are sampled from changed logits, the loss is of the model's own; "
        f"{effect}, and the drift does not show it. Take it out of the trainer's settings and "
        "generation_kwargs.",
        stacklevel=STACKLEVEL + 1,
    )


def _effect(trainer: Any, config: RolloutConfig, bias: str) -> str:
    """Return what the loss does with a bias of the samples."""
    corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
    # The trainer's ratios are of the distribution that was sampled from.
    if corrects and config.logprobs_mode == LogprobsMode.PROCESSED:
        return f"the importance-sampling correction multiplies {bias} into the loss"
    return "nothing corrects for it"
