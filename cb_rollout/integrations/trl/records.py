"""Record the first sequences of each rollout, token by token.

A sequence is written after its first loss, which has the trainer's log-probabilities and
entropies; at the latest when the next rollout of its mode begins, or training ends. Called by the
trainer's main process, on its thread.

B: rows of a batch, T: tokens of a completion.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from cb_rollout.compat.multimodal import image_token_ids, is_processor
from cb_rollout.integrations.trl.rows.loss_rows import UNKNOWN_ID, LossRow
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.run_records import Mode, RunRecorder, SequenceRecord, StepMetrics

# Of a prompt's pictures: the first ones, made small, so that a run's records stay small too.
MAX_IMAGES = 4
MAX_IMAGE_SIDE = 160


class TrainerRecords:
    """Recorder of a run, into the trainer's output directory."""

    def __init__(self, trainer: Any, num_sequences: int) -> None:
        self._trainer, self._num_sequences = trainer, num_sequences
        self._recorder = RunRecorder(Path(trainer.args.output_dir) / "cb_rollout")
        self._pending: dict[int, SequenceRecord] = {}
        self._untabled: list[SequenceRecord] = []
        self._completion_lengths: list[int] = []
        self._group_rewards: list[list[float]] = []
        self._has_trained = False

    def begin_training(self, step: int) -> None:
        """Begin a run; an evaluation before the first training belongs to that training's run."""
        if step or self._has_trained:
            self.flush()
            self._recorder.begin_run(step)
        self._has_trained = True

    def add(
        self,
        mode: Mode,
        generated: Sequence[LossRow],
        rewards: Sequence[float],
        all_rewards: Sequence[float],
        images: Mapping[str, Sequence[Any]],
        rows: Sequence[LossRow],
        batch: Mapping[str, Any],
    ) -> None:
        """Take the first rows of a scored batch that its rollout sampled; they wait for their loss.

        Args:
            mode: training or evaluation.
            generated: the rollout's rows on this process, in the order of the generation.
            rewards: one for each of them.
            all_rewards: rewards of the rows of every process, in the order of the processes; a
                group may be divided over several.
            images: pictures of prompts, by the request's id.
            rows: the rows that are trained on; a trainer class may have chosen other rows.
            batch: the trainer's tensors of `rows`.
        """
        self.flush(mode)
        if mode == "train":
            self._completion_lengths += [sum(row.is_sampled) for row in generated]
            size = self._trainer.num_generations
            starts = range(0, len(all_rewards), size)
            self._group_rewards += [list(all_rewards[start : start + size]) for start in starts]
        # The trainer counts a step once it is done, and logs its metrics under that number.
        step = self._trainer.state.global_step + (mode == "train")
        tokenizer = self._trainer.processing_class
        mask_BT = batch["completion_mask"] * batch.get("tool_mask", 1)
        advantages = _row_advantages(batch["advantages"], mask_BT).tolist()
        scored = zip(generated, rewards, strict=True)
        rewards_by_id = {row.id: reward for row, reward in scored}
        rewards_by_id.pop(UNKNOWN_ID, None)
        for number in _numbers_of(rows, rewards_by_id)[: self._num_sequences]:
            row = rows[number]
            pictures = images.get(row.name, ())[:MAX_IMAGES]
            self._pending[row.id] = SequenceRecord(
                step=step,
                mode=mode,
                request_id=row.name,
                prompt=tokenizer.decode(_without_repeats(row.prompt_ids, tokenizer)),
                tokens=[tokenizer.decode([token]) for token in row.completion_ids],
                token_ids=row.completion_ids,
                logprobs=row.logprobs or [],
                policy_versions=_policy_versions(row),
                reward=rewards_by_id[row.id],
                finish_reason=row.finish_reason,
                advantage=advantages[number],
                mask=mask_BT[number, : len(row.completion_ids)].tolist(),
                images=[
                    self._recorder.record_image(_thumbnail(picture))
                    for picture in pictures
                    if hasattr(picture, "thumbnail")
                ],
            )

    def complete(
        self, rows: Sequence[LossRow], logprobs_BT: torch.Tensor, entropies_BT: torch.Tensor
    ) -> None:
        for row, logprobs_T, entropies_T in zip(rows, logprobs_BT, entropies_BT, strict=True):
            if record := self._pending.pop(row.id, None):
                T = len(record.token_ids)
                logprobs, entropies = logprobs_T[:T].tolist(), entropies_T[:T].tolist()
                self._write(replace(record, trainer_logprobs=logprobs, entropies=entropies))

    def flush(self, mode: Mode | None = None) -> None:
        for record_id, record in list(self._pending.items()):
            if mode in (None, record.mode):
                self._write(self._pending.pop(record_id))

    def _write(self, record: SequenceRecord) -> None:
        self._recorder.record_sequence(record)
        self._untabled.append(record)

    def write_log(self, step: int, logs: dict[str, Any], durations: Durations) -> None:
        """Record the trainer's log, and send the token table if the trainer reports to wandb."""
        spans, sequences = durations.take_timeline()
        is_eval = any(name.startswith("eval_") for name in logs)
        self._recorder.record_metrics(
            StepMetrics(
                step=step,
                mode="eval" if is_eval else "train",
                scalars={k: float(v) for k, v in logs.items() if isinstance(v, int | float)},
                completion_lengths=[] if is_eval else self._completion_lengths,
                group_rewards=[] if is_eval else self._group_rewards,
                spans=spans,
                sequences=sequences,
            )
        )
        if not is_eval:
            self._completion_lengths, self._group_rewards = [], []
        if "wandb" in self._trainer.args.report_to:
            from cb_rollout.integrations.wandb import log_token_table

            log_token_table(self._untabled, step)
        self._untabled = []


def _numbers_of(rows: Sequence[LossRow], rewards_by_id: Mapping[int, float]) -> list[int]:
    """Return the place of each rewarded row in a batch, which may have the row twice."""
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
    versions: list[int] = []
    latest = next((version for version in row.versions if version is not None), None)
    for version in row.versions:
        latest = latest if version is None else version
        if latest is not None:
            versions.append(latest)
    return [(version, len(list(run))) for version, run in groupby(versions)]


def _thumbnail(picture: Any) -> bytes:
    small, file = picture.convert("RGB"), io.BytesIO()
    small.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
    small.save(file, "PNG")
    return file.getvalue()


def _without_repeats(prompt_ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Return a prompt with a single placeholder for each image."""
    placeholders = image_token_ids(tokenizer) if is_processor(tokenizer) else frozenset()
    runs = groupby(prompt_ids)
    return [t for token, run in runs for t in ([token] if token in placeholders else run)]
