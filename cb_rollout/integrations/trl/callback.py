"""What a trainer tells of its steps and its log.

Called by the trainer, on its thread.
"""

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cb_rollout.integrations.trl.backend import TrainerRollouts
from cb_rollout.integrations.trl.records import TrainerRecords


class RolloutCallback(TrainerCallback):
    """Tells the parts of an attachment when steps end and what was logged."""

    def __init__(self, rollouts: TrainerRollouts, records: TrainerRecords | None) -> None:
        """Time from now on."""
        self._rollouts, self._records = rollouts, records
        self._step_started = time.perf_counter()

    def finish(self) -> None:
        """No loss will come any more for what was sampled."""
        if self._records is not None:
            self._records.flush()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Training starts, its step count with it."""
        self._rollouts.forget_synced_step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Training is done; the best weights may have been loaded at an unchanged step count."""
        self._rollouts.forget_synced_step()
        self._rollouts.end_carried()
        self.finish()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """An optimizer step starts, with the rollout it needs."""
        self._step_started = time.perf_counter()
        self._rollouts.hold_carried()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """An optimizer step is done."""
        self._rollouts.end_step(time.perf_counter() - self._step_started)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """The trainer logged."""
        if self._records is not None:
            self._records.write_log(state.global_step, logs or {})
