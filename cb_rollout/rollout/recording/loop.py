"""Record the steps of your own loop: `RolloutGenerator.record`.

Owns the numbers of steps, the figures of a step under TRL's names (1.16), and the exchange between
processes: each process gives its own outputs, and the first process writes. Called from the thread
that trains, by every process.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from cb_rollout.errors import InvalidRequestError, RolloutError, error_text
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.registry import combined_metrics
from cb_rollout.metrics.run_records import RUN_DIR_NAME, Mode, SequenceRecord
from cb_rollout.metrics.run_settings import Sections
from cb_rollout.rollout.distributed import of_all_processes, rank_of_all
from cb_rollout.rollout.recording.arguments import RecordedBatch, recorded_batch
from cb_rollout.rollout.recording.distributions import (
    Comparison,
    Histograms,
    Ranges,
    TokenDistributions,
    joined_histograms,
    joined_ranges,
)
from cb_rollout.rollout.recording.recorder import (
    RolloutRecorder,
    is_wandb_running,
    sequence_record,
    show_in_wandb,
)
from cb_rollout.types import FinishReason, GenerationOutput

# The default of transformers' `TrainingArguments`.
OUTPUT_DIR = "trainer_output"

MODES: tuple[Mode, ...] = ("train", "eval")


Prompt = tuple[list[int], bytes | None]
"""Token ids of a prompt, and a hash of its images; None: it has none."""


class Announcement(NamedTuple):
    """One process's call, before anything is recorded."""

    refusal: str
    """Why its arguments are refused; empty: they are not."""
    step: int
    mode: str
    num_outputs: int
    has_wandb: bool
    folder: str
    """Parent of the run's directory; that of the first process counts."""


class StepFigures(NamedTuple):
    """One process's part of a step, over all calls so far."""

    completion_lengths: list[int]
    is_stopped: list[bool]
    group_rewards: list[list[float]]
    comparison: Comparison | None
    ranges: Ranges
    policy_version: int | None
    """The newest version that sampled a token; None: tokens have none."""


@dataclass
class StepState:
    """Outputs that this process has recorded of a step."""

    step: int
    mode: Mode
    began: float | None
    """Time at which the step began, by `time.perf_counter`; None: not known."""
    num_written: int = 0
    """Sequences in the run's directory, of all processes."""
    completion_lengths: list[int] = field(default_factory=list)
    is_stopped: list[bool] = field(default_factory=list)
    group_rewards: list[list[float]] = field(default_factory=list)
    last_prompt: Prompt | None = None
    """Prompt of the last group, which the next call may continue; None: there is no group."""
    distributions: TokenDistributions = field(default_factory=TokenDistributions)
    policy_version: int | None = None
    rollouts: list[dict[str, float]] = field(default_factory=list)
    """Metrics of the generator's rollouts."""
    shown: list[SequenceRecord] = field(default_factory=list)
    """Sequences in wandb's table."""

    def add(self, batch: RecordedBatch) -> None:
        """Add the outputs of one call."""
        self._add_rewards(batch)
        versions: list[int] = []
        for number, output in enumerate(batch.outputs):
            self.completion_lengths.append(len(output.generated_tokens))
            self.is_stopped.append(output.finish_reason == FinishReason.STOP)
            self.distributions.add_sampled(output.logprobs)
            if batch.trainer_logprobs is not None:
                self.distributions.add_compared(output.logprobs, batch.trainer_logprobs[number])
            for version, _ in output.policy_versions:
                versions.append(version)
        if versions:
            self.policy_version = max(versions)

    def _add_rewards(self, batch: RecordedBatch) -> None:
        """Add rewards to groups of consecutive outputs with one prompt; NaN: no reward."""
        if all(reward is None for reward in batch.rewards):
            self.last_prompt = None
            return
        for output, reward in zip(batch.outputs, batch.rewards, strict=True):
            prompt = _prompt_of(output)
            if prompt != self.last_prompt:
                self.group_rewards.append([])
                self.last_prompt = prompt
            self.group_rewards[-1].append(math.nan if reward is None else reward)

    def figures(self) -> StepFigures:
        return StepFigures(
            completion_lengths=self.completion_lengths,
            is_stopped=self.is_stopped,
            group_rewards=self.group_rewards,
            comparison=self.distributions.comparison(),
            ranges=self.distributions.ranges(),
            policy_version=self.policy_version,
        )


