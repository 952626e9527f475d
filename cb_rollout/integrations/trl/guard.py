"""Compare sampled log-probabilities with the trainer's own forward.

Owns the schedule of checks, their metrics, and the fallback or error when the two differ too much.
Also checks the settings under which the two come from different distributions: the loss of TRL 1.16
takes a log-softmax of logits/temperature over the whole vocabulary. Called by the trainer, on its
thread; with several processes all of them call it together.

B: rows of a batch, T: tokens of a completion.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from cb_rollout.compat.accelerate import shards_models
from cb_rollout.compat.torch import compute_dtype
from cb_rollout.compat.transformers import unwrap
from cb_rollout.config import enums
from cb_rollout.config.combinations import refused
from cb_rollout.config.generation_fields import COUNTERPARTS
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.numerics import agreement
from cb_rollout.engine.sampling.sampler import reported_mode
from cb_rollout.errors import LogprobDriftError
from cb_rollout.integrations.trl.images import image_arguments
from cb_rollout.integrations.trl.parts import TrainerPart
from cb_rollout.integrations.trl.rows.loss_rows import UNKNOWN_ID, LossBatch, LossRow
from cb_rollout.metrics.observer import observer
from cb_rollout.rollout.audit.drift_audit import MAX_TOKENS, audit_drift, holds_whole_model
from cb_rollout.rollout.audit.report import AuditReport
from cb_rollout.rollout.distributed import largest_of_all
from cb_rollout.rollout.sampler import Sampler
from cb_rollout.rollout.verification import DriftReport, drift
from cb_rollout.types import GenerationOutput

# The guard's name in a checkpoint.
STATE = "logprob_guard"

# Share of a rollout's ratios that rounding alone may clip; a clipped ratio has no gradient.
MAX_CLIPPED_SHARE = 0.01

# Tokens before a difference that are audited with it.
NUM_BEFORE = 16

# Metrics that are fields of a `DriftReport`.
LOGGED = (
    "rollout/logprob_drift_max",
    "rollout/logprob_drift_mean",
    "rollout/logprob_drift_k1",
    "rollout/logprob_drift_k3",
    "rollout/logprob_drift_chi_squared",
    "rollout/logprob_drift_effective_sample_size",
)

# The name of the forward in which trl 1.16 puts its fused head.
FUSED_FORWARD = "_fused_forward"

# Losses of trl 1.16 that weigh ratios smoothly.
UNCLIPPED_LOSSES = ("sapo", "vespo")


class ComparedRow(NamedTuple):
    """Sampled and recomputed log-probabilities of one row."""

    row: LossRow
    positions: list[int]
    """Indices of the completion's tokens that are compared."""
    sampled: list[float]
    trained: list[float]

    def first_difference(self, limit: float, temperature: float) -> GenerationOutput | None:
        """Return the tokens around the first difference beyond `limit`, in nats.

        None: no difference exceeds it, or a number is not finite. Earlier tokens become the prompt.
        """
        first = self._first_beyond(limit)
        if first is None:
            return None
        run = self._run_around(first)
        logprobs = [self.sampled[index] for index in run]
        if not all(map(math.isfinite, logprobs)):
            return None
        start = self.positions[run[0]]
        completion_ids = self.row.completion_ids
        return GenerationOutput(
            request_id=self.row.name,
            prompt_ids=self.row.prompt_ids + completion_ids[:start],
            generated_tokens=completion_ids[start : start + len(run)],
            logprobs=logprobs,
            temperature=temperature,
        )

    def _first_beyond(self, limit: float) -> int | None:
        """Return the index of the first pair that differs by more than `limit` nats, or has NaN."""
        for index, (sampled, trained) in enumerate(zip(self.sampled, self.trained, strict=True)):
            if not abs(sampled - trained) <= limit:
                return index
        return None

    def _run_around(self, index: int) -> list[int]:
        """Return indices of adjacent compared tokens, from `NUM_BEFORE` before `index` on."""
        # Tokens of tools and of older policies lie between the compared tokens.
        distance = self.positions[index] - index
        run = []
        for other in range(max(0, index - NUM_BEFORE), len(self.positions)):
            if self.positions[other] - other == distance:
                run.append(other)
        return run[:MAX_TOKENS]


