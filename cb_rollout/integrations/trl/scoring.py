"""Replace the trainer's methods between rollout and loss; choose its old log-probabilities.

Each method here replaces the trainer's method of that name and calls the original. Called by the
trainer, on its thread. Reads the trainer's attributes and imports no trl.

B: rows of a batch, T: tokens of a completion.
"""

import itertools
from dataclasses import replace
from typing import Any

import torch

from cb_rollout.compat.transformers import unwrap
from cb_rollout.config.enums import LossForward, SamplingMaskMode
from cb_rollout.engine.model.routers import Disagreement
from cb_rollout.integrations.ray.pooled_generator import PooledGenerator
from cb_rollout.integrations.trl.backend import GenerationBackend, training_bytes
from cb_rollout.integrations.trl.context import Collected
from cb_rollout.integrations.trl.guard import LogprobGuard, updates_once
from cb_rollout.integrations.trl.images import ToolImages
from cb_rollout.integrations.trl.loss_rows import (
    ROWS_KEY,
    LossBatch,
    LossRow,
    loss_rows,
    require_sampled_here,
)
from cb_rollout.integrations.trl.packed_loss import LossTokens, PackedLoss, padded_tokens
from cb_rollout.integrations.trl.replay import OwnForward
from cb_rollout.integrations.trl.truncated_completions import TruncatedCompletions
from cb_rollout.packing.comparison import Result
from cb_rollout.packing.logprobs import can_pack
from cb_rollout.rollout.generator import RolloutGenerator

