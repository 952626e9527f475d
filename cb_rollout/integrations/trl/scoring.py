"""Between a trainer's rollout and its loss: which log-probabilities it learns from.

Stands in for four of the trainer's methods and calls the originals. Called by the trainer, on its
thread. Knows the trainer by its attributes only.

B: rows of a batch, T: tokens of a completion.
"""

import math
from functools import partial
from typing import Any

import torch

from cb_rollout.integrations.trl.backend import TrainerHooks, TrainerRollouts
from cb_rollout.integrations.trl.guard import LogprobGuard
from cb_rollout.integrations.trl.records import TrainerRecords
from cb_rollout.integrations.trl.replay import kept_tokens_of, replayed_logprobs
from cb_rollout.integrations.trl.rows import Row, require_sampled_here, rows_from
from cb_rollout.integrations.trl.truncation import TrainerTruncation

ROW_KEY, KEPT_KEY = "rollout_row", "kept_token_ids"
# What travels with a batch into the loss, beside what the trainer puts there.


class TrainerScoring:
    """The scoring of one trainer's rollouts."""

    def __init__(
        self,
        trainer: Any,
        rollouts: TrainerRollouts,
        guard: LogprobGuard,
        records: TrainerRecords | None,
        truncation: TrainerTruncation,
        *,
        replays: bool,
    ) -> None:
        """Join the parts.

        Args:
            trainer: the one that runs.
            rollouts: where its completions come from.
            guard: says whether sampled log-probabilities may be used as the old ones.
            records: None: this process keeps none.
            truncation: says which completions were cut off.
            replays: whether log-probabilities are over the kept tokens alone.
        """
        self._trainer, self._rollouts = trainer, rollouts
        self._guard, self._records, self._replays = guard, records, replays
        self._truncation = truncation
        self._generate = trainer._generate
        self._score = trainer._generate_and_score_completions
        self._calculate_rewards = trainer._calculate_rewards
        self._forward = trainer._get_per_token_logps_and_entropies
        self._compute_loss = trainer.compute_loss
        self._rows: list[Row] = []
        self._rewards: list[float] = []
        self._is_old_due = False
        self._kept: list[list[Any]] | None = None
        self._loss_ids: list[int] | None = None
        self._num_rows = 0

    def hook(self, hooks: TrainerHooks) -> None:
        """Stand in for the trainer's methods."""
        hooks.put("_generate", self.generate)
        hooks.put("_generate_and_score_completions", self.score)
        hooks.put("_calculate_rewards", self.calculate_rewards)
        hooks.put("_get_per_token_logps_and_entropies", self.logprobs)
        hooks.put("compute_loss", self.compute_loss)

    def generate(self, prompts: list[Any]) -> Any:
        """For `_generate`: remembers what was sampled, and what it was put together from."""
        self._rollouts.begin_rollout()
        try:
            generated = self._generate(prompts)
        finally:
            self._rollouts.end_rollout()
        self._rows = rows_from(generated, self._rollouts.outputs)
        self._truncation.count(self._rows)
        if self._replays:
            require_sampled_here(self._rows)
            self._kept = [kept_tokens_of(row) for row in self._rows]
        return generated

    def calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        """For `_calculate_rewards`: remembers them for the records."""
        rewards = self._calculate_rewards(*arguments)
        weights = self._trainer.reward_weights.to(rewards.device)
        self._rewards = (rewards * weights).nansum(1).tolist()
        return rewards

    def score(self, inputs: list[Any]) -> dict[str, Any]:
        """For `_generate_and_score_completions`: the batch, with what the loss needs of it."""
        trainer = self._trainer
        is_training = trainer.model.training
        self._guard.begin_rollout(is_training)
        self._is_old_due = _recomputes_old_logprobs(trainer)
        try:
            with self._truncation.unmasked() as is_mask_due:
                batch = self._score(inputs)
            assert not self._is_old_due, "the trainer did not ask for old log-probabilities"
            if is_mask_due:
                self._truncation.mask(batch, self._rows)
            self._check(batch)
        finally:
            kept, self._kept, self._is_old_due = self._kept, None, False
        sampled_BT = batch.get("sampling_per_token_logps")
        if self._guard.is_trusted and sampled_BT is not None and sampled_BT.isfinite().all():
            batch.setdefault("old_per_token_logps", sampled_BT)
        num_rows = len(self._rows)
        batch[ROW_KEY] = torch.arange(self._num_rows, self._num_rows + num_rows)
        if kept is not None:
            batch[KEPT_KEY] = kept
        if self._records is not None:
            mask_BT = batch["completion_mask"] * batch.get("tool_mask", 1)
            self._records.add(
                self._num_rows,
                "train" if is_training else "eval",
                self._rows,
                self._rewards,
                batch["advantages"].tolist(),
                mask_BT.tolist(),
            )
        self._num_rows += num_rows
        return batch

    def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        """For `compute_loss`: lets the forward inside know which rows it is of."""
        self._rollouts.hold_carried()
        self._kept = inputs.get(KEPT_KEY)
        self._loss_ids = inputs[ROW_KEY].tolist() if ROW_KEY in inputs else None
        try:
            return self._compute_loss(model, inputs, *rest, **named)
        finally:
            self._kept = self._loss_ids = None

    def logprobs(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """For `_get_per_token_logps_and_entropies`: sampled, replayed, or the trainer's own."""
        run = partial(
            self._run,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size,
            **settings,
        )
        if self._is_old_due and model is self._trainer.model:
            self._is_old_due = False
            return self._old_logprobs(run, attention_mask[:, -logits_to_keep:]), None, None
        recomputed = run()
        if self._loss_ids is not None and self._records is not None:
            logprobs_BT, entropies_BT, _ = recomputed
            self._records.complete(self._loss_ids, logprobs_BT.detach(), entropies_BT.detach())
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
        """The forward itself: of all rows, or of the rows of these numbers together."""
        kept = self._kept
        if numbers is not None:
            input_ids, attention_mask = input_ids[numbers], attention_mask[numbers]
            kept = None if kept is None else [kept[number] for number in numbers]
            batch_size = len(numbers)
        if kept is None:
            return self._forward(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **settings
            )
        with_aux_loss = bool(settings.get("compute_aux_loss"))
        return replayed_logprobs(
            self._trainer,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            kept,
            batch_size,
            with_aux_loss,
        )

    def _old_logprobs(self, run: Any, mask_BT: torch.Tensor) -> torch.Tensor:
        """The sampled ones where they may be used, else the trainer's."""
        version = self._rollouts.generator.policy_version
        if self._guard.is_trusted and (sampled_BT := self._sampled(mask_BT)) is not None:
            self._guard.check(self._rows, version, mask_BT, lambda numbers: run(numbers=numbers)[0])
            if self._guard.is_trusted:
                return sampled_BT
        recomputed_BT = run()[0]
        self._guard.check(self._rows, version, mask_BT, lambda numbers: recomputed_BT[numbers])
        return recomputed_BT

    def _sampled(self, mask_BT: torch.Tensor) -> torch.Tensor | None:
        """What was sampled, 0 in the padding; None where some is missing or not a number."""
        sampled_BT = torch.zeros(mask_BT.shape, dtype=torch.float32)
        for number, row in enumerate(self._rows):
            if row.logprobs is None or not all(map(math.isfinite, row.logprobs)):
                return None
            sampled_BT[number, : len(row.logprobs)] = torch.tensor(row.logprobs)
        return sampled_BT.to(mask_BT.device)

    def _check(self, batch: dict[str, Any]) -> None:
        """Verify by a forward of its own, where the trainer had no use for one."""
        if not self._guard.is_due:
            return
        run = partial(
            self._run,
            self._trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
        )
        with torch.no_grad():
            self._guard.check(
                self._rows,
                self._rollouts.generator.policy_version,
                batch["completion_mask"],
                lambda numbers: run(numbers=numbers)[0],
            )


def _recomputes_old_logprobs(trainer: Any) -> bool:
    """Whether scoring asks for the policy's log-probabilities (trl 1.16), always so in RLOO."""
    if not hasattr(trainer, "vllm_importance_sampling_correction"):
        return True
    steps_per_rollout = trainer.args.steps_per_generation * trainer.num_iterations
    is_misaligned = trainer.args.gradient_accumulation_steps % steps_per_rollout != 0
    return is_misaligned or trainer.vllm_importance_sampling_correction
