"""Replace the trainer's methods between rollout and loss; choose its old log-probabilities.

Each method here replaces the trainer's method of that name and calls the original. Called by the
trainer, on its thread. Reads the trainer's attributes and imports no trl.

B: rows of a batch, T: tokens of a completion.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cb_rollout.engine.model.routers import Disagreement
from cb_rollout.integrations.trl.backend import GenerationBackend
from cb_rollout.integrations.trl.context import Collected, rows_from
from cb_rollout.integrations.trl.guard import LogprobGuard, updates_once
from cb_rollout.integrations.trl.images import ToolImages, image_arguments, of_rows
from cb_rollout.integrations.trl.packed_loss import PackedLoss
from cb_rollout.integrations.trl.packed_scores import LossTokens, padded_tokens
from cb_rollout.integrations.trl.records import TrainerRecords
from cb_rollout.integrations.trl.replay import (
    RouterReplay,
    kept_token_ids,
    replayed_logprobs,
    routes_of,
)
from cb_rollout.integrations.trl.truncated_completions import TruncatedCompletions

# Keys that a batch carries into the loss, beside the trainer's own.
ROW_KEY, KEPT_KEY, ROUTES_KEY = "rollout_row", "kept_token_ids", "routed_experts"

# TRL 1.16's metrics of sampled against old log-probabilities.
DIFFERENCES = tuple(f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max"))

# A loss of these is a product with the advantage; another one may train every row.
LOSS_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")


class TrainerScoring:
    """Scoring of one trainer's rollouts."""

    def __init__(
        self,
        trainer: Any,
        backend: GenerationBackend,
        guard: LogprobGuard,
        records: TrainerRecords | None,
        truncation: TruncatedCompletions,
        packed: PackedLoss | None,
        *,
        replays: bool,
        router_replay: RouterReplay | None = None,
    ) -> None:
        """Keep the trainer's own methods; they are replaced by the caller.

        Args:
            trainer: the trainer, unchanged so far.
            backend: its generation backend.
            guard: decides whether sampled log-probabilities are used as the old ones.
            records: None: this process keeps none.
            truncation: tells which completions were truncated.
            packed: computes the loss's log-probabilities; None: the trainer's own forward does.
            replays: compute log-probabilities over the sampling mask.
            router_replay: replays the experts of the rollout; None: routers choose for themselves.
        """
        self._trainer, self._backend = trainer, backend
        self._guard, self._records, self._replays = guard, records, replays
        self._truncation, self._packed = truncation, packed
        self._router_replay = router_replay
        self._tool_images = ToolImages(trainer)
        self._generate = trainer._generate
        self._generate_and_score = trainer._generate_and_score_completions
        self._calculate_rewards = trainer._calculate_rewards
        self._forward = trainer._get_per_token_logps_and_entropies
        self._compute_loss = trainer.compute_loss
        # Apart on each process: a strategy moves rows from one to another.
        accelerator = trainer.accelerator
        self._row_ids = itertools.count(accelerator.process_index, accelerator.num_processes)
        self._loss_inputs: dict[str, Any] | None = None
        self._loss_tokens = LossTokens()
        self._step_of_sampled: int | None = None
        """Step at whose start the old log-probabilities were the sampled ones; None: they were
        not."""

    def generate(self, prompts: list[Any]) -> Any:
        """Replace `_generate`: keep the rows and the outputs they consist of."""
        context = self._backend.context
        try:
            generated = self._generate(prompts)
        finally:
            self._backend.end_rollout()
        has_rollout_func = getattr(self._trainer, "rollout_func", None) is not None
        has_tool_mask = len(generated) > 3 and generated[2] is not None
        has_one_turn = len(context.outputs) == len(generated[0])
        context.rows = rows_from(
            generated,
            context.outputs,
            is_in_order=has_one_turn and not has_tool_mask and not has_rollout_func,
        )
        self._truncation.correct_metrics(context.rows)
        self._tool_images.begin(generated)
        if self._replays:
            context.require_sampled_here("sampling_mask='replay'", "sampling_mask='ignore'")
            context.kept_token_ids = [kept_token_ids(row) for row in context.rows]
        if self._router_replay is not None:
            context.require_sampled_here("router_replay=True", "router_replay=False")
            context.routed_experts = [routes_of(row) for row in context.rows]
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
        """Generate and score one batch, with the keys that the loss needs."""
        is_check_due = self._guard.begin_rollout(self._trainer.model.training)
        if is_check_due and self._packed is not None:
            self._packed.compare_again()
        context = self._backend.begin_rollout(
            collected=collected,
            is_check_due=is_check_due,
            needs_old_logprobs=_recomputes_old_logprobs(self._trainer),
        )
        try:
            with self._truncation.unmasked() as is_mask_due:
                batch = self._generate_and_score(inputs)
            assert not context.needs_old_logprobs, "the trainer did not ask for old logprobs"
            if is_mask_due:
                self._truncation.mask(batch, context.rows)
            self._tool_images.check(
                self._forward,
                self._trainer.model,
                *_whole_rows(batch),
                **image_arguments(batch),
            )
            self._check(batch)
            if self._step_of_sampled is not None:
                self._forget_differences()
        finally:
            kept, context.kept_token_ids = context.kept_token_ids, None
            routes, context.routed_experts = context.routed_experts, None
            context.needs_old_logprobs, context.collected = False, None
        sampled_BT = batch.get("sampling_per_token_logps")
        if self._guard.replaces_loss and sampled_BT is not None and sampled_BT.isfinite().all():
            batch.setdefault("old_per_token_logps", sampled_BT)
        row_ids = list(itertools.islice(self._row_ids, len(context.rows)))
        batch[ROW_KEY] = torch.tensor(row_ids)
        if kept is not None:
            batch[KEPT_KEY] = kept
        if routes is not None:
            batch[ROUTES_KEY] = routes
        if self._records is not None:
            mask_BT = batch["completion_mask"] * batch.get("tool_mask", 1)
            advantages_B = _row_advantages(batch["advantages"], mask_BT)
            self._records.add(context, row_ids, advantages_B.tolist(), mask_BT.tolist())
        return batch

    def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        """Replace `compute_loss`: give the forward inside the ids and masks of its rows."""
        self._backend.pause_carried()
        self._backend.begin_loss()
        self._loss_inputs = inputs
        try:
            loss = self._compute_loss(model, inputs, *rest, **named)
        finally:
            self._loss_inputs = None
        self._backend.log_loss_tokens(self._loss_tokens)
        if self._router_replay is not None:
            self._backend.log_router_disagreement(self._router_replay.disagreement.take())
        return loss

    def logprobs(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Replace `_get_per_token_logps_and_entropies`: sampled, replayed, or the trainer's own."""
        run = partial(
            self._run,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size,
            **settings,
        )
        context = self._backend.context
        if self._loss_inputs is None:
            self._tool_images.check(
                self._forward, model, input_ids, attention_mask, logits_to_keep, **settings
            )
        if context.needs_old_logprobs and model is self._trainer.model:
            context.needs_old_logprobs = False
            return self._old_logprobs(run, attention_mask[:, -logits_to_keep:]), None, None
        recomputed = run()
        if self._loss_inputs is not None:
            self._log_differences(recomputed[0].detach(), self._loss_inputs)
        if self._records is not None and self._loss_inputs and ROW_KEY in self._loss_inputs:
            logprobs_BT, entropies_BT, _ = recomputed
            row_ids = self._loss_inputs[ROW_KEY].tolist()
            self._records.complete(row_ids, logprobs_BT.detach(), entropies_BT.detach())
        return recomputed

    def _run(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        numbers: list[int] | None = None,
        batch_size: int | None = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, Any, Any]:
        """Run the forward of all rows, or of the rows at `numbers` together."""
        context = self._backend.context
        kept, routes, counts = context.kept_token_ids, context.routed_experts, None
        if self._loss_inputs is not None:
            kept, routes = self._loss_inputs.get(KEPT_KEY), self._loss_inputs.get(ROUTES_KEY)
            counts = self._router_replay and self._router_replay.disagreement
        if numbers is not None:
            input_ids, attention_mask = input_ids[numbers], attention_mask[numbers]
            kept, routes = _at(kept, numbers), _at(routes, numbers)
            batch_size, settings = len(numbers), of_rows(settings, numbers)
        own = partial(
            self._own_forward,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size,
            kept,
            routes,
            settings,
        )
        if self._packed is not None:
            found = self._packed.logprobs(
                own,
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                kept=kept,
                routes=routes,
                counts=counts,
                advantages=self._advantages(),
                **settings,
            )
            if found is not None:
                self._loss_tokens = self._packed.tokens
                return found
        self._loss_tokens = padded_tokens(input_ids, attention_mask, logits_to_keep)
        return own(model, counts=counts)

    def _own_forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        kept: Sequence[list[Any]] | None,
        routes: Sequence[Any] | None,
        settings: dict[str, Any],
        model: torch.nn.Module,
        numbers: list[int] | None = None,
        counts: Disagreement | None = None,
    ) -> tuple[torch.Tensor, Any, Any]:
        """Run the trainer's own forward of all rows, or of the rows at `numbers` together."""
        if numbers is not None:
            input_ids, attention_mask = input_ids[numbers], attention_mask[numbers]
            kept, routes = _at(kept, numbers), _at(routes, numbers)
            settings = of_rows(settings, numbers)
        forward = partial(self._forward_of, model, logits_to_keep)
        if routes is None:
            return forward(settings, input_ids, attention_mask, batch_size, kept)
        assert self._router_replay is not None
        found = []
        for rows in torch.arange(len(input_ids)).split(batch_size or len(input_ids)):
            part = rows.tolist()
            mask_BS = attention_mask[part]
            with self._router_replay.replaying(
                model, mask_BS, logits_to_keep, [routes[number] for number in part], counts
            ):
                own = of_rows(settings, part)
                found.append(forward(own, input_ids[part], mask_BS, None, _at(kept, part)))
        logprobs, entropies, aux_losses = zip(*found, strict=True)
        return (
            torch.cat(logprobs),
            None if entropies[0] is None else torch.cat(entropies),
            None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
        )

    def _forward_of(
        self,
        model: torch.nn.Module,
        logits_to_keep: int,
        settings: dict[str, Any],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        batch_size: int | None,
        kept: Sequence[list[Any]] | None,
    ) -> tuple[torch.Tensor, Any, Any]:
        """Run the trainer's own forward, over the sampling mask where there is one."""
        if kept is None:
            return self._forward(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **settings
            )
        return replayed_logprobs(
            self._trainer,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            kept,
            batch_size,
            bool(settings.get("compute_aux_loss")),
            image_arguments(settings),
        )

    def _advantages(self) -> torch.Tensor | None:
        """Return the rows' advantages where a row without one changes no gradient, else None."""
        trainer, inputs = self._trainer, self._loss_inputs
        if inputs is None or not torch.is_grad_enabled():
            return None
        has_kl = hasattr(trainer, "loss_type") and trainer.beta != 0.0
        has_bonus = getattr(trainer, "_entropy_bonus_enabled", False)
        losses = (self._compute_loss, trainer._compute_loss)
        has_own_loss = any(loss.__module__ not in LOSS_MODULES for loss in losses)
        advantages = inputs["advantages"]
        are_of_tokens = advantages.dim() != 1
        return None if has_kl or has_bonus or has_own_loss or are_of_tokens else advantages

    def _old_logprobs(self, run: Any, mask_BT: torch.Tensor) -> torch.Tensor:
        """Return the sampled ones where the guard trusts them, else the trainer's."""
        context, guard = self._backend.context, self._guard
        version = self._backend.generator.policy_version
        self._step_of_sampled = None
        sampled_BT = context.sampled_logprobs(mask_BT)
        if guard.are_usable(sampled_BT, context.rows, version):
            guard.check(context, version, mask_BT, lambda numbers: run(numbers=numbers)[0])
            if guard.is_trusted:
                assert sampled_BT is not None
                self._step_of_sampled = self._trainer.state.global_step
                return sampled_BT
        recomputed_BT = run()[0]
        guard.check(context, version, mask_BT, lambda n: run(numbers=n)[0], recomputed_BT)
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

    def _check(self, batch: dict[str, Any]) -> None:
        """Verify by an extra forward, where the trainer needed none."""
        context = self._backend.context
        if not context.is_check_due:
            return
        run = partial(self._run, self._trainer.model, *_whole_rows(batch), **image_arguments(batch))
        with torch.no_grad():
            self._guard.check(
                context,
                self._backend.generator.policy_version,
                batch["completion_mask"],
                lambda numbers: run(numbers=numbers)[0],
            )


def _whole_rows(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a scored batch's ids and mask, (B, S), and T."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].shape[1]


def _at(values: Sequence[Any] | None, numbers: list[int]) -> list[Any] | None:
    """Return the values of some rows."""
    return None if values is None else [values[number] for number in numbers]


def _row_advantages(advantages: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return (B,): advantages of rows, or the mean over a row's tokens of (B, T)."""
    if advantages.dim() == 1:
        return advantages
    return (advantages * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


def _recomputes_old_logprobs(trainer: Any) -> bool:
    """Return True if scoring asks for the policy's log-probabilities (trl 1.16); RLOO always."""
    return not updates_once(trainer) or trainer.vllm_importance_sampling_correction