class LogprobGuard(TrainerPart):
    """Decides whether sampled log-probabilities may be used as the trainer's."""

    def __init__(
        self,
        trainer: Any,
        generator: Sampler,
        recompute: Callable[[LossBatch], torch.Tensor],
        made_at_temperature: float,
    ) -> None:
        """Compare nothing before the first rollout.

        Args:
            trainer: a GRPO or RLOO trainer.
            generator: samples for it.
            recompute: returns the trainer's log-probabilities, (rows, T), of some rows.
            made_at_temperature: the temperature of the trainer when it was made.
        """
        config = generator.config
        self._trainer = trainer
        self._generator = generator
        self._config = config
        self._recompute = recompute
        self._made_at_temperature = made_at_temperature
        self._num_rollouts = 0
        self._was_resumed = False
        """True until the first rollout after a checkpoint."""
        self.is_due = False
        """True until this rollout's log-probabilities were compared."""
        self._is_auto = config.old_logps == enums.OldLogps.AUTO
        self._was_said = False
        self.is_trusted = config.old_logps == enums.OldLogps.ROLLOUT
        """True: sampled log-probabilities are used as the old ones."""

    @property
    def loss_temperature(self) -> float:
        """Return the temperature by which the loss divides logits."""
        return loss_temperature(self._trainer, self._config, self._made_at_temperature)

    @property
    def replaces_loss(self) -> bool:
        """True: use sampled log-probabilities as old ones, even where TRL would use the loss's."""
        return self.is_trusted and not self._is_auto

    def begin_training(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Go on as before the checkpoint; compare the first rollout, maybe on a different card."""
        if state is None or STATE not in state:
            return
        self._num_rollouts = state[STATE]["num_rollouts"]
        if self._is_auto:
            self.is_trusted = state[STATE]["is_trusted"]
        self._was_resumed = True

    def checkpoint_state(self) -> dict[str, Any]:
        return {STATE: {"num_rollouts": self._num_rollouts, "is_trusted": self.is_trusted}}

    def begin_scoring(self, is_training: bool) -> None:
        """Decide whether the log-probabilities of the rollout that begins are compared."""
        every = self._config.verify_every_steps
        self.is_due = False
        if is_training and every and are_comparable(self._config, self._generator.defaults):
            self._num_rollouts += 1
            # Saved rollouts drift from a policy that learns differently from the one that sampled.
            is_always_due = self._is_auto and not self._generator.samples_current_policy
            is_next = (self._num_rollouts - 1) % every == 0
            self.is_due = is_always_due or is_next or self._was_resumed
            self._was_resumed = False

    def check(self, batch: LossBatch, recomputed_BT: torch.Tensor | None = None) -> None:
        """Compare tokens that the current policy sampled, once for each rollout that is due.

        Args:
            batch: all rows; unknown rows, and tokens that its mask leaves out, are skipped.
            recomputed_BT: log-probabilities of all rows; old_logps="auto" then compares all. None:
                they are computed here.

        Raises:
            LogprobDriftError: they differ by more than `max_logprob_drift`.
        """
        if not self.is_due:
            return
        known = [number for number, row in enumerate(batch.rows) if row.id != UNKNOWN_ID]
        lacks_logprobs = any(batch.rows[number].logprobs is None for number in known)
        is_unfit = not known or lacks_logprobs
        if largest_of_all(self._trainer.accelerator, is_unfit):
            return
        self.is_due = False
        with observer().span("guard", policy_version=self._generator.policy_version) as span:
            report = self._compare(batch, known, recomputed_BT)
            span.set(max_drift=report.max)

    def _compare(
        self, batch: LossBatch, known: list[int], recomputed_BT: torch.Tensor | None
    ) -> DriftReport:
        """Compare tokens in some of the `known` rows, and act on the drift; see `check`."""
        if recomputed_BT is None:
            chosen = self._chosen_rows(known, self._config.verify_num_sequences)
            trained_BT = self._recompute(batch.at(chosen, len(chosen)))
        else:
            num_chosen = len(known) if self._is_auto else self._config.verify_num_sequences
            chosen = self._chosen_rows(known, num_chosen)
            trained_BT = recomputed_BT[chosen]
        compared = self._compared_rows(batch, chosen, trained_BT)

        measured_numbers = chosen[: agreement.NUM_MEASURED]
        measured_rows = list(compared.values())[: agreement.NUM_MEASURED]
        measured_batch = batch.at(measured_numbers, len(measured_numbers))
        noise = self._noise(measured_rows, trained_BT, measured_batch)

        sampled = {name: row.sampled for name, row in compared.items()}
        trained = {name: row.trained for name, row in compared.items()}
        report = drift(sampled, trained, float(noise))
        worst = compared.get(report.request_id)
        if worst is not None:
            self._log_drift(report, worst)
        rows = [row for row in compared.values() if row.sampled]
        self._act(report, worst, batch, rows)
        if self._is_auto:
            self._choose(rows, noise, batch)
        return report

    def _chosen_rows(self, known: list[int], num_chosen: int) -> list[int]:
        """Return the rows of this check; successive checks take different rows."""
        stride = max(1, len(known) // num_chosen)
        num_checks = (self._num_rollouts - 1) // self._config.verify_every_steps
        first = num_checks % stride
        return known[first::stride][:num_chosen]

    def _compared_rows(
        self, batch: LossBatch, chosen: list[int], trained_BT: torch.Tensor
    ) -> dict[str, ComparedRow]:
        """Return the tokens that the current policy sampled, by row.

        `trained_BT` has the log-probabilities of the `chosen` rows alone.
        """
        version = self._generator.policy_version
        masks = batch.completion_mask[chosen].tolist()
        values_of_rows = trained_BT.float().tolist()
        compared: dict[str, ComparedRow] = {}
        for number, values, mask in zip(chosen, values_of_rows, masks, strict=True):
            row = batch.rows[number]
            assert row.logprobs is not None
            positions = []
            for t, is_sampled in enumerate(row.is_sampled):
                if is_sampled and mask[t] and row.versions[t] in (None, version):
                    positions.append(t)
            compared[f"row {number}, {row.name}"] = ComparedRow(
                row=row,
                positions=positions,
                sampled=[row.logprobs[t] for t in positions],
                trained=[values[t] for t in positions],
            )
        return compared

    def _log_drift(self, report: DriftReport, worst: ComparedRow) -> None:
        metrics = self._trainer._metrics["train"]
        for name in LOGGED:
            _, _, field = name.partition("_drift_")
            metrics[name].append(getattr(report, field))
        if report.first_position is not None:
            position = worst.positions[report.first_position]
            metrics["rollout/logprob_drift_first_token"].append(position)

    def are_usable(self, sampled_BT: torch.Tensor | None, rows: Sequence[LossRow]) -> bool:
        """Return whether sampled log-probabilities may be the old ones, on every process.

        With old_logps="auto", only tokens of the trainer's current version are used.
        """
        if not self.is_trusted:
            return False
        sampled_at = self._generator.defaults.temperature
        if self._is_auto and sampled_at != self.loss_temperature:
            # A callback anneals the temperature; `warn_of_bias` has said so.
            return False
        version = self._generator.policy_version
        is_older = self._is_auto and not all(_is_wholly_of(row, version) for row in rows)
        is_unusable = sampled_BT is None or is_older
        return not largest_of_all(self._trainer.accelerator, float(is_unusable))

    def _noise(
        self, some: list[ComparedRow], trained_BT: torch.Tensor, batch: LossBatch
    ) -> torch.Tensor:
        """Return the rounding, in nats, of some rows' log-probabilities, `[1]`."""
        model = self._trainer.model
        accelerator = self._trainer.accelerator
        dtype = compute_dtype(model, accelerator.mixed_precision)
        is_coarse = dtype.itemsize < torch.float32.itemsize
        num_tokens = 0
        for compared in some:
            num_tokens += len(compared.row.prompt_ids) + len(compared.row.completion_ids)
        positions = [compared.positions for compared in some]

        def recomputed() -> list[torch.Tensor]:
            return _at(self._recompute(batch), positions)

        precise = None
        is_measured = is_coarse or agreement.is_measurable(model, num_tokens)
        if is_measured and not shards_models(accelerator):
            higher_dtype = torch.float32 if is_coarse else torch.float64
            precise = agreement.computed_in(higher_dtype, recomputed)
        return agreement.overall_noise(_at(trained_BT, positions), precise, dtype)

    def _choose(
        self, compared: Sequence[ComparedRow], noise: torch.Tensor, batch: LossBatch
    ) -> None:
        """Decide whether to use the sampled log-probabilities from now on.

        They must equal the trainer's up to rounding, and the loss must clip almost none of the
        ratios that rounding alone produces. Both must hold on every process that compared tokens,
        and at least one process must have compared some.
        """
        sampled = [torch.tensor(row.sampled) for row in compared]
        trained = [torch.tensor(row.trained) for row in compared]
        agrees = agreement.agrees(sampled, trained, noise.expand(len(compared)))
        log_ratios = []
        for sampled_T, trained_T in zip(sampled, trained, strict=True):
            log_ratios.append(trained_T - sampled_T)
        clipped = _clipped_share(self._trainer, log_ratios)
        is_refused_here = bool(compared) and not (agrees and clipped <= MAX_CLIPPED_SHARE)
        # A process whose rows have no tokens to compare follows the others.
        accelerator = self._trainer.accelerator
        is_compared = largest_of_all(accelerator, float(bool(compared)))
        is_refused = largest_of_all(accelerator, float(is_refused_here))
        self.is_trusted = bool(is_compared) and not is_refused
        if not is_refused_here or self._was_said:
            return
        self._was_said = True
        if agrees:
            said = ""
            reason = (
                f"rounding alone would clip {clipped:.0%} of the ratios (epsilon="
                f"{self._trainer.epsilon_low:g}, and {agrees.noise:.2g} nats of rounding)"
            )
        else:
            reason = f"sampled log-probabilities differ from the trainer's by {agrees}"
            differing = []
            for row, sampled_T, trained_T in zip(compared, sampled, trained, strict=True):
                if not agreement.agrees([sampled_T], [trained_T], noise):
                    differing.append(row)
            limit = agreement.TYPICAL_MULTIPLE * float(noise)
            _, said = self._audited(batch, differing, limit)
        warnings.warn(
            f"old_logps='auto': {reason}; the trainer recomputes the old ones, with one more "
            f"forward per rollout.{said} To choose this without a check, set old_logps='trainer'.",
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
        message = "log-probabilities drifted on another process"
        if worst is not None and report.max > allowed:
            message = self._description(report, worst)
        message += f", more than max_logprob_drift={allowed:.3g}; "
        if self._config.on_logprob_drift == enums.OnLogprobDrift.RAISE:
            message += "raise it, or find what changes the forward between rollout and loss."
            audited, said = self._audited(batch, rows, allowed)
            raise LogprobDriftError(message + said, audited)
        if self.is_trusted:
            message += "the trainer recomputes the old log-probabilities from now on."
            _, said = self._audited(batch, rows, allowed)
            warnings.warn(message + said, stacklevel=2)
        self.is_trusted = False

    def _audited(
        self, batch: LossBatch, rows: Sequence[ComparedRow], limit: float
    ) -> tuple[AuditReport | None, str]:
        """Return the cause of differences beyond `limit`, in nats, and a sentence about it.

        None and "": no row differs by more, or the model and its inputs cannot be audited here.
        """
        trainer = self._trainer
        generator = self._generator
        if not holds_whole_model(trainer) or image_arguments(batch.settings):
            return None, ""
        outputs = []
        for row in rows:
            output = row.first_difference(limit, trainer.temperature)
            if output is not None:
                outputs.append(output)
        report = audit_drift(
            outputs,
            trainer,
            engine=generator.local_generator,
            sampling_params=generator.defaults,
            logprobs_mode=reported_mode(self._config),
        )
        if report is None:
            return None, ""
        return report, f" {report.sentence}"

    def _description(self, report: DriftReport, worst: ComparedRow) -> str:
        position = worst.positions[report.position]
        text = self._trainer.processing_class.decode([worst.row.completion_ids[position]])
        message = f"{report.request_id}, generated token {position} ({text!r}): sampled "
        message += f"log-probability is {report.max:.3g} nats from the trainer's forward"
        if report.first_position is not None and report.first_position < report.position:
            first = worst.positions[report.first_position]
            message += f" (the first difference is at token {first})"
        return message


def _at(values_BT: torch.Tensor, positions: Sequence[list[int]]) -> list[torch.Tensor]:
    """Return the values of each of the first rows at its positions."""
    values = []
    for values_T, positions_of_row in zip(values_BT[: len(positions)], positions, strict=True):
        values.append(values_T[torch.tensor(positions_of_row, dtype=torch.int64)])
    return values


def _is_wholly_of(row: LossRow, version: int) -> bool:
    """Return whether this policy version sampled every sampled token of a row."""
    for own_version, is_sampled in zip(row.versions, row.is_sampled, strict=True):
        if is_sampled and own_version != version:
            return False
    return True


def updates_once(trainer: Any) -> bool:
    """Return True if each rollout trains one optimizer step (trl 1.16); False for RLOO.

    Such a loss can use its own log-probabilities as the old ones: every ratio is exactly 1.
    """
    if not hasattr(trainer, "vllm_importance_sampling_correction"):
        return False
    args = trainer.args
    steps_per_rollout = args.steps_per_generation * trainer.num_iterations
    return bool(args.gradient_accumulation_steps % steps_per_rollout == 0)


def _clipped_share(trainer: Any, log_ratios: Sequence[torch.Tensor]) -> float:
    """Return the share of a loss's ratios that it clips in the first update (trl 1.16).

    Ratios are per token, or per sequence: GSPO takes the mean of the tokens' `log_ratios`, RLOO
    their sum.
    """
    if not log_ratios or updates_once(trainer):
        return 0.0
    level = getattr(trainer, "importance_sampling_level", "sum")
    if level == "token":
        values = torch.cat(list(log_ratios))
    elif level == "sum":
        values = torch.stack([ratios_T.sum() for ratios_T in log_ratios])
    else:
        values = torch.stack([ratios_T.mean() for ratios_T in log_ratios])
    loss = getattr(trainer, "loss_type", "grpo")
    low = math.inf
    high = math.inf
    if loss == "cispo":
        high = math.log(max(trainer.epsilon_high, 1.0))
    elif loss not in UNCLIPPED_LOSSES:
        low = -math.log1p(-min(trainer.epsilon_low, 1 - 1e-9))
        high = math.log1p(trainer.epsilon_high)
    is_clipped = (values > high) | (values < -low)
    return float(is_clipped.double().mean())


def are_comparable(config: RolloutConfig, params: SamplingParams) -> bool:
    """Return True if sampled and recomputed log-probabilities share one distribution."""
    if config.sampling_mask == enums.SamplingMaskMode.REPLAY:
        return True
    return config.logprobs_mode == enums.LogprobsMode.POLICY or not params.is_processed


def loss_temperature(trainer: Any, config: RolloutConfig, made_at_temperature: float) -> float:
    """Return the temperature by which the loss divides logits now.

    Args:
        trainer: the trainer.
        config: its generator's config.
        made_at_temperature: the trainer's temperature when it was attached, for a model without
            TRL's fused head.
    """
    # Our forward that replays truncation uses the trainer's current temperature.
    if config.sampling_mask == enums.SamplingMaskMode.REPLAY:
        return trainer.temperature
    of_head = fused_temperature(trainer.model)
    return made_at_temperature if of_head is None else of_head


def fused_temperature(model: torch.nn.Module) -> float | None:
    """Return the number by which a model's fused head divides logits; None: it has no such head.

    TRL 1.16 fixes it when a trainer is made. A temperature that is set later has no effect, and of
    several trainers with one model the last one fixes it for all.
    """
    inner = unwrap(model)
    # accelerate wraps the forward that TRL has set.
    for forward in (vars(inner).get("forward"), getattr(inner, "_original_forward", None)):
        function = getattr(forward, "__func__", None)
        if isinstance(function, FunctionType) and function.__code__.co_name == FUSED_FORWARD:
            return inspect.getclosurevars(function).nonlocals["temperature"]
    return None


def require_one_distribution(config: RolloutConfig, params: SamplingParams) -> None:
    """Refuse settings that take old log-probabilities from a different distribution."""
    if config.sampling_mask == enums.SamplingMaskMode.REPLAY and params.is_adjusted:
        raise refused("replay, adjusted")
    if config.old_logps == enums.OldLogps.ROLLOUT and not are_comparable(config, params):
        raise refused("sampled old logps, processed")


def warn_of_bias(
    trainer: Any, config: RolloutConfig, params: SamplingParams, divisor: float
) -> None:
    """Warn, with numbers, if the loss and the samples use different distributions.

    `divisor`: the temperature by which the loss divides logits; see `loss_temperature`.
    """
    effect = "nothing corrects the difference"
    corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
    # The trainer's ratios then refer to the distribution that was sampled from.
    if corrects and config.logprobs_mode == enums.LogprobsMode.PROCESSED:
        effect = "the importance-sampling correction multiplies the difference into the loss"
    biases = []
    if params.temperature != divisor:
        biases.append(
            f"temperature={params.temperature:g} is used for sampling, but the loss divides logits "
            f"by {divisor:g}, so its ratios belong to another policy. Set temperature in the "
            "trainer's config, before the trainer is made: TRL fixes it in the model then, for all "
            "trainers of this model."
        )
    if params.is_truncated and config.sampling_mask != enums.SamplingMaskMode.REPLAY:
        truncations, bound = _truncations(params, trainer.args.max_completion_length)
        biases.append(
            f"{truncations}: completions are sampled from a part of the distribution{bound}, but "
            f"the loss uses all of it; {effect}. rollout/log_kept_mass shows how much is cut off. "
            "Set sampling_mask='replay' for exact ratios, or switch truncation off."
        )
    adjustments = _adjustments(trainer, params)
    if adjustments:
        biases.append(
            f"{adjustments}: completions are sampled from changed logits, but the loss uses the "
            f"model's own; {effect}, and the logged drift does not show it. Remove the setting "
            "from the trainer's config, generation_kwargs and model.generation_config."
        )
    for bias in biases:
        # The warning points at the caller of attach().
        warnings.warn(bias, stacklevel=3)


def _truncations(params: SamplingParams, length: int) -> tuple[str, str]:
    """Return the settings that truncate, and a bound on the probability that they keep."""
    settings: dict[str, float] = {}
    for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        value = getattr(params, name)
        if value != neutral:
            settings[name] = value
    bound = ""
    if settings.keys() == {"top_p"}:
        lowest = length * math.log(params.top_p)
        bound = (
            f" (at least {params.top_p:g} of each token's probability, e**{lowest:.0f} over "
            f"{length} tokens)"
        )
    truncations = ", ".join(f"{name}={value:g}" for name, value in settings.items())
    return truncations, bound


def _adjustments(trainer: Any, params: SamplingParams) -> str:
    """Return the settings that change logits, by this package's names and the trainer's."""
    adjustments = dict(params.adjustments)
    # TRL 1.16 itself forbids the image token of a vision-language model.
    image_token = getattr(getattr(trainer.model, "config", None), "image_token_id", None)
    if adjustments.get("logit_bias") == {image_token: -math.inf}:
        del adjustments["logit_bias"]
    names = []
    for name in adjustments:
        theirs = COUNTERPARTS.get(name, name)
        names.append(name if theirs in (name, "") else f"{name} ({theirs})")
    return ", ".join(names)
