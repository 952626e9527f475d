"""The first sequences of each rollout, token by token, on their way to the run's records.

A sequence is written once the loss has seen it, since the trainer's log-probabilities and entropies
come from there; at the latest when the next rollout of its kind begins, or training ends. Called by
the trainer's main process, on its thread.

B: rows of a batch, T: tokens of a completion.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from cb_rollout.integrations.trl.rows import Row
from cb_rollout.metrics.run_records import Mode, RunRecorder, SequenceRecord, StepMetrics


class TrainerRecords:
    """Owns the recorder of one run."""

    def __init__(self, trainer: Any, num_sequences: int) -> None:
        """Record into the trainer's output directory.

        Args:
            trainer: the one that runs.
            num_sequences: how many of each rollout.
        """
        self._trainer, self._num_sequences = trainer, num_sequences
        self._recorder = RunRecorder(Path(trainer.args.output_dir) / "cb_rollout")
        self._pending: dict[int, SequenceRecord] = {}
        self._untabled: list[SequenceRecord] = []
        self._completion_lengths: list[int] = []

    def add(
        self,
        first_id: int,
        mode: Mode,
        rows: Sequence[Row],
        rewards: Sequence[float],
        advantages: Sequence[float],
        masks: Sequence[Sequence[int]],
    ) -> None:
        """Take the first rows of a rollout; row `n` is known to the loss as `first_id + n`."""
        self.flush(mode)
        if mode == "train":
            self._completion_lengths += [sum(row.is_sampled) for row in rows]
        tokenizer = self._trainer.processing_class
        for number, row in enumerate(rows[: self._num_sequences]):
            last = row.turns[-1].output if row.turns else None
            self._pending[first_id + number] = SequenceRecord(
                step=self._trainer.state.global_step,
                mode=mode,
                request_id=row.name,
                prompt=tokenizer.decode(row.prompt_ids),
                tokens=[tokenizer.decode([token]) for token in row.completion_ids],
                token_ids=row.completion_ids,
                logprobs=row.logprobs or [],
                policy_versions=_policy_versions(row),
                reward=rewards[number],
                finish_reason=None if last is None else last.finish_reason,
                advantage=advantages[number],
                mask=list(masks[number][: len(row.completion_ids)]),
            )

    def complete(
        self, ids: Sequence[int], logprobs_BT: torch.Tensor, entropies_BT: torch.Tensor
    ) -> None:
        """The loss has seen these rows; write those that wait for it."""
        for number, record_id in enumerate(ids):
            record = self._pending.pop(record_id, None)
            if record is not None:
                num_tokens = len(record.token_ids)
                self._write(
                    replace(
                        record,
                        trainer_logprobs=logprobs_BT[number, :num_tokens].tolist(),
                        entropies=entropies_BT[number, :num_tokens].tolist(),
                    )
                )

    def flush(self, mode: Mode | None = None) -> None:
        """Write what no loss will see any more: of one mode, or of both."""
        for record_id, record in list(self._pending.items()):
            if mode in (None, record.mode):
                self._write(self._pending.pop(record_id))

    def _write(self, record: SequenceRecord) -> None:
        self._recorder.record_sequence(record)
        self._untabled.append(record)

    def write_log(self, step: int, logs: dict[str, Any]) -> None:
        """Keep what the trainer logged, and send the token table where wandb is on."""
        is_eval = any(name.startswith("eval_") for name in logs)
        self._recorder.record_metrics(
            StepMetrics(
                step=step,
                mode="eval" if is_eval else "train",
                scalars={k: float(v) for k, v in logs.items() if isinstance(v, int | float)},
                completion_lengths=[] if is_eval else self._completion_lengths,
            )
        )
        if not is_eval:
            self._completion_lengths = []
        if "wandb" in self._trainer.args.report_to:
            from cb_rollout.integrations.wandb import log_token_table

            log_token_table(self._untabled, step)
        self._untabled = []


def _policy_versions(row: Row) -> list[tuple[int, int]]:
    """Runs of versions; a tool's tokens count as of the version that asked for them."""
    versions: list[int] = []
    latest = next((version for version in row.token_versions if version is not None), None)
    for version in row.token_versions:
        latest = latest if version is None else version
        if latest is not None:
            versions.append(latest)
    return [(version, len(list(run))) for version, run in groupby(versions)]
