"""Replace the trainer's methods between rollout and loss; choose its old log-probabilities.

Each public method of `TrainerScoring` replaces a method of the trainer and calls the original.
TRL 1.16 takes a completion for whole if its last token is an end-of-sequence token of the trainer,
or padding. Stop strings, other stop tokens and a `rollout_func`'s sampling parameters break that
test; the finish reason does not. Called by the trainer, on its thread.

B: rows of a batch, T: tokens of a completion.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from cb_rollout.compat.patching import replacing
from cb_rollout.compat.transformers import unwrap
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import LossForward, SamplingMaskMode
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.model.routers import Disagreement
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl.backend import Collected, GenerationBackend
from cb_rollout.integrations.trl.guard import LogprobGuard, updates_once
from cb_rollout.integrations.trl.loss_rows import (
    ROWS_KEY,
    LossBatch,
    LossRow,
    OwnForward,
    Result,
    loss_rows,
    require_sampled_here,
)
from cb_rollout.integrations.trl.packed_loss import LossTokens, PackedLoss, padded_tokens
from cb_rollout.packing.logprobs import packing_obstacle
from cb_rollout.rollout.generator import RolloutGenerator

# TRL 1.16's metrics of sampled against old log-probabilities.
DIFFERENCES = tuple(f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max"))

TokenAdvantages = Callable[[Sequence[LossRow], torch.Tensor], torch.Tensor]
"""Takes the rows of a batch and their advantages, (B,); returns advantages of tokens, (B, T)."""

# A loss of these is a product with the advantage; another one may train every row.
LOSS_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")


def unknown_end(trainer: Any, params: SamplingParams) -> str | None:
    """Return a name for a stop that TRL's test misses; None: the test covers all stops."""
    if params.stop:
        return "a stop string"
    ends: Any = params.eos_token_id or ()
    unknown = {*ends, *params.stop_token_ids} - {*trainer.eos_token_ids}
    return next((f"token {token}" for token in sorted(unknown) if token >= 0), None)


