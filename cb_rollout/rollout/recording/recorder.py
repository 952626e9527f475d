"""Write the sequences and the metrics of a run, and show them in wandb.

Owns the handling of a recorded sequence that an attached trainer and your own loop share: its
texts, its pictures, its line in the run's directory, its rows in wandb. Called by one process of a
run, on the thread that trains.
"""

import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cb_rollout.compat.multimodal import image_token_ids, is_processor
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.run_records import Mode, RunRecorder, SequenceRecord, Span, StepMetrics
from cb_rollout.metrics.run_settings import Sections
from cb_rollout.rollout.recording.distributions import Histograms
from cb_rollout.rollout.recording.run_settings import memory_gib

# Only the first pictures of a prompt are kept, made small, so that a run's records stay small too.
MAX_IMAGES = 4
MAX_IMAGE_SIDE = 160

# Metrics that only a run's records contain.
STEP_SECONDS = "step_seconds"
MEMORY_GIB = "memory_gib"


class RolloutRecorder:
    """Recorder of rollouts in one directory, for one run after the other."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        describe_run: Callable[[], Sections] | None = None,
    ) -> None:
        """Begin a run; `begin_run` begins another. For `describe_run` see `RunRecorder`."""
        self._files = RunRecorder(run_dir, describe_run)

    def begin_run(self, from_step: int = 0) -> None:
        """Begin a run, after the last run that reached step `from_step`, if not 0."""
        self._files.begin_run(from_step)

    def sequence(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        pictures: Sequence[Any] = (),
        **figures: Any,
    ) -> SequenceRecord:
        """Return the record of a sequence; nothing but its pictures is written.

        Args:
            tokenizer: decodes the tokens; a processor also shows one placeholder for each image.
                None: a token's text is its id.
            prompt_ids: token ids of the prompt.
            token_ids: token ids of the completion.
            pictures: PIL images of the prompt; others are left out.
            figures: the other fields of `SequenceRecord`.
        """
        images: list[str] = []
        for picture in pictures[:MAX_IMAGES]:
            if hasattr(picture, "thumbnail"):
                images.append(self._files.record_image(_thumbnail(picture)))
        return sequence_record(tokenizer, prompt_ids, token_ids, images=images, **figures)

    def write_sequence(self, sequence: SequenceRecord) -> None:
        self._files.record_sequence(sequence)

    def write_step(
        self,
        step: int,
        mode: Mode,
        scalars: Mapping[str, float],
        completion_lengths: list[int],
        group_rewards: list[list[float]],
        durations: Durations,
    ) -> None:
        """Write the metrics of a step, its seconds, its memory, and the times of its parts.

        Args:
            step: the trainer's global step.
            mode: training or evaluation.
            scalars: metrics by logged name.
            completion_lengths: sampled tokens of each completion.
            group_rewards: rewards of each group's completions, NaN where there is none.
            durations: the engine's; its timeline is taken out.
        """
        spans, sequences = durations.take_timeline()
        measured = {MEMORY_GIB: memory_gib()} | _step_seconds(spans, step)
        self._files.record_metrics(
            StepMetrics(
                step=step,
                mode=mode,
                scalars=measured | dict(scalars),
                completion_lengths=completion_lengths,
                group_rewards=group_rewards,
                spans=spans,
                sequences=sequences,
            )
        )


def _step_seconds(spans: Sequence[Span], step: int) -> dict[str, float]:
    """Return an optimizer step's seconds by metric name; empty if they are unknown."""
    for span in spans:
        if span.name == "step" and span.number == step:
            return {STEP_SECONDS: span.ended - span.began}
    return {}


def sequence_record(
    tokenizer: Any,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    *,
    step: int,
    mode: Mode,
    **figures: Any,
) -> SequenceRecord:
    """Return a record with the texts of its tokens.

    Args:
        tokenizer: decodes the tokens; None: their ids stand for them.
        prompt_ids: token ids of the prompt.
        token_ids: token ids of the completion.
        step: number of the step.
        mode: training or evaluation.
        figures: further fields of `SequenceRecord`.
    """
    if tokenizer is None:
        prompt = "".join(_id_text(token) for token in prompt_ids)
        tokens = [_id_text(token) for token in token_ids]
    else:
        prompt = tokenizer.decode(_without_repeats(prompt_ids, tokenizer))
        tokens = [tokenizer.decode([token]) for token in token_ids]
    return SequenceRecord(
        step=step, mode=mode, prompt=prompt, tokens=tokens, token_ids=list(token_ids), **figures
    )


def is_wandb_running() -> bool:
    """Return whether this process has a wandb run, without importing wandb."""
    wandb = sys.modules.get("wandb")
    return getattr(wandb, "run", None) is not None


def show_in_wandb(records: Iterable[SequenceRecord], histograms: Histograms, step: int) -> None:
    """Give wandb's next row the table of tokens and the histograms; do nothing without a run."""
    from cb_rollout.metrics.wandb import log_histograms, log_token_table

    log_token_table(records, step)
    log_histograms(histograms)


def _id_text(token: int) -> str:
    return f" {token}"


def _thumbnail(picture: Any) -> bytes:
    file = io.BytesIO()
    small = picture.convert("RGB")
    small.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
    small.save(file, "PNG")
    return file.getvalue()


def _without_repeats(prompt_ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Return a prompt with a single placeholder for each image."""
    if not is_processor(tokenizer):
        return list(prompt_ids)
    placeholders = image_token_ids(tokenizer)
    shown: list[int] = []
    previous = None
    for token in prompt_ids:
        repeats_placeholder = token == previous and token in placeholders
        if not repeats_placeholder:
            shown.append(token)
        previous = token
    return shown
