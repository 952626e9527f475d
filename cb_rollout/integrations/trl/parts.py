"""Define the parts of an attached trainer, and the events that they receive.

`GenerationBackend` follows the trainer and passes each event to all parts, in the order of its
list. A part never calls another part. Called by the trainer, on its thread.

B: rows of a batch, T: tokens of the longest completion.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain
from typing import Any

import torch

from cb_rollout.engine.service.thread_share import ThreadShare
from cb_rollout.integrations.trl.rows.loss_rows import LossRow
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.observer import UNOBSERVED, observer
from cb_rollout.metrics.registry import combined_metrics
from cb_rollout.metrics.run_records import Mode
from cb_rollout.rollout.saved import RolloutSaver
from cb_rollout.types import GenerationOutput

Log = Callable[[Mapping[str, float], Mode], None]
"""Adds metrics to the trainer's log of training, or of evaluation."""

Collected = tuple[list[GenerationOutput], dict[str, float]]
"""Groups that a strategy sampled before the trainer asked for them, and their metrics."""


@dataclass
class RolloutContext:
    """State of a rollout, on this process unless a field says otherwise.

    A part usually reads `mode`, `step`, `outputs`, and, once the trainer has scored the rollout,
    `rows` with the `rewards` of each.
    """

    mode: Mode
    collected: Collected | None = None
    """Completions for the next prompts that the trainer asks for; None: sample them."""
    images: dict[str, list[Any]] = field(default_factory=dict)
    """Pictures of the prompts that have any, by the request's id."""
    calls: list[list[GenerationOutput]] = field(default_factory=list)
    """Outputs of each call of the sampler: one, or one for each turn of a conversation."""
    turn_metrics: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each call."""
    has_new_settings: bool = False
    """True: the trainer's generation config changed since the previous rollout."""
    step: int = 0
    """The first optimizer step that trains on the rollout; in evaluation, the steps done so far."""
    rows: list[LossRow] = field(default_factory=list)
    """Rows of the trainer's batch on this process, in the order of their generation."""
    rewards: list[float] = field(default_factory=list)
    """One for each row, weighted and summed over the reward functions; NaN: no function scored the
    row; empty: the rollout is not scored."""
    all_rewards: list[float] = field(default_factory=list)
    """Rewards of the rows of all processes, in the order of the processes."""

    @property
    def outputs(self) -> list[GenerationOutput]:
        """Everything sampled, tool turns included, in the order of the trainer's prompts."""
        return list(chain(*self.calls))

    def metrics(self) -> dict[str, float]:
        return combined_metrics(self.turn_metrics)


def reward_or_none(reward: float) -> float | None:
    """Return a reward of a `RolloutContext` as records hold it; None: the row has none."""
    return None if math.isnan(reward) else reward


