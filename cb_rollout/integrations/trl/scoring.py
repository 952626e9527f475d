"""Replace the trainer's methods between rollout and loss; choose its old log-probabilities.

Each public method of `TrainerScoring` replaces a method of the trainer and calls the original.
TRL 1.16 takes a completion for whole if its last token is an end-of-sequence token of the trainer,
or padding. Stop strings, other stop tokens and a `rollout_func`'s sampling parameters break that
test; the finish reason does not. The hook runs when TRL's own scoring returns, before a user's
trainer class changes the batch; then each row is matched with its record again. Called by the
trainer, on its thread.

B: rows of a batch, T: tokens of a completion.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cb_rollout.compat.patching import replacing
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import LossForward, SamplingMaskMode
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.model.routers import Disagreement
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl import upstream
from cb_rollout.integrations.trl.backend import GenerationBackend
from cb_rollout.integrations.trl.guard import (
    LogprobGuard,
    require_one_distribution,
    updates_once,
    warn_of_bias,
)
from cb_rollout.integrations.trl.packed_loss import LossTokens, PackedLoss, padded_tokens
from cb_rollout.integrations.trl.parts import Collected
from cb_rollout.integrations.trl.rows.loss_rows import (
    ROW_IDS,
    ROWS_KEY,
    UNKNOWN_ID,
    LossBatch,
    LossRow,
    OwnForward,
    Result,
    loss_rows,
    require_records,
    require_sampled_here,
)
from cb_rollout.integrations.trl.rows.row_index import RowIndex, Suggestions
from cb_rollout.rollout.sampler import Sampler

# TRL 1.16's metrics of sampled against old log-probabilities.
MEAN_DIFFERENCE = "sampling/sampling_logp_difference/mean"
MAX_DIFFERENCE = "sampling/sampling_logp_difference/max"

TokenAdvantages = Callable[[Sequence[LossRow], torch.Tensor], torch.Tensor]
"""Takes the rows of a batch and their advantages, (B,); returns advantages of tokens, (B, T)."""

# Losses of these modules are products with the advantage; any other loss may train every row.
LOSS_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")

SCORING = "_generate_and_score_completions"


def unknown_end(trainer: Any, params: SamplingParams) -> str | None:
    """Return a name for a stop that TRL's test misses; None: the test covers all stops."""
    if params.stop:
        return "a stop string"
    eos_token_ids: Any = params.eos_token_id or ()
    ends = set(params.stop_token_ids)
    ends.update(eos_token_ids)
    for token in sorted(ends.difference(trainer.eos_token_ids)):
        if token >= 0:
            return f"token {token}"
    return None


def require_known_ends(trainer: Any, params: SamplingParams) -> None:
    """Refuse to mask truncated completions under RLOO if it does not know every stop condition."""
    is_rloo = not hasattr(trainer, "rollout_func")
    ended_by = unknown_end(trainer, params)
    if trainer.mask_truncated_completions and is_rloo and ended_by:
        raise refused("masked, unknown stops", ended_by=ended_by)


def _stock_class(trainer: Any) -> type:
    """Return the TRL class of a trainer, or the one it is derived from."""
    is_grpo = isinstance(trainer, upstream.GRPOTrainer)
    return upstream.GRPOTrainer if is_grpo else upstream.RLOOTrainer


def _overrides(trainer: Any, name: str) -> bool:
    """Return whether a trainer overrides a method of TRL's."""
    stock_method = getattr(_stock_class(trainer), name)
    return getattr(getattr(trainer, name), "__func__", None) is not stock_method


def overrides_scoring(trainer: Any) -> bool:
    """Return whether a trainer's class overrides TRL's scoring, attached or not."""
    return getattr(type(trainer), SCORING) is not getattr(_stock_class(trainer), SCORING)


def _create_packed_loss(trainer: Any, sampler: Sampler) -> PackedLoss | None:
    """Create the packed forward of a trainer's models; None if the settings exclude it."""
    if sampler.config.loss_forward != LossForward.PACKED:
        return None
    facts = sampler.packing_facts(trainer.model)
    return PackedLoss(
        trainer,
        sampler.config,
        sampler.routers,
        packing_obstacle=facts.obstacle,
        cuts_images=facts.cuts_images,
    )