class LoopRecords:
    """Recorder of a loop's steps."""

    def __init__(
        self,
        durations: Durations,
        num_sequences: int,
        *,
        is_duplicate: bool,
        describe_run: Callable[[], Sections] | None = None,
    ) -> None:
        """Open no file before the first step.

        Args:
            durations: the engine's.
            num_sequences: number of sequences of each step to record, token by token.
            is_duplicate: True if another process has the same outputs, and gives them.
            describe_run: see `RunRecorder`.
        """
        self._durations = durations
        self._describe_run = describe_run
        self._num_sequences = num_sequences
        self._is_duplicate = is_duplicate
        self._recorders: dict[Path, RolloutRecorder] = {}
        """Recorders by the parent of the run's directory, on the process that writes."""
        self._last_steps: dict[Path, int] = {}
        """The last training step, by the parent of the run's directory."""
        self._output_dir: Path | None = None
        self._last_step = 0
        self._states: dict[tuple[Path, str], StepState] = {}
        """The last step of each mode, by the parent of its run's directory."""
        self._last_rollout: dict[str, float] | None = None
        self._last_call: float | None = None
        self._wandb_row: int | None = None

    def record(
        self,
        arguments: Mapping[str, Any],
        tokenizer: Any,
        *,
        step: int | None,
        mode: Mode,
        output_dir: str | os.PathLike[str] | None,
        last_rollout: dict[str, float],
        status: Mapping[str, float],
    ) -> None:
        """Record a step, or a part of it; see `RolloutGenerator.record`.

        Args:
            arguments: those of `recorded_batch`.
            tokenizer: see `RolloutRecorder.sequence`.
            step: see `RolloutGenerator.record`.
            mode: see `RolloutGenerator.record`.
            output_dir: see `RolloutGenerator.record`.
            last_rollout: metrics of the generator's last rollout, the same object until the next.
            status: metrics of the engine now.
        """
        number, batch, announced = self._agreed(arguments, step, mode, output_dir)
        folder = Path(announced[0].folder)
        begins_run = mode == "train" and number < self._last_steps.get(folder, 0)
        if begins_run:
            # The figures that the previous run recorded of a step do not belong to this run.
            self._states.pop((folder, "train"), None)
            self._states.pop((folder, "eval"), None)
        state, is_new = self._state_of(number, mode, folder)
        if last_rollout and last_rollout is not self._last_rollout:
            state.rollouts.append(last_rollout)
            self._last_rollout = last_rollout
        state.add(batch)
        nums_outputs = [announcement.num_outputs for announcement in announced]
        records = self._sequences(state, batch, tokenizer, nums_outputs)
        figures: list[StepFigures] = []
        written: list[SequenceRecord] = []
        for figures_of_rank, records_of_rank in of_all_processes((state.figures(), records)):
            figures.append(figures_of_rank)
            written.extend(records_of_rank)
        state.num_written += len(written)
        shows_in_wandb = announced[0].has_wandb
        histograms: Histograms = {}
        if shows_in_wandb and mode == "train":
            histograms = self._histograms(state, figures)
        if rank_of_all() == 0:
            recorder = self._opened(folder, state, begins_run=begins_run)
            for record in written:
                recorder.write_sequence(record)
            self._write_step(recorder, state, figures, status)
            state.shown += written
            if shows_in_wandb:
                self._show(state, histograms, is_new=is_new)
        self._output_dir = folder
        self._last_call = time.perf_counter()

    def _agreed(
        self, arguments: Mapping[str, Any], step: int | None, mode: Mode, output_dir: Any
    ) -> tuple[int, RecordedBatch, list[Announcement]]:
        """Return the step, this process's batch and all calls; raise on all if one is refused."""
        refusal: Exception | None = None
        number = 0
        folder = Path()
        batch = recorded_batch([])
        try:
            folder = self._folder(output_dir)
            number = self._step_number(step, mode)
            checked = recorded_batch(**arguments)
            if not self._is_duplicate:
                batch = checked
        except Exception as error:  # noqa: BLE001 - the other processes wait for an answer
            refusal = error
        announced = of_all_processes(
            Announcement(
                refusal="" if refusal is None else _reason(refusal),
                step=number,
                mode=mode,
                num_outputs=len(batch.outputs),
                has_wandb=is_wandb_running(),
                folder=str(folder),
            )
        )
        if refusal is not None:
            raise refusal
        _require_one_call(announced, number, mode)
        return number, batch, announced

    def _folder(self, output_dir: Any) -> Path:
        """Return the parent of the run's directory."""
        if not isinstance(output_dir, str | os.PathLike | None):
            raise InvalidRequestError(
                f"output_dir={output_dir!r} is no path; pass a str or a Path, or None."
            )
        if output_dir is None and self._output_dir is not None:
            return self._output_dir
        return Path(output_dir or OUTPUT_DIR).absolute()

    def _step_number(self, step: int | None, mode: Mode) -> int:
        if mode not in MODES:
            raise InvalidRequestError(f"mode={mode!r} is neither 'train' nor 'eval'.")
        least = 1 if mode == "train" else 0
        if step is None:
            # An evaluation belongs to the last step.
            return self._last_step + least
        is_number = hasattr(step, "__index__") and not isinstance(step, bool)
        if not is_number or index(step) < least:
            raise InvalidRequestError(
                f"step={step!r}: pass a whole number from {least}, or None to count the steps."
            )
        return index(step)

    def _state_of(self, step: int, mode: Mode, folder: Path) -> tuple[StepState, bool]:
        """Return the state of a step of a run, and whether this is its first call."""
        state = self._states.get((folder, mode))
        if state is not None and state.step == step:
            return state, False
        state = StepState(step, mode, began=self._last_call)
        self._states[folder, mode] = state
        if mode == "train":
            self._last_step = self._last_steps[folder] = step
        return state, True

    def _sequences(
        self, state: StepState, batch: RecordedBatch, tokenizer: Any, nums_outputs: Sequence[int]
    ) -> list[SequenceRecord]:
        """Return this process's records of the step's first sequences, in the order of ranks."""
        rank = rank_of_all()
        # Engines of different processes give their requests the same ids.
        origin = f"rank{rank}/" if rank else ""
        num_left = self._num_sequences - state.num_written - sum(nums_outputs[:rank])
        records: list[SequenceRecord] = []
        for number, output in enumerate(batch.outputs[: max(0, num_left)]):
            trainer_logprobs: list[float] = []
            if batch.trainer_logprobs is not None:
                trainer_logprobs = batch.trainer_logprobs[number]
            records.append(
                sequence_record(
                    tokenizer,
                    output.prompt_ids,
                    output.generated_tokens,
                    step=state.step,
                    mode=state.mode,
                    request_id=origin + output.request_id,
                    logprobs=output.logprobs,
                    policy_versions=output.policy_versions,
                    reward=batch.rewards[number],
                    finish_reason=output.finish_reason,
                    trainer_logprobs=trainer_logprobs,
                    advantage=batch.advantages[number],
                    mask=[1] * len(output.generated_tokens),
                )
            )
        return records

    def _histograms(self, state: StepState, figures: Sequence[StepFigures]) -> Histograms:
        """Return the histograms of the step's tokens on all processes; collective."""
        ranges = joined_ranges([figures_of_rank.ranges for figures_of_rank in figures])
        counts_of_ranks = of_all_processes(state.distributions.counts(ranges))
        return joined_histograms(ranges, counts_of_ranks)

    def _opened(self, folder: Path, state: StepState, *, begins_run: bool) -> RolloutRecorder:
        """Return the recorder of the directory; a run that begins late continues another."""
        from_step = state.step - 1 if state.mode == "train" else state.step
        recorder = self._recorders.get(folder)
        if recorder is None:
            recorder = RolloutRecorder(folder / RUN_DIR_NAME, self._describe_run)
            self._recorders[folder] = recorder
            begins_run = from_step > 0
        if begins_run:
            recorder.begin_run(from_step)
        return recorder

    def _write_step(
        self,
        recorder: RolloutRecorder,
        state: StepState,
        figures: Sequence[StepFigures],
        status: Mapping[str, float],
    ) -> None:
        """Write the metrics of all calls of the step so far; a step's last line counts."""
        is_training = state.mode == "train"
        scalars = dict(status) if state.rollouts else {}
        scalars |= combined_metrics(state.rollouts) | step_scalars(figures)
        now = time.perf_counter()
        if is_training and self._last_call is not None:
            self._durations.add_span("step", self._last_call, state.step)
        if is_training and state.began is not None and state.rollouts:
            share = scalars["rollout/seconds"] / (now - state.began)
            scalars["rollout/step_share"] = min(1.0, share)
        lengths: list[int] = []
        group_rewards: list[list[float]] = []
        if is_training:
            for figures_of_rank in figures:
                lengths.extend(figures_of_rank.completion_lengths)
                group_rewards.extend(figures_of_rank.group_rewards)
        else:
            # The report's figures of lengths and groups are those of training.
            scalars = {f"eval_{name}": value for name, value in scalars.items()}
        recorder.write_step(
            step=state.step,
            mode=state.mode,
            scalars=scalars,
            completion_lengths=lengths,
            group_rewards=group_rewards,
            durations=self._durations,
        )

    def _show(self, state: StepState, histograms: Histograms, *, is_new: bool) -> None:
        """Show the step in wandb; a new step starts a new row."""
        from cb_rollout.metrics.wandb import end_row

        if is_new:
            self._wandb_row = end_row(self._wandb_row)
        show_in_wandb(state.shown, histograms, state.step)