# TRL 1.16's metrics of sampled against old log-probabilities.
DIFFERENCES = tuple(f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max"))

# A loss of these is a product with the advantage; another one may train every row.
LOSS_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")


class TrainerScoring:
    """Scoring of one trainer's rollouts."""

    def __init__(self, trainer: Any, backend: GenerationBackend) -> None:
        """Keep the trainer's own methods, before the caller replaces them."""
        self._trainer, self._backend, self._records = trainer, backend, backend.records
        config, manager = backend.generator.config, backend.generator.manager
        routers = manager.routers
        self._replays = config.sampling_mask == SamplingMaskMode.REPLAY
        self._guard = LogprobGuard(trainer, config, manager.defaults)
        self._truncation = TruncatedCompletions(trainer, manager.defaults)
        self._packed: PackedLoss | None = None
        if config.loss_forward == LossForward.PACKED:
            is_packable = _can_pack(trainer, backend.generator)
            training = training_bytes(trainer, config)
            self._packed = PackedLoss(trainer, config, training, routers, can_pack=is_packable)
        self._own = OwnForward(trainer, routers)
        self._counts = None if routers is None else Disagreement()
        self._tool_images = ToolImages(trainer)
        self._generate = trainer._generate
        self._generate_and_score = trainer._generate_and_score_completions
        self._calculate_rewards = trainer._calculate_rewards
        self._compute_loss = trainer.compute_loss
        # Apart on each process: a strategy moves rows from one to another.
        accelerator = trainer.accelerator
        self._row_ids = itertools.count(accelerator.process_index, accelerator.num_processes)
        self._rows: list[LossRow] | None = None
        """Of the batch that is scored or trained on; None: outside of both."""
        self._loss_inputs: dict[str, Any] | None = None
        self._asks_old_logprobs = False
        """True until the trainer's scoring has asked for old log-probabilities."""
        self._loss_tokens = LossTokens()
        self._step_of_sampled: int | None = None
        """Step at whose start the old log-probabilities were the sampled ones; None: they were
        not."""

    def generate(self, prompts: list[Any]) -> Any:
        """Replace `_generate`: keep the rows."""
        context = self._backend.context
        try:
            generated = self._generate(prompts)
        finally:
            self._backend.end_rollout()
        has_rollout_func = getattr(self._trainer, "rollout_func", None) is not None
        has_tool_mask = len(generated) > 3 and generated[2] is not None
        has_one_turn = len(context.outputs) == len(generated[0])
        context.rows = self._rows = loss_rows(
            generated,
            context.outputs,
            self._row_ids,
            is_in_order=has_one_turn and not has_tool_mask and not has_rollout_func,
            replays=self._replays,
        )
        self._truncation.correct_metrics(context.rows)
        self._tool_images.begin(generated)
        if self._replays:
            require_sampled_here(context.rows, "sampling_mask='replay'", "sampling_mask='ignore'")
        if self._counts is not None:
            require_sampled_here(context.rows, "router_replay=True", "router_replay=False")
        return generated

    def calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        """Replace `_calculate_rewards`: keep the rewards for the records."""
        rewards = self._calculate_rewards(*arguments)
        weights = self._trainer.reward_weights.to(rewards.device)
        self._backend.context.rewards = (rewards * weights).nansum(1).tolist()
        return rewards

    def generate_and_score(self, inputs: list[Any]) -> dict[str, Any]:
        """Replace `_generate_and_score_completions`: make the batch as the strategy decides."""
        strategy = self._backend.strategy
        batch = strategy.generate_and_score(inputs, self.score) if strategy else self.score(inputs)
        is_auto = not self._guard.replaces_loss
        if is_auto and self._step_of_sampled is not None and updates_once(self._trainer):
            # Rounding between sampler and loss clips no ratio: the loss takes its own, as TRL's.
            batch.pop("old_per_token_logps", None)
        return batch

    def score(self, inputs: list[Any], collected: Collected | None = None) -> dict[str, Any]:
        """Generate and score one batch, with the rows that the loss needs."""
        trainer = self._trainer
        self._guard.begin_rollout(trainer.model.training)
        if self._guard.is_due and self._packed is not None:
            self._packed.compare_again()
        context = self._backend.begin_rollout(collected=collected)
        self._asks_old_logprobs = _recomputes_old_logprobs(trainer)
        try:
            with self._truncation.unmasked() as is_mask_due:
                batch = self._generate_and_score(inputs)
            assert not self._asks_old_logprobs, "the trainer did not ask for old logprobs"
            if is_mask_due:
                self._truncation.mask(batch, context.rows)
            scored = LossBatch.scored(batch, context.rows)
            self._tool_images.check(self._own.plain, trainer.model, scored)
            with torch.no_grad():
                # Verifies by an extra forward, where the trainer needed none.
                self._guard.check(scored, self._version, self._policy_logprobs)
            if self._step_of_sampled is not None:
                self._forget_differences()
        finally:
            self._rows, self._asks_old_logprobs, context.collected = None, False, None
        sampled_BT = batch.get("sampling_per_token_logps")
        if self._guard.replaces_loss and sampled_BT is not None and sampled_BT.isfinite().all():
            batch.setdefault("old_per_token_logps", sampled_BT)
        batch[ROWS_KEY] = context.rows
        if self._records is not None:
            self._records.add(context, batch)
        return batch

    def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        """Replace `compute_loss`: give the forward inside the records of its rows."""
        self._backend.pause_carried()
        self._backend.begin_loss()
        self._loss_inputs, self._rows = inputs, inputs.get(ROWS_KEY)
        try:
            loss = self._compute_loss(model, inputs, *rest, **named)
        finally:
            self._loss_inputs = self._rows = None
        self._backend.log_loss(self._loss_tokens, self._counts and self._counts.take())
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
        """Replace `_get_per_token_logps_and_entropies`: sampled, replayed, or the trainer's own."""
        ids, inputs = input_ids, self._loss_inputs
        batch = LossBatch(ids, attention_mask, logits_to_keep, batch_size, settings, self._rows)
        if inputs is None:
            self._tool_images.check(self._own.plain, model, batch)
            if self._asks_old_logprobs and model is self._trainer.model:
                self._asks_old_logprobs = False
                return self._old_logprobs(batch), None, None
            return self._computed(model, batch)
        batch = replace(batch, advantages=self._advantages(inputs), counts=self._counts)
        computed = self._computed(model, batch)
        logprobs_BT, entropies_BT, _ = computed
        self._log_differences(logprobs_BT.detach(), inputs)
        if self._records is not None and batch.rows is not None:
            assert entropies_BT is not None
            self._records.complete(batch.rows, logprobs_BT.detach(), entropies_BT.detach())
        return computed

    def _computed(self, model: Any, batch: LossBatch) -> Result:
        """Compute the log-probabilities of a batch: packed where that can be, or as the trainer."""
        if self._packed is not None:
            found = self._packed.logprobs(model, batch, self._own)
            if found is not None:
                self._loss_tokens = self._packed.tokens
                return found
        self._loss_tokens = padded_tokens(batch)
        return self._own(model, batch)

    def _policy_logprobs(self, batch: LossBatch) -> torch.Tensor:
        """Return the log-probabilities of some rows by the policy."""
        return self._computed(self._trainer.model, batch)[0]

    def _advantages(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return the rows' advantages where a row without one changes no gradient, else None."""
        trainer = self._trainer
        has_kl = hasattr(trainer, "loss_type") and trainer.beta != 0.0
        has_bonus = getattr(trainer, "_entropy_bonus_enabled", False)
        losses = (self._compute_loss, trainer._compute_loss)
        has_own_loss = any(loss.__module__ not in LOSS_MODULES for loss in losses)
        advantages = inputs["advantages"]
        are_of_tokens = advantages.dim() != 1
        needs_all = has_kl or has_bonus or has_own_loss or are_of_tokens
        return None if needs_all or not torch.is_grad_enabled() else advantages

    def _old_logprobs(self, batch: LossBatch) -> torch.Tensor:
        """Return the sampled ones where the guard trusts them, else the trainer's."""
        guard, version = self._guard, self._version
        self._step_of_sampled = None
        sampled_BT = batch.sampled_logprobs()
        if guard.are_usable(sampled_BT, batch.rows or (), version):
            guard.check(batch, version, self._policy_logprobs)
            if guard.is_trusted:
                assert sampled_BT is not None
                self._step_of_sampled = self._trainer.state.global_step
                return sampled_BT
        recomputed_BT = self._policy_logprobs(batch)
        guard.check(batch, version, self._policy_logprobs, recomputed_BT)
        return recomputed_BT

    def _forget_differences(self) -> None:
        """Take back TRL 1.16's difference of sampled and old log-probabilities: they are the same.

        The loss logs their difference to its own instead.
        """
        for name in DIFFERENCES:
            values = self._metrics.get(name)
            if values:
                values.pop()

    def _log_differences(self, logprobs_BT: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Log sampled against the loss's log-probabilities, before weights changed since."""
        sampled_BT = inputs.get("sampling_per_token_logps")
        if sampled_BT is None or self._step_of_sampled != self._trainer.state.global_step:
            return
        mask_BT = inputs["completion_mask"] * inputs.get("tool_mask", 1) > 0
        found_N = (logprobs_BT - sampled_BT).abs()[mask_BT]
        gather = self._trainer.accelerator.gather
        count, total = gather(torch.stack([mask_BT.sum(), found_N.sum()])).view(-1, 2).sum(0)
        largest = gather(found_N.max()[None] if found_N.numel() else found_N.new_zeros(1)).max()
        for name, value in zip(DIFFERENCES, (total / count.clamp(min=1), largest), strict=True):
            self._metrics[name].append(value.item())

    @property
    def _metrics(self) -> Any:
        trainer = self._trainer
        return trainer._metrics["train" if trainer.model.training else "eval"]

    @property
    def _version(self) -> int:
        return self._backend.generator.policy_version


def _can_pack(trainer: Any, generator: RolloutGenerator | PooledGenerator) -> bool:
    """Return whether rows may stand one after the other; an engine of this process knows it."""
    if isinstance(generator, RolloutGenerator):
        return generator.manager.cache_layout.can_pack
    return can_pack(unwrap(trainer.model))


def _recomputes_old_logprobs(trainer: Any) -> bool:
    """Return True if scoring asks for the policy's log-probabilities (trl 1.16); RLOO always."""
    return not updates_once(trainer) or trainer.vllm_importance_sampling_correction