@dataclass
class _BatchState:
    """State of the batch that the trainer generates and scores."""

    is_scoring: bool = False
    """False: the trainer, or a user's class, computes outside of its scoring."""
    masks_truncated: bool = False
    """True: truncated completions are masked here, and not by the trainer."""
    rows: list[LossRow] = field(default_factory=list)
    """Rows of the latest generation, in its order."""
    asks_old_logprobs: bool = False
    """True until the trainer's scoring has asked for old log-probabilities."""
    is_finished: bool = False
    """True: TRL's own scoring has made rows of the batch, which are corrected and verified."""


class TrainerScoring:
    """Scoring of a trainer's rollouts."""

    def __init__(
        self,
        trainer: Any,
        backend: GenerationBackend,
        token_advantages: TokenAdvantages | None = None,
    ) -> None:
        """Keep the trainer's own methods, before the caller replaces them."""
        self._token_advantages = token_advantages
        self._trainer = trainer
        self._backend = backend
        generator = backend.generator
        config = generator.config
        routers = generator.routers
        self._replays = config.sampling_mask == SamplingMaskMode.REPLAY
        made_at = backend.made_at_temperature
        self._guard = LogprobGuard(trainer, generator, self._policy_logprobs, made_at)
        backend.parts.append(self._guard)
        self._divisor = self._guard.loss_temperature
        self._has_rollout_func = getattr(trainer, "rollout_func", None) is not None
        # The same in every process: the corrections exchange data between all of them.
        self._corrects_ends = self._has_rollout_func or bool(
            unknown_end(trainer, generator.defaults)
        )
        self._packed = _create_packed_loss(trainer, generator)
        self._own = OwnForward(trainer, routers)
        self._counts = None if routers is None else Disagreement()
        self._stock: Any = _stock_class(trainer)
        self._generate = trainer._generate
        overrides_generate = _overrides(trainer, "_generate")
        self._may_generate_others = overrides_generate and not self._has_rollout_func
        self._overrides_scoring = _overrides(trainer, SCORING)
        self._generate_and_score = getattr(trainer, SCORING)
        self._stock_scoring = getattr(self._stock, SCORING)
        self._needed_by: dict[str, str] = {}
        """Settings that need the record of each row, and what to set instead."""
        if self._replays:
            self._needed_by["sampling_mask='replay'"] = "sampling_mask='ignore'"
        if self._counts is not None:
            self._needed_by["router_replay=True"] = "router_replay=False"
        keeps_earlier = bool(self._needed_by) and type(trainer) is not self._stock
        self._index = RowIndex(config.replay_num_rollouts if keeps_earlier else 0)
        self._calculate_rewards = trainer._calculate_rewards
        self._compute_loss = trainer.compute_loss
        # Processes use different ids, because a strategy moves rows from one process to another.
        accelerator = trainer.accelerator
        self._row_ids = itertools.count(accelerator.process_index, accelerator.num_processes)
        self._state = _BatchState()
        self._loss_inputs: dict[str, Any] | None = None
        """Inputs of the loss that the trainer is computing; None: it computes none."""
        self._loss_tokens = LossTokens()
        self._step_that_trusts_sampled: int | None = None
        """Step whose old log-probabilities are the sampled ones; None: they are recomputed."""

    def install(self) -> None:
        """Make the trainer call this object's methods, until it is detached."""
        self._backend.override(
            _generate=self.generate,
            _generate_and_score_completions=self.generate_and_score,
            _calculate_rewards=self.calculate_rewards,
            _get_per_token_logps_and_entropies=self.logprobs,
            compute_loss=self.compute_loss,
        )

    def generate(self, prompts: list[Any]) -> Any:
        """Replace `_generate`: make a record of each row that it returns."""
        context = self._backend.context
        num_before = len(context.outputs)
        try:
            generated = self._generate(prompts)
        finally:
            self._backend.end_rollout()
            # Logged; a trainer class may generate again for the same batch.
            context.turn_metrics.clear()
        outputs = context.outputs[num_before:]
        has_tool_mask = len(generated) > 3 and generated[2] is not None
        has_one_turn = len(outputs) == len(generated[0])
        in_order = has_one_turn and not has_tool_mask and not self._has_rollout_func
        rows = loss_rows(
            generated,
            outputs,
            self._row_ids,
            is_in_order=in_order,
            replays=self._replays,
        )
        if self._may_generate_others:
            rows = [self._with_origin(row) for row in rows]
            self._require_records(rows, [len(row.completion_ids) for row in rows])
        for setting, other in self._needed_by.items():
            require_sampled_here(rows, setting, other)
        self._state.rows = rows
        context.rows.extend(rows)
        self._index.add(rows)
        if self._corrects_ends:
            self._correct_metrics(rows)
        # Decided as by TRL 1.16's scoring, which follows; RLOO's always asks.
        corrects = getattr(self._trainer, "vllm_importance_sampling_correction", True)
        self._state.asks_old_logprobs = corrects or not updates_once(self._trainer)
        return generated

    def _with_origin(self, row: LossRow) -> LossRow:
        """Return an earlier record for a row that was not sampled now, or an unknown row."""
        if row.request_id is not None:
            return row
        earlier = self._index.with_tokens(row.prompt_ids, row.completion_ids)
        return earlier or replace(row, id=UNKNOWN_ID)

    def calculate_rewards(self, inputs: list[Any], prompts: list[Any], *rest: Any) -> torch.Tensor:
        """Replace `_calculate_rewards`: keep each row's weighted sum, NaN where it has none.

        TRL 1.16 returns the rewards of all processes.
        """
        rewards = self._calculate_rewards(inputs, prompts, *rest)
        weights = self._trainer.reward_weights.to(rewards.device)
        sums = (rewards * weights).nansum(1)
        # A row that no reward function scored has no reward, and not the reward 0.
        sums[rewards.isnan().all(1)] = torch.nan
        all_rewards = sums.tolist()
        # In the order of the processes, which have equally many rows.
        accelerator = self._trainer.accelerator
        context = self._backend.context
        start = accelerator.process_index * len(prompts)
        # A trainer class may score several generations for one batch.
        num_before = len(context.rows) - len(self._state.rows)
        context.rewards[num_before:] = all_rewards[start : start + len(prompts)]
        context.all_rewards[num_before * accelerator.num_processes :] = all_rewards
        return rewards

    def generate_and_score(self, inputs: list[Any]) -> dict[str, Any]:
        """Replace `_generate_and_score_completions`: make the batch as the strategy decides."""
        make_batch = self._backend.make_batch
        with self._backend.step_span.within():
            if make_batch is None:
                batch = self.score(inputs)
            else:
                batch = make_batch(inputs, self.score)
        is_auto = not self._guard.replaces_loss
        if is_auto and self._step_that_trusts_sampled is not None and updates_once(self._trainer):
            version = self._backend.generator.policy_version
            is_new = all(row.was_sampled_by(version) for row in batch[ROWS_KEY])
            if is_new and _has_sampled_as_old(batch):
                # The loss takes its own log-probabilities as the old ones, as TRL's does, so that
                # rounding between sampler and loss clips no ratio. Rows of an older policy keep the
                # ratio to that policy.
                batch.pop("old_per_token_logps", None)
        return batch

    def score(self, inputs: list[Any], collected: Collected | None = None) -> dict[str, Any]:
        """Generate and score one batch, with the rows that the loss needs."""
        trainer = self._trainer
        self._guard.begin_scoring(trainer.model.training)
        if self._guard.is_due and self._packed is not None:
            self._packed.compare_again()
        context = self._backend.begin_rollout(collected=collected)
        divisor = self._guard.loss_temperature
        if context.has_new_settings or divisor != self._divisor:
            # Another trainer that is made with this model changes its head.
            self._divisor = divisor
            self._check_new_settings()
        self._index.begin_rollout(trainer.model.training)
        is_masked = trainer.mask_truncated_completions
        self._state = _BatchState(
            is_scoring=True, masks_truncated=is_masked and self._corrects_ends
        )
        try:
            # The trainer would mask by its own test of the last token.
            is_masked_by_trainer = is_masked and not self._corrects_ends
            with replacing([(trainer, "mask_truncated_completions", is_masked_by_trainer)]):
                batch = self._batch_of_trainer(inputs)
            rows = self._rows_of_scored(batch)
            if not self._state.is_finished:
                self._finish(batch, rows)
        finally:
            self._state = _BatchState()
            context.collected = None
        if self._token_advantages is not None:
            batch["advantages"] = self._per_token(self._token_advantages, batch, rows)
        batch[ROWS_KEY] = rows
        batch[ROW_IDS] = self._ids_of(rows)
        self._backend.scored(rows, batch)
        return batch

    def _check_new_settings(self) -> None:
        """Check the trainer's current generation config, as `attach` did."""
        trainer, generator = self._trainer, self._backend.generator
        defaults = generator.defaults
        require_known_ends(trainer, defaults)
        self._corrects_ends = self._has_rollout_func or bool(unknown_end(trainer, defaults))
        if trainer.model.training:
            require_one_distribution(generator.config, defaults)
            warn_of_bias(trainer, generator.config, defaults, self._guard.loss_temperature)

    def _batch_of_trainer(self, inputs: list[Any]) -> dict[str, Any]:
        """Call the trainer's scoring, and hook TRL's own scoring inside a user's class."""
        if not self._overrides_scoring:
            return self._score_by_stock(self._trainer, inputs)

        def scoring(trainer: Any, inputs: list[Any]) -> dict[str, Any]:
            return self._score_by_stock(trainer, inputs)

        # `super()` looks a method up in the class.
        with replacing([(self._stock, SCORING, scoring)]):
            return self._generate_and_score(inputs)

    def _score_by_stock(self, trainer: Any, inputs: list[Any]) -> dict[str, Any]:
        """Score by TRL's own method; then rows are in the order of their generation."""
        batch = self._stock_scoring(trainer, inputs)
        if trainer is not self._trainer:
            return batch
        rows = self._state.rows
        assert not self._state.asks_old_logprobs, "the trainer did not ask for old logprobs"
        self._finish(batch, rows)
        batch[ROW_IDS] = self._ids_of(rows)
        self._state.is_finished = True
        return batch

    def _finish(self, batch: dict[str, Any], rows: Sequence[LossRow]) -> None:
        """Correct a scored batch, verify it, and give it its old log-probabilities."""
        if self._state.masks_truncated:
            self._mask_truncated(batch, rows)
        with torch.no_grad():
            # Verifies by an extra forward, where the trainer needed none.
            self._guard.check(LossBatch.scored(batch, rows))
        if self._step_that_trusts_sampled is not None:
            # TRL 1.16 logged that sampled and old log-probabilities are the same; the loss logs
            # the difference to its own instead.
            for name in (MEAN_DIFFERENCE, MAX_DIFFERENCE):
                values = self._metrics.get(name)
                if values:
                    values.pop()
        sampled_BT = batch.get("sampling_per_token_logps")
        if self._guard.replaces_loss and sampled_BT is not None and sampled_BT.isfinite().all():
            batch.setdefault("old_per_token_logps", sampled_BT)

    def _ids_of(self, rows: Sequence[LossRow]) -> torch.Tensor:
        return torch.tensor([row.id for row in rows], device=self._trainer.accelerator.device)

    def _rows_of_scored(self, batch: dict[str, Any]) -> list[LossRow]:
        """Return the records of a batch that any class of trainer has scored."""
        unmatched = LossBatch.scored(batch, ())
        return self._rows_of(unmatched, [self._rows_with_ids(batch), self._state.rows])

    def _rows_with_ids(self, batch: Mapping[str, Any]) -> Suggestions:
        row_ids = batch.get(ROW_IDS)
        if row_ids is None:
            return []
        return [self._index.with_id(row_id) for row_id in row_ids.tolist()]

    def _rows_of(self, batch: LossBatch, suggested: Sequence[Suggestions]) -> list[LossRow]:
        """Return the record of each row, or raise `ConfigurationError` if a setting needs more."""
        rows = self._index.rows_of(batch, suggested)
        if self._needed_by:
            self._require_records(rows, batch.completion_mask.sum(1).tolist())
        return rows

    def _require_records(self, rows: Sequence[LossRow], num_trained: Sequence[int]) -> None:
        for setting, other in self._needed_by.items():
            require_records(rows, num_trained, self._index.num_earlier, setting, other)

    def _per_token(
        self, hook: TokenAdvantages, batch: dict[str, Any], rows: Sequence[LossRow]
    ) -> torch.Tensor:
        """Return per-token advantages, (B, T), from a user's hook."""
        shape = batch["completion_mask"].shape
        advantages_B = batch["advantages"]
        advantages_BT = hook(rows, advantages_B.clone())
        returned = getattr(advantages_BT, "shape", type(advantages_BT).__name__)
        if not isinstance(advantages_BT, torch.Tensor) or returned != shape:
            raise ConfigurationError(
                f"token_advantages returned {returned}; return a tensor of shape {tuple(shape)}, "
                "with one number for each token of the longest completion."
            )
        return advantages_BT.to(advantages_B)

    def _are_truncated(self, rows: Sequence[LossRow]) -> torch.Tensor:
        """Return which rows are truncated, (B,), bool."""
        ends = set(self._trainer.eos_token_ids)
        ends.add(self._trainer._tokenizer.pad_token_id)
        is_cut = []
        for row in rows:
            last = row.completion_ids[-1] if row.completion_ids else None
            has_end = last is not None and last in ends
            is_cut.append(not row.is_stopped and not has_end)
        return torch.tensor(is_cut, device=self._trainer.accelerator.device)

    def _correct_metrics(self, rows: Sequence[LossRow]) -> None:
        """Correct the metrics that the trainer logged from its last-token test."""
        accelerator = self._trainer.accelerator
        lengths = torch.tensor([sum(row.is_sampled) for row in rows], device=accelerator.device)
        lengths, is_cut = accelerator.gather((lengths, self._are_truncated(rows)))
        whole = torch.zeros(1) if is_cut.all() else lengths[~is_cut].float()
        corrected = {
            "clipped_ratio": is_cut.float().mean(),
            "mean_terminated_length": whole.mean(),
            "min_terminated_length": whole.min(),
            "max_terminated_length": whole.max(),
        }
        for name, value in corrected.items():
            self._metrics[f"completions/{name}"][-1] = value.item()

    def _mask_truncated(self, batch: dict[str, Any], rows: Sequence[LossRow]) -> None:
        """Mask truncated completions as the trainer would, and count the remaining tokens."""
        is_whole_B1 = ~self._are_truncated(rows).unsqueeze(1)
        for name in ("completion_mask", "tool_mask"):
            if name in batch:
                batch[name] = batch[name] * is_whole_B1.to(batch[name].device).int()
        num_items = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()
        batch["num_items_in_batch"] = self._trainer.accelerator.gather(num_items).sum()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any
    ) -> Any:
        """Replace `compute_loss`: give the forward inside the records of its rows."""
        self._backend.begin_loss()
        self._loss_inputs = inputs
        try:
            with self._backend.step_span.within():
                loss = self._compute_loss(model, inputs, *arguments, **named)
        finally:
            self._loss_inputs = None
        router_disagreement = None if self._counts is None else self._counts.take()
        self._backend.log_loss(self._loss_tokens, router_disagreement)
        return loss

    def logprobs(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **settings: Any,
    ) -> Result:
        """Replace `_get_per_token_logps_and_entropies`, which TRL calls for three purposes.

        These are its loss, the policy's old log-probabilities (once per scoring), and the
        log-probabilities of a reference or of any other model.

        Args:
            model: the policy, wrapped or not, or another model.
            input_ids: (B, S), int64: prompts, left-padded, and completions, right-padded.
            attention_mask: (B, S), int64.
            logits_to_keep: T, the columns of completions.
            batch_size: rows in one forward of the trainer; None: all.
            settings: further arguments of TRL 1.16's method, such as those of images.

        Returns:
            Log-probabilities and entropies in nats, (B, T), float32, 0 in the padding, and the
            load-balancing loss of a mixture of experts. The latter two may be None.
        """
        batch = LossBatch(input_ids, attention_mask, logits_to_keep, batch_size, settings)
        if self._loss_inputs is not None:
            return self._loss_logprobs(model, batch, self._loss_inputs)
        batch = replace(batch, rows=self._rows_of_scoring(batch))
        if self._state.asks_old_logprobs and model is self._trainer.model:
            self._state.asks_old_logprobs = False
            return self._old_logprobs(batch), None, None
        return self._computed(model, batch)

    def _loss_logprobs(self, model: Any, batch: LossBatch, inputs: dict[str, Any]) -> Result:
        """Compute the log-probabilities of `inputs`' loss, and log their drift from the rollout."""
        suggested = [inputs.get(ROWS_KEY, []), self._rows_with_ids(inputs)]
        rows = self._rows_of(batch, suggested)
        advantages = self._advantages(inputs)
        batch = replace(batch, rows=rows, advantages=advantages, counts=self._counts)
        logprobs_BT, entropies_BT, aux_loss = self._computed(model, batch)
        self._log_differences(logprobs_BT.detach(), batch, inputs)
        if entropies_BT is not None:
            self._backend.computed(batch.rows, logprobs_BT.detach(), entropies_BT.detach())
        return logprobs_BT, entropies_BT, aux_loss

    def _rows_of_scoring(self, batch: LossBatch) -> Sequence[LossRow]:
        """Return the record of each row of a forward; empty: the rows are not from a rollout."""
        if self._state.is_scoring:
            return self._rows_of(batch, [self._state.rows])
        rows = self._index.rows_of(batch, [])
        are_known = all(row.id != UNKNOWN_ID for row in rows)
        return rows if are_known else ()

    def _computed(self, model: Any, batch: LossBatch) -> Result:
        """Compute a batch by the packed forward, or if that is impossible by the trainer's own."""
        if self._packed is not None:
            result = self._packed.logprobs(model, batch, self._own)
            if result is not None:
                self._loss_tokens = self._packed.tokens
                return result
        self._loss_tokens = padded_tokens(batch)
        return self._own(model, batch)

    def _policy_logprobs(self, batch: LossBatch) -> torch.Tensor:
        logprobs_BT, _, _ = self._computed(self._trainer.model, batch)
        return logprobs_BT

    def _advantages(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return the rows' advantages; None if rows without an advantage also need gradients."""
        trainer = self._trainer
        has_kl = hasattr(trainer, "loss_type") and trainer.beta != 0.0
        has_bonus = getattr(trainer, "_entropy_bonus_enabled", False)
        has_own_loss = not _is_of_trl(self._compute_loss) or not _is_of_trl(trainer._compute_loss)
        advantages = inputs["advantages"]
        needs_all = has_kl or has_bonus or has_own_loss or advantages.dim() != 1
        if needs_all or not torch.is_grad_enabled():
            return None
        return advantages

    def _old_logprobs(self, batch: LossBatch) -> torch.Tensor:
        """Return the sampled log-probabilities if the guard trusts them, else the trainer's."""
        guard = self._guard
        self._step_that_trusts_sampled = None
        sampled_BT = batch.sampled_logprobs()
        if guard.are_usable(sampled_BT, batch.rows):
            guard.check(batch)
            if guard.is_trusted:
                assert sampled_BT is not None
                self._step_that_trusts_sampled = self._trainer.state.global_step
                return sampled_BT
        recomputed_BT = self._policy_logprobs(batch)
        guard.check(batch, recomputed_BT)
        return recomputed_BT

    def _log_differences(
        self, logprobs_BT: torch.Tensor, batch: LossBatch, inputs: dict[str, Any]
    ) -> None:
        """Log how far the loss's log-probabilities are from the sampled ones.

        Only in a step that uses the sampled ones as the old ones: TRL compares those, and would log
        0. Rows of which this policy sampled no token are left out.
        """
        has_sampled = inputs.get("sampling_per_token_logps") is not None
        if not has_sampled or self._step_that_trusts_sampled != self._trainer.state.global_step:
            return
        # Sampled values of this forward's rows: a user's own loss may score other rows, or reorder
        # them.
        sampled_BT = batch.sampled_logprobs()
        mask_BT = batch.sampled_mask()
        if sampled_BT is None:
            # The other processes wait for the sums of this one.
            sampled_BT = torch.zeros_like(logprobs_BT)
            mask_BT = torch.zeros_like(mask_BT)
        version = self._backend.generator.policy_version
        is_new_B = torch.tensor([row.was_sampled_by(version) for row in batch.rows])
        mask_BT &= is_new_B.to(mask_BT.device)[:, None]
        distances_N = (logprobs_BT - sampled_BT).abs()[mask_BT]
        gather = self._trainer.accelerator.gather
        sums_2 = torch.stack([mask_BT.sum(), distances_N.sum()])
        count, total = gather(sums_2).view(-1, 2).sum(0)
        # A process may have no token.
        largest_here = torch.cat([distances_N, distances_N.new_zeros(1)]).max()
        largest = gather(largest_here[None]).max()
        mean = total / count.clamp(min=1)
        self._metrics[MEAN_DIFFERENCE].append(mean.item())
        self._metrics[MAX_DIFFERENCE].append(largest.item())

    @property
    def _metrics(self) -> Any:
        trainer = self._trainer
        return trainer._metrics["train" if trainer.model.training else "eval"]


def _is_of_trl(method: Any) -> bool:
    """Return whether a method is TRL's, of one of `LOSS_MODULES`, and no function wraps it."""
    function = getattr(method, "__func__", method)
    # `functools.wraps` copies the module's name, and not the globals.
    is_from_trl = function.__globals__["__name__"].startswith("trl.")
    return is_from_trl and method.__module__ in LOSS_MODULES


def _has_sampled_as_old(batch: dict[str, Any]) -> bool:
    """Return whether a batch's old log-probabilities are those of the rollout.

    A user's trainer class may have replaced them.
    """
    old_BT, sampled_BT = batch.get("old_per_token_logps"), batch.get("sampling_per_token_logps")
    if old_BT is None or sampled_BT is None or old_BT.shape != sampled_BT.shape:
        return False
    mask_BT = batch["completion_mask"] > 0
    return bool((old_BT == sampled_BT)[mask_BT].all())