def _require_one_call(announced: Sequence[Announcement], step: int, mode: Mode) -> None:
    """Raise `InvalidRequestError` unless all processes record outputs of one step."""
    for rank, other in enumerate(announced):
        if other.refusal:
            raise InvalidRequestError(
                f"record() was refused on rank {rank}, and nothing was recorded: {other.refusal}"
            )
        if other.step != step or other.mode != mode:
            raise InvalidRequestError(
                f"record() is called for step {step} ({mode}) here, and for step {other.step} "
                f"({other.mode}) on rank {rank}; call it equally often on all processes, with the "
                "same step."
            )
    if not any(other.num_outputs for other in announced):
        raise InvalidRequestError(
            "record() got no outputs; pass those of the step's generate_batch."
        )


def step_scalars(figures: Sequence[StepFigures]) -> dict[str, float]:
    """Return the metrics of a step over all processes, under TRL's names."""
    lengths: list[int] = []
    is_stopped: list[bool] = []
    group_rewards: list[list[float]] = []
    comparisons: list[Comparison] = []
    versions: list[int] = []
    for figures_of_rank in figures:
        lengths.extend(figures_of_rank.completion_lengths)
        is_stopped.extend(figures_of_rank.is_stopped)
        group_rewards.extend(figures_of_rank.group_rewards)
        if figures_of_rank.comparison is not None:
            comparisons.append(figures_of_rank.comparison)
        if figures_of_rank.policy_version is not None:
            versions.append(figures_of_rank.policy_version)
    scalars = length_scalars(lengths, is_stopped)
    scalars |= reward_scalars(group_rewards)
    scalars |= comparison_scalars(comparisons)
    if versions:
        scalars["rollout/policy_version"] = max(versions)
    return scalars