def require_known_ends(trainer: Any, params: SamplingParams) -> None:
    """Refuse to mask truncated completions under RLOO where it does not know every stop."""
    is_rloo = not hasattr(trainer, "rollout_func")
    ended_by = unknown_end(trainer, params)
    if trainer.mask_truncated_completions and is_rloo and ended_by:
        raise refused("masked, unknown stops", ended_by=ended_by)


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
        self._trainer, self._backend, self._records = trainer, backend, backend.records
        generator = backend.generator
        config, manager, routers = generator.config, generator.manager, generator.manager.routers
        self._replays = config.sampling_mask == SamplingMaskMode.REPLAY
        self._guard = LogprobGuard(trainer, generator, self._policy_logprobs)
        self._has_rollout_func = getattr(trainer, "rollout_func", None) is not None
        # The same in every process: the corrections exchange data between all of them.
        self._corrects_ends = self._has_rollout_func or bool(unknown_end(trainer, manager.defaults))
        self._packed: PackedLoss | None = None
        if config.loss_forward == LossForward.PACKED:
            if isinstance(generator, RolloutGenerator):
                engine = generator.manager.engine
                obstacle, cuts_images = engine.layout.packing_obstacle, engine.runner.cuts_images
            else:
                obstacle, cuts_images = packing_obstacle(unwrap(trainer.model)), {}
            self._packed = PackedLoss(
                trainer, config, routers, packing_obstacle=obstacle, cuts_images=cuts_images
            )
        self._own = OwnForward(trainer, routers)
        self._counts = None if routers is None else Disagreement()
        self._generate = trainer._generate
        self._generate_and_score = trainer._generate_and_score_completions
        self._calculate_rewards = trainer._calculate_rewards
        self._compute_loss = trainer.compute_loss
        # Apart on each process: a strategy moves rows from one to another.
        accelerator = trainer.accelerator
        self._row_ids = itertools.count(accelerator.process_index, accelerator.num_processes)
        self._rows: list[LossRow] = []
        """Of the batch that is scored or trained on; empty: outside of both."""
        self._loss_inputs: dict[str, Any] | None = None
        self._asks_old_logprobs = False
        """True until the trainer's scoring has asked for old log-probabilities."""
        self._loss_tokens = LossTokens()
        self._step_of_sampled: int | None = None
        """Step whose old log-probabilities are the sampled ones; None: they are recomputed."""

    def generate(self, prompts: list[Any]) -> Any:
        context = self._backend.context
        try:
            generated = self._generate(prompts)
        finally:
            self._backend.end_rollout()
        has_tool_mask = len(generated) > 3 and generated[2] is not None
        has_one_turn = len(context.outputs) == len(generated[0])
        in_order = has_one_turn and not has_tool_mask and not self._has_rollout_func
        context.rows = self._rows = loss_rows(
            *(generated, context.outputs, self._row_ids),
            is_in_order=in_order,
            replays=self._replays,
        )
        if self._corrects_ends:
            self._correct_metrics(context.rows)
        if self._replays:
            require_sampled_here(context.rows, "sampling_mask='replay'", "sampling_mask='ignore'")
        if self._counts is not None:
            require_sampled_here(context.rows, "router_replay=True", "router_replay=False")
        return generated

    def calculate_rewards(self, inputs: list[Any], prompts: list[Any], *rest: Any) -> torch.Tensor:
        """Replace `_calculate_rewards`, which TRL 1.16 has return the rows of all processes."""
        rewards = self._calculate_rewards(inputs, prompts, *rest)
        weights = self._trainer.reward_weights.to(rewards.device)
        all_rewards = (rewards * weights).nansum(1).tolist()
        # In the order of the processes, each of which has as many rows.
        start = self._trainer.accelerator.process_index * len(prompts)
        context = self._backend.context
        context.all_rewards = all_rewards
        context.rewards = all_rewards[start : start + len(prompts)]
        return rewards

    def generate_and_score(self, inputs: list[Any]) -> dict[str, Any]:
        """Replace `_generate_and_score_completions`: make the batch as the strategy decides."""
        make_batch = self._backend.make_batch
        batch = make_batch(inputs, self.score) if make_batch else self.score(inputs)
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
        # As TRL 1.16's scoring decides; RLOO's always asks.
        corrects = getattr(trainer, "vllm_importance_sampling_correction", True)
        self._asks_old_logprobs = not updates_once(trainer) or corrects
        is_masked, is_wrong = trainer.mask_truncated_completions, self._corrects_ends
        try:
            # The trainer would mask by its own test of the last token.
            with replacing([(trainer, "mask_truncated_completions", is_masked and not is_wrong)]):
                batch = self._generate_and_score(inputs)
            assert not self._asks_old_logprobs, "the trainer did not ask for old logprobs"
            if is_masked and is_wrong:
                self._mask_truncated(batch, context.rows)
            scored = LossBatch.scored(batch, context.rows)
            with torch.no_grad():
                # Verifies by an extra forward, where the trainer needed none.
                self._guard.check(scored)
            if self._step_of_sampled is not None:
                # TRL 1.16 logged that sampled and old log-probabilities are the same; the loss logs
                # the difference to its own instead.
                for name in DIFFERENCES:
                    if values := self._metrics.get(name):
                        values.pop()
        finally:
            self._rows, self._asks_old_logprobs, context.collected = [], False, None
        sampled_BT = batch.get("sampling_per_token_logps")
        if self._guard.replaces_loss and sampled_BT is not None and sampled_BT.isfinite().all():
            batch.setdefault("old_per_token_logps", sampled_BT)
        if self._token_advantages is not None:
            batch["advantages"] = self._per_token(self._token_advantages, batch, context.rows)
        batch[ROWS_KEY] = context.rows
        if self._records is not None:
            self._records.add(
                mode=context.mode,
                rows=context.rows,
                rewards=context.rewards,
                all_rewards=context.all_rewards,
                images=context.images,
                batch=batch,
            )
        return batch

    def _per_token(
        self, hook: TokenAdvantages, batch: dict[str, Any], rows: Sequence[LossRow]
    ) -> torch.Tensor:
        advantages_B, shape = batch["advantages"], batch["completion_mask"].shape
        advantages_BT = hook(rows, advantages_B.clone())
        found = getattr(advantages_BT, "shape", type(advantages_BT).__name__)
        if not isinstance(advantages_BT, torch.Tensor) or found != shape:
            raise ConfigurationError(
                f"token_advantages returned {found}; return a tensor {tuple(shape)}: a number for "
                "each token of the longest completion."
            )
        return advantages_BT.to(advantages_B)

    def _are_truncated(self, rows: Sequence[LossRow]) -> torch.Tensor:
        ends = {*self._trainer.eos_token_ids, self._trainer._tokenizer.pad_token_id}
        is_cut = [not row.is_stopped and row.completion_ids[-1] not in ends for row in rows]
        return torch.tensor(is_cut, device=self._trainer.accelerator.device)

    def _correct_metrics(self, rows: Sequence[LossRow]) -> None:
        """Correct what the trainer logged by its test of the last token."""
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

    def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        """Replace `compute_loss`: give the forward inside the records of its rows."""
        self._backend.pause_carried()
        self._backend.begin_loss()
        self._loss_inputs, self._rows = inputs, inputs.get(ROWS_KEY, [])
        try:
            loss = self._compute_loss(model, inputs, *rest, **named)
        finally:
            self._loss_inputs, self._rows = None, []
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
        inputs, rows = self._loss_inputs, self._rows
        batch = LossBatch(input_ids, attention_mask, logits_to_keep, batch_size, settings, rows)
        if inputs is None:
            if self._asks_old_logprobs and model is self._trainer.model:
                self._asks_old_logprobs = False
                return self._old_logprobs(batch), None, None
            return self._computed(model, batch)
        batch = replace(batch, advantages=self._advantages(inputs), counts=self._counts)
        logprobs_BT, entropies_BT, aux_loss = self._computed(model, batch)
        self._log_differences(logprobs_BT.detach(), inputs)
        if self._records is not None and batch.rows:
            assert entropies_BT is not None
            self._records.complete(batch.rows, logprobs_BT.detach(), entropies_BT.detach())
        return logprobs_BT, entropies_BT, aux_loss

    def _computed(self, model: Any, batch: LossBatch) -> Result:
        if self._packed is not None:
            result = self._packed.logprobs(model, batch, self._own)
            if result is not None:
                self._loss_tokens = self._packed.tokens
                return result
        self._loss_tokens = padded_tokens(batch)
        return self._own(model, batch)

    def _policy_logprobs(self, batch: LossBatch) -> torch.Tensor:
        return self._computed(self._trainer.model, batch)[0]

    def _advantages(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return the rows' advantages; None: rows without one change the gradient too."""
        trainer = self._trainer
        has_kl = hasattr(trainer, "loss_type") and trainer.beta != 0.0
        has_bonus = getattr(trainer, "_entropy_bonus_enabled", False)
        losses = (self._compute_loss, trainer._compute_loss)
        has_own_loss = any(loss.__module__ not in LOSS_MODULES for loss in losses)
        needs_all = has_kl or has_bonus or has_own_loss or inputs["advantages"].dim() != 1
        return None if needs_all or not torch.is_grad_enabled() else inputs["advantages"]

    def _old_logprobs(self, batch: LossBatch) -> torch.Tensor:
        """Return the sampled ones where the guard trusts them, else the trainer's."""
        guard = self._guard
        self._step_of_sampled = None
        sampled_BT = batch.sampled_logprobs()
        if guard.are_usable(sampled_BT, batch.rows):
            guard.check(batch)
            if guard.is_trusted:
                assert sampled_BT is not None
                self._step_of_sampled = self._trainer.state.global_step
                return sampled_BT
        recomputed_BT = self._policy_logprobs(batch)
        guard.check(batch, recomputed_BT)
        return recomputed_BT

    def _log_differences(self, logprobs_BT: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Log sampled against the loss's log-probabilities, in the step that sampled them."""
        sampled_BT = inputs.get("sampling_per_token_logps")
        if sampled_BT is None or self._step_of_sampled != self._trainer.state.global_step:
            return
        mask_BT = inputs["completion_mask"] * inputs.get("tool_mask", 1) > 0
        distance_N = (logprobs_BT - sampled_BT).abs()[mask_BT]
        gather = self._trainer.accelerator.gather
        count, total = gather(torch.stack([mask_BT.sum(), distance_N.sum()])).view(-1, 2).sum(0)
        largest = gather(torch.cat([distance_N, distance_N.new_zeros(1)]).max()[None]).max()
        for name, value in zip(DIFFERENCES, (total / count.clamp(min=1), largest), strict=True):
            self._metrics[name].append(value.item())

    @property
    def _metrics(self) -> Any:
        trainer = self._trainer
        return trainer._metrics["train" if trainer.model.training else "eval"]
