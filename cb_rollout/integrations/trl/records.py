"""Record the first sequences of each rollout, token by token.

A sequence is written after its first loss, which has the trainer's log-probabilities and
entropies; at the latest when the next rollout of its mode begins, or training ends. wandb gets the
distributions of all tokens of training, whichever sequences are recorded. Called by the trainer's
main process, on its thread.

B: rows of a batch, T: tokens of a completion.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cb_rollout.compat.transformers import add_to_notebook_table
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.integrations.trl.parts import RolloutContext, TrainerPart, reward_or_none
from cb_rollout.integrations.trl.rows.loss_rows import UNKNOWN_ID, LossRow
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.run_records import RUN_DIR_NAME, Mode, SequenceRecord
from cb_rollout.metrics.run_settings import changed_settings
from cb_rollout.rollout.recording.distributions import TokenDistributions
from cb_rollout.rollout.recording.recorder import RolloutRecorder, show_in_wandb
from cb_rollout.rollout.recording.run_settings import engine_sections

# Columns of the table in a notebook, besides the loss.
NOTEBOOK = {
    "reward": "Reward",
    "completions/mean_length": "Completion Length",
    "kl": "KL",
    "entropy": "Entropy",
    "step_time": "Seconds",
}


class TrainerRecords(TrainerPart):
    """Recorder of a run, into the trainer's output directory."""

    def __init__(
        self,
        trainer: Any,
        num_sequences: int,
        durations: Durations,
        config: RolloutConfig | None = None,
    ) -> None:
        """Record the first `num_sequences` sequences of each rollout, and the run's `durations`.

        `config`: settings of the rollout, for the run's description; None: it has none.
        """
        self._trainer = trainer
        self._config = config
        self._measured = StepMeans()
        self._step: int | None = None
        """Step that has ended, and whose metrics are not written yet."""
        self._step_means: dict[str, float] = {}
        self._learning_rate: dict[str, float] = {}
        """Learning rate of the step in progress, by its logged name; empty: no schedule."""
        self._num_sequences = num_sequences
        self._durations = durations
        run_dir = Path(trainer.args.output_dir) / RUN_DIR_NAME
        describe_run = None if config is None else self._describe_run
        self._recorder = RolloutRecorder(run_dir, describe_run)
        self._pending: dict[int, SequenceRecord] = {}
        self._untabled: list[SequenceRecord] = []
        self._completion_lengths: list[int] = []
        self._group_rewards: list[list[float]] = []
        self._distributions = TokenDistributions()
        self._uncompared: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """By row id: the sampled log-probabilities of the row's tokens, and which of them count."""
        self._has_trained = False

    @property
    def _reports_to_wandb(self) -> bool:
        return "wandb" in self._trainer.args.report_to

    def _describe_run(self) -> dict[str, dict[str, Any]]:
        """Return the trainer's settings that are not at their defaults, and the engine's."""
        trainer = self._trainer
        assert self._config is not None
        settings: dict[str, Any] = {"class": type(trainer).__name__}
        settings |= changed_settings(trainer.args)
        settings["reward functions"] = getattr(trainer, "reward_func_names", [])
        # From it, the report says which curves have few points.
        settings["logging_steps"] = trainer.args.logging_steps
        return {"Trainer": settings} | engine_sections(trainer.model, self._config)

    def begin_training(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Begin a run; an evaluation before the first training belongs to that training's run."""
        self._write_step()
        if step or self._has_trained:
            self.flush()
            self._recorder.begin_run(step)
        self._has_trained = True

    def scored(
        self, context: RolloutContext, rows: Sequence[LossRow], batch: Mapping[str, Any]
    ) -> None:
        """Take the first rows of a batch that its rollout sampled; they wait for their loss."""
        mode = context.mode
        self.flush(mode)
        if mode == "train":
            self._completion_lengths += [sum(row.is_sampled) for row in context.rows]
            # A group may be divided over several processes.
            all_rewards = context.all_rewards
            size = self._trainer.num_generations
            for start in range(0, len(all_rewards), size):
                self._group_rewards.append(list(all_rewards[start : start + size]))
        # The trainer counts a step once it is done, and logs its metrics under that number.
        step = self._trainer.state.global_step
        if mode == "train":
            step += 1
        mask_BT = batch["completion_mask"] * batch.get("tool_mask", 1)
        advantages = _row_advantages(batch["advantages"], mask_BT).tolist()
        rewards_by_id: dict[int, float] = {}
        for row, reward in zip(context.rows, context.rewards, strict=True):
            if row.id != UNKNOWN_ID:
                rewards_by_id[row.id] = reward
        for number in _numbers_of(rows, rewards_by_id)[: self._num_sequences]:
            row = rows[number]
            self._pending[row.id] = self._recorder.sequence(
                self._trainer.processing_class,
                row.prompt_ids,
                row.completion_ids,
                context.images.get(row.name, ()),
                step=step,
                mode=mode,
                request_id=row.name,
                logprobs=row.logprobs or [],
                policy_versions=_policy_versions(row),
                reward=reward_or_none(rewards_by_id[row.id]),
                finish_reason=row.finish_reason,
                advantage=advantages[number],
                mask=mask_BT[number, : len(row.completion_ids)].tolist(),
            )
        if mode == "train" and self._reports_to_wandb:
            self._add_distributions(rows, mask_BT)

    def _add_distributions(self, rows: Sequence[LossRow], mask_BT: torch.Tensor) -> None:
        """Take the sampled log-probabilities of the rows; they wait for those of their loss."""
        self._uncompared.clear()
        counts_BT = mask_BT.bool().cpu().numpy()
        for row, counts_T in zip(rows, counts_BT, strict=True):
            if row.logprobs is None or row.id in self._uncompared:
                continue
            logprobs_T = np.asarray(row.logprobs)
            counts_T = counts_T[: len(logprobs_T)] & np.asarray(row.is_sampled, dtype=bool)
            self._distributions.add_sampled(logprobs_T[counts_T])
            self._uncompared[row.id] = (logprobs_T, counts_T)

    def computed(
        self, rows: Sequence[LossRow], logprobs_BT: torch.Tensor, entropies_BT: torch.Tensor
    ) -> None:
        for row, logprobs_T, entropies_T in zip(rows, logprobs_BT, entropies_BT, strict=True):
            record = self._pending.pop(row.id, None)
            if record is not None:
                num_tokens = len(record.token_ids)
                with_loss = replace(
                    record,
                    trainer_logprobs=logprobs_T[:num_tokens].tolist(),
                    entropies=entropies_T[:num_tokens].tolist(),
                )
                self._write(with_loss)
            uncompared = self._uncompared.pop(row.id, None)
            if uncompared is not None:
                sampled_T, counts_T = uncompared
                trained_T = logprobs_T[: len(sampled_T)].float().cpu().numpy()
                self._distributions.add_compared(sampled_T[counts_T], trained_T[counts_T])

    def flush(self, mode: Mode | None = None) -> None:
        for record_id, record in list(self._pending.items()):
            if mode in (None, record.mode):
                self._write(self._pending.pop(record_id))

    def _write(self, record: SequenceRecord) -> None:
        self._recorder.write_sequence(record)
        self._untabled.append(record)

    def begin_step(self, step: int) -> None:
        self._write_step()
        self._learning_rate = {}
        schedule = self._trainer.lr_scheduler
        if schedule is not None:
            # Read now, because the schedule moves on before the step has ended.
            self._learning_rate["learning_rate"] = float(schedule.get_last_lr()[0])

    def end_step(self, step: int) -> None:
        """Keep the step's metrics; they are written with its log, or when the next step begins."""
        self._step = step
        self._step_means = self._measured.take(self._trainer._metrics["train"])
        self._step_means |= self._learning_rate

    def end_training(self) -> None:
        self._write_step()
        self.flush()

    def interrupted(self) -> None:
        self.end_training()

    def close(self) -> None:
        self._write_step()
        self.flush()

    def _write_step(self) -> None:
        """Write the metrics of a step that the trainer did not log."""
        if self._step is not None:
            self._write_metrics(self._step, "train", self._step_means)

    def _write_metrics(self, step: int, mode: Mode, scalars: Mapping[str, float]) -> None:
        is_eval = mode == "eval"
        self._recorder.write_step(
            step,
            mode,
            scalars,
            [] if is_eval else self._completion_lengths,
            [] if is_eval else self._group_rewards,
            self._durations,
        )
        if not is_eval:
            self._completion_lengths = []
            self._group_rewards = []
            self._step = None
            self._step_means = {}

    def log(self, step: int, logs: Mapping[str, Any]) -> None:
        """Record a trainer's log; if it reports to wandb, send tokens and distributions there."""
        is_eval = any(name.startswith("eval_") for name in logs)
        numbers = _numbers_in(logs)
        if is_eval:
            self._write_step()
        elif self._step is not None:
            # The trainer logs means over `logging_steps`; the step's own are known.
            for name in self._trainer._metrics["train"]:
                numbers.pop(name, None)
            numbers |= self._step_means
            self._measured.forget()
        self._write_metrics(step, "eval" if is_eval else "train", numbers)
        if "loss" in logs:
            columns = {title: numbers[name] for name, title in NOTEBOOK.items() if name in numbers}
            add_to_notebook_table(self._trainer, step, columns)
        histograms = {} if is_eval else self._distributions.histograms()
        if self._reports_to_wandb:
            show_in_wandb(self._untabled, histograms, step)
        self._untabled = []
        if not is_eval:
            self._distributions = TokenDistributions()


def _numbers_in(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a trainer's log, by name."""
    numbers = {}
    for name, value in logs.items():
        if isinstance(value, int | float):
            numbers[name] = float(value)
    return numbers


class StepMeans:
    """Measurements of each step, in lists that grow until their means are logged."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[list[float], int]] = {}
        """By name: the list at the end of the last step, and how many values it had."""

    def take(self, measured: Mapping[str, list[float]]) -> dict[str, float]:
        """Return the mean of each list's new values that are numbers."""
        means: dict[str, float] = {}
        for name, values in measured.items():
            seen, num_seen = self._seen.get(name, (values, 0))
            # TRL replaces the list of a running total.
            new = values[num_seen:] if seen is values else values
            self._seen[name] = (values, len(values))
            numbers = [float(value) for value in new if not math.isnan(value)]
            if numbers:
                means[name] = math.fsum(numbers) / len(numbers)
        return means

    def forget(self) -> None:
        """Begin anew: the lists were logged, and are emptied."""
        self._seen.clear()


def _numbers_of(rows: Sequence[LossRow], rewards_by_id: Mapping[int, float]) -> list[int]:
    """Return the index of each rewarded row in a batch, which may contain a row twice."""
    numbers: dict[int, int] = {}
    for number, row in enumerate(rows):
        if row.id in rewards_by_id:
            numbers.setdefault(row.id, number)
    return list(numbers.values())


def _row_advantages(advantages: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return (B,): advantages of rows, or the mean over a row's tokens of (B, T)."""
    if advantages.dim() == 1:
        return advantages
    return (advantages * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


def _policy_versions(row: LossRow) -> list[tuple[int, int]]:
    """Return runs of versions; a tool's tokens have the version of the call."""
    known = [version for version in row.versions if version is not None]
    if not known:
        return []
    latest = known[0]
    versions: list[int] = []
    for version in row.versions:
        if version is not None:
            latest = version
        versions.append(latest)
    return [(version, len(list(run))) for version, run in groupby(versions)]