def length_scalars(lengths: Sequence[int], is_stopped: Sequence[bool]) -> dict[str, float]:
    """Return the metrics of completion lengths; terminated completions stopped, without a cut."""
    pairs = zip(lengths, is_stopped, strict=True)
    # Without a terminated completion TRL logs 0.
    terminated = [length for length, stopped in pairs if stopped] or [0]
    scalars = {"completions/clipped_ratio": 1 - sum(is_stopped) / len(is_stopped)}
    for name, values in (("length", lengths), ("terminated_length", terminated)):
        scalars[f"completions/mean_{name}"] = statistics.fmean(values)
        scalars[f"completions/min_{name}"] = float(min(values))
        scalars[f"completions/max_{name}"] = float(max(values))
    return scalars


def reward_scalars(group_rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the metrics of rewards; empty if there is no reward."""
    rewards: list[float] = []
    num_groups = 0
    num_alike = 0
    for group in group_rewards:
        finite = [reward for reward in group if math.isfinite(reward)]
        if not finite:
            continue
        rewards.extend(finite)
        num_groups += 1
        if max(finite) == min(finite):
            num_alike += 1
    if not rewards:
        return {}
    scalars = {
        "reward": statistics.fmean(rewards),
        "frac_reward_zero_std": num_alike / num_groups,
    }
    if len(rewards) > 1:
        scalars["reward_std"] = statistics.stdev(rewards)
    return scalars


def comparison_scalars(of_processes: Sequence[Comparison]) -> dict[str, float]:
    """Return the metrics of log-probabilities, sampled against trainer's; empty without tokens."""
    num_tokens = sum(comparison.num_tokens for comparison in of_processes)
    if not num_tokens:
        return {}
    sum_difference = sum(comparison.sum_difference for comparison in of_processes)
    sum_ratio = sum(comparison.sum_ratio for comparison in of_processes)
    max_difference = max(comparison.max_difference for comparison in of_processes)
    min_ratio = min(comparison.min_ratio for comparison in of_processes)
    max_ratio = max(comparison.max_ratio for comparison in of_processes)
    return {
        "sampling/sampling_logp_difference/mean": sum_difference / num_tokens,
        "sampling/sampling_logp_difference/max": max_difference,
        "sampling/importance_sampling_ratio/min": min_ratio,
        "sampling/importance_sampling_ratio/mean": sum_ratio / num_tokens,
        "sampling/importance_sampling_ratio/max": max_ratio,
    }


def _prompt_of(output: GenerationOutput) -> Prompt:
    """Return the prompt and a hash of its images, which placeholders alone do not tell apart."""
    images = output.images
    return output.prompt_ids, None if images is None else images.digest


def _reason(refusal: Exception) -> str:
    return str(refusal) if isinstance(refusal, RolloutError) else error_text(refusal)