class TrainerPart:
    """A part of an attached trainer: records, saved rollouts, timing, a strategy, or your own.

    A part derives from this class, overrides the events that it handles, and is added to a trainer
    by `add_part`. An exception ends the training. During training, events arrive in this order:

        begin_training
            begin_step
                begin_rollout, end_rollout, scored      once per generation
                begin_loss, computed, end_loss          once per micro-batch
            end_step
            checkpoint_state
            log                                         every `logging_steps`
            checkpoint_state, process_state             where a checkpoint is written
        end_training

    Steps that train again on a generation (`steps_per_generation`, `num_iterations`) have no
    rollout and no `scored`, also after a resume. An evaluation adds rollouts between steps, or
    outside of training. Distillation trainers send no `scored` and no loss events. If Ctrl-C ends
    the training, `interrupted` replaces the remaining events. `close` comes last, when the trainer
    is detached.
    """

    def begin_training(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Begin training, or resume it.

        Args:
            step: optimizer steps done; 0: none.
            state: the `checkpoint_state` and `process_state` of all parts at that step, in one
                mapping, without the `process_state` if this process has no readable file of it, and
                without the names of a part that the run did not have then; None: the training
                begins, or its checkpoint was made without cb_rollout.
        """

    def begin_step(self, step: int) -> None:
        """Begin optimizer step `step`, counted from 1."""

    def begin_rollout(self, context: RolloutContext) -> None:
        """Begin a rollout, before it samples. `context` is filled as it goes on."""

    def end_rollout(self, context: RolloutContext, metrics: Mapping[str, float]) -> None:
        """End sampling: outputs are complete, rewards are not. `metrics`: the logged metrics."""

    def scored(
        self, context: RolloutContext, rows: Sequence[LossRow], batch: Mapping[str, Any]
    ) -> None:
        """Receive a batch with its rewards and advantages.

        Args:
            context: the rollout, with rewards.
            rows: the rows to train on, (B,); a trainer class may have chosen others than those of
                the rollout.
            batch: the trainer's tensors of `rows`, such as "completion_mask", (B, T).
        """

    def begin_loss(self) -> None:
        """Begin the forward of a loss."""

    def computed(
        self, rows: Sequence[LossRow], logprobs_BT: torch.Tensor, entropies_BT: torch.Tensor
    ) -> None:
        """Receive log-probabilities and entropies of a loss, in nats; 0 in the padding."""

    def end_loss(self) -> None:
        """End a micro-batch, after its backward pass."""

    def end_step(self, step: int) -> None:
        """End the optimizer step of this number, before its metrics are logged."""

    def checkpoint_state(self) -> dict[str, Any]:
        """Return this part's state for a checkpoint, as JSON values; it is copied.

        It is the state of the whole run: one process writes it. Names that another part uses are
        refused, so begin each name with your part's.
        """
        return {}

    def process_state(self) -> dict[str, Any]:
        """Return this part's state on this process for a checkpoint, for `torch.save`.

        Return plain data and tensors. Choose names as for `checkpoint_state`.
        """
        return {}

    def log(self, step: int, logs: Mapping[str, Any]) -> None:
        """Receive the trainer's logged values by name; an evaluation's begin with "eval_"."""

    def end_training(self) -> None:
        """End a training; another one may follow."""

    def interrupted(self) -> None:
        """Write unsaved data: the training was interrupted, and `end_training` will not come."""

    def close(self) -> None:
        """Release everything: the trainer is detached."""


class FewerThreads(TrainerPart):
    """Trains on a CPU with fewer of torch's threads while other processes use the cores.

    It decides after a rollout and around each loss. During a rollout, the engine decides.
    """

    def __init__(self) -> None:
        self._share = ThreadShare()

    def begin_rollout(self, context: RolloutContext) -> None:
        """Read the clocks, and leave the decision to the engine."""
        self._share.adjust()
        self._share.restore()

    def end_rollout(self, context: RolloutContext, metrics: Mapping[str, float]) -> None:
        self._share.adjust()

    def begin_loss(self) -> None:
        self._share.adjust()

    def end_loss(self) -> None:
        self._share.adjust()

    def restored_after(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Return a trainer's `train` that gives the threads back, however it ends."""

        @wraps(train)
        def train_and_restore(*arguments: Any, **named: Any) -> Any:
            try:
                return train(*arguments, **named)
            finally:
                self._share.restore()

        return train_and_restore


class StepTimer(TrainerPart):
    """Times each step, its rollouts and its losses, for metrics, traces and the timeline."""

    def __init__(self, log: Log, durations: Durations) -> None:
        self.span = UNOBSERVED
        """The step in progress, as the observer sees it; outside of a step: none."""
        self._log = log
        self._durations = durations
        self._step_began = time.perf_counter()
        self._rollout_seconds = 0.0
        self._loss_began: float | None = None
        self._loss_seconds = 0.0

    def begin_step(self, step: int) -> None:
        self._step_began = time.perf_counter()
        # End the span of a step that failed, if there is one.
        self._end_span()
        self.span = observer().begin("step", step=step)

    def end_rollout(self, context: RolloutContext, metrics: Mapping[str, float]) -> None:
        if context.mode == "train":
            self._rollout_seconds += metrics.get("rollout/seconds", 0.0)

    def begin_loss(self) -> None:
        self._loss_began = time.perf_counter()

    def end_loss(self) -> None:
        if self._loss_began is None:
            return
        seconds = self._durations.add_span("loss", self._loss_began)
        self.span.add("loss", self._loss_began, self._loss_began + seconds)
        self._loss_seconds += seconds
        self._loss_began = None

    def end_step(self, step: int) -> None:
        """Log the share of the step that rollouts took, and the seconds of its losses."""
        seconds = self._durations.add_span("step", self._step_began, step)
        metrics = {"rollout/step_share": min(1.0, self._rollout_seconds / seconds)}
        if self._loss_seconds:
            metrics["rollout/loss_seconds"] = self._loss_seconds
        self._log(metrics, "train")
        self._end_span()
        self._rollout_seconds = 0.0
        self._loss_seconds = 0.0

    def end_training(self) -> None:
        self._end_span()

    def close(self) -> None:
        self._end_span()

    def _end_span(self) -> None:
        self.span.end()
        self.span = UNOBSERVED


class SavingPart(TrainerPart):
    """Saves each rollout for `SavedRollouts`, once the trainer has scored it."""

    def __init__(self, saver: RolloutSaver) -> None:
        self._saver = saver
        self._last: RolloutContext | None = None

    def begin_training(self, step: int, state: Mapping[str, Any] | None) -> None:
        self._saver.begin_training(step)

    def begin_rollout(self, context: RolloutContext) -> None:
        self._save()
        self._saver.require_own_folder()
        self._last = context

    def end_training(self) -> None:
        self._save()

    def close(self) -> None:
        self._save()

    def _save(self) -> None:
        """Save the last rollout, which the trainer has scored by now."""
        context = self._last
        self._last = None
        if context is None or not context.calls:
            return
        rewards: dict[str, float | None] = {}
        # Outputs of a rollout that failed before its rewards, or that nobody scores, have none.
        if context.rewards:
            named = zip(context.rows, context.rewards, strict=True)
            rewards = {row.name: reward_or_none(reward) for row, reward in named}
        self._saver.save(context.step, context.mode, context.calls, rewards)
