"""Write and read a run's records: one JSON line for each step's metrics and each sequence.

Owns the two files and their format; does not choose what is recorded. Recording again removes the
half line that a killed process left. One process of a run records, from any of its threads.
"""

import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.jsonl import json_line, read_lines, remove_half_line

Mode = Literal["train", "eval"]

# Inside a trainer's output_dir, beside its checkpoints.
RUN_DIR_NAME = "cb_rollout"

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"


class TokenRow(NamedTuple):
    """One sampled token of a `SequenceRecord`, with its sequence's prompt and scores."""

    prompt: str
    position: int
    """Index among the sampled tokens, from 0."""
    token: str
    token_id: int
    logprob: float | None
    """Natural logarithm; None: not recorded, or not finite."""
    policy_version: int | None
    """The version that sampled the token; None: not recorded."""
    reward: float | None
    trainer_logprob: float | None = None
    """Log-probability by the trainer's forward in the token's first loss; None: not recorded."""
    entropy: float | None = None
    """Entropy in nats of the distribution in the loss; None: not recorded."""
    advantage: float | None = None
    mask: int | None = None
    """1 where the loss counts the token, 0 where it does not; None: not recorded."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one training or evaluation step."""

    step: int
    """The trainer's global step."""
    mode: Mode
    scalars: dict[str, float]
    """Values by logged name. A value that is not finite is absent when read back."""
    completion_lengths: list[int]
    """Sampled tokens of each completion of the step; empty when the step sampled nothing."""


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One sampled sequence, token by token."""

    step: int
    """The trainer's global step."""
    mode: Mode
    request_id: str
    prompt: str
    """Prompt text, special tokens included."""
    tokens: list[str]
    """The text of each sampled token, decoded alone; the end-of-sequence token included."""
    token_ids: list[int]
    """One for each token."""
    logprobs: list[float]
    """Natural logarithms, one for each token, NaN where it was not finite; empty: not recorded."""
    policy_versions: list[tuple[int, int]]
    """Runs of `(policy_version, num_tokens)` that sum to the tokens; empty: not recorded."""
    reward: float | None
    """Reward of the sequence; None: not scored, or not finite."""
    finish_reason: str | None
    """A `FinishReason`; None: not known."""
    trainer_logprobs: list[float] = field(default_factory=list)
    """Log-probabilities by the trainer's forward in the tokens' first loss; empty: not recorded."""
    entropies: list[float] = field(default_factory=list)
    """Entropies in nats of the distribution in the loss; empty: not recorded."""
    advantage: float | None = None
    """Advantage in the loss; None: not known, or not finite."""
    mask: list[int] = field(default_factory=list)
    """1 where the loss counts the token, 0 where it does not (a tool wrote the token, or the loss
    leaves the sequence out); empty: not recorded."""

    def __post_init__(self) -> None:
        """Check that all lists have one entry per token."""
        num_tokens = len(self.tokens)
        num_stamped = sum(num for _, num in self.policy_versions)
        assert len(self.token_ids) == num_tokens, (len(self.token_ids), num_tokens)
        for values in (self.logprobs, self.trainer_logprobs, self.entropies, self.mask):
            assert len(values) in (0, num_tokens), (len(values), num_tokens)
        assert num_stamped == num_tokens or not self.policy_versions, (num_stamped, num_tokens)

    def token_rows(self) -> Iterator[TokenRow]:
        """Yield a row for each token, in order."""
        versions = [version for version, num in self.policy_versions for _ in range(num)]
        for position, (token, token_id) in enumerate(zip(self.tokens, self.token_ids, strict=True)):
            yield TokenRow(
                prompt=self.prompt,
                position=position,
                token=token,
                token_id=token_id,
                logprob=_finite_at(self.logprobs, position),
                policy_version=versions[position] if versions else None,
                reward=self.reward,
                trainer_logprob=_finite_at(self.trainer_logprobs, position),
                entropy=_finite_at(self.entropies, position),
                advantage=self.advantage,
                mask=self.mask[position] if self.mask else None,
            )


class RunRecorder:
    """Append records to the files of one run, each with one unbuffered write."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        """Create `run_dir`, or continue after its last whole record."""
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, ROLLOUTS_FILE):
            remove_half_line(self.run_dir / name)

    def record_metrics(self, metrics: StepMetrics) -> None:
        """Append one step's metrics."""
        scalars = {name: _finite(value) for name, value in metrics.scalars.items()}
        self._append(METRICS_FILE, asdict(metrics) | {"scalars": scalars})

    def record_sequence(self, sequence: SequenceRecord) -> None:
        """Append one sequence."""
        row = asdict(sequence)
        for name in ("reward", "advantage"):
            row[name] = None if row[name] is None else _finite(row[name])
        for name in ("logprobs", "trainer_logprobs", "entropies"):
            row[name] = [_finite(value) for value in row[name]]
        self._append(ROLLOUTS_FILE, row)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.run_dir / name).open("ab", buffering=0) as file:
            file.write(json_line(row))


def read_metrics(run_dir: str | os.PathLike[str]) -> list[StepMetrics]:
    """Return the metrics of a run, in recorded order; empty where it recorded none.

    Raises:
        ConfigurationError: `run_dir` holds no records at all, or a line is not a record.
    """
    path = find_run_dir(run_dir) / METRICS_FILE
    return [metrics for _, metrics in read_lines(path, _metrics_from, "record")]


def read_rollouts(
    run_dir: str | os.PathLike[str], steps: Collection[int] | None = None
) -> list[SequenceRecord]:
    """Return the sequences of a run, in recorded order; empty where it recorded none.

    Args:
        run_dir: a path that `find_run_dir` accepts.
        steps: keep only the sequences of these steps, so that a long run fits in memory; None: all.

    Raises:
        ConfigurationError: `run_dir` holds no records at all, or a line is not a record.
    """

    def kept_sequence(row: Mapping[str, Any]) -> SequenceRecord | None:
        return _sequence_from(row) if steps is None or row["step"] in steps else None

    path = find_run_dir(run_dir) / ROLLOUTS_FILE
    return [kept for _, kept in read_lines(path, kept_sequence, "record") if kept is not None]


def count_rollouts(run_dir: str | os.PathLike[str]) -> dict[int, int]:
    """Count the recorded sequences of each step, by ascending step, without keeping them.

    Raises:
        ConfigurationError: `run_dir` holds no records at all, or a line is not a record.
    """
    path = find_run_dir(run_dir) / ROLLOUTS_FILE
    recorded = read_lines(path, lambda row: int(row["step"]), "record")
    return dict(sorted(Counter(step for _, step in recorded).items()))


def find_run_dir(path: str | os.PathLike[str]) -> Path:
    """Return the directory with a run's records: `path` itself, or its `cb_rollout/`.

    Raises:
        ConfigurationError: neither holds `metrics.jsonl` or `rollouts.jsonl`.
    """
    path = Path(path)
    for candidate in (path, path / RUN_DIR_NAME):
        if any((candidate / name).is_file() for name in (METRICS_FILE, ROLLOUTS_FILE)):
            return candidate
    raise ConfigurationError(
        f"no records of a run in {path}: neither {METRICS_FILE} nor {ROLLOUTS_FILE} is there or in "
        f"{path / RUN_DIR_NAME}; pass a trainer's output_dir, or its {RUN_DIR_NAME} directory."
    )


def _metrics_from(row: Mapping[str, Any]) -> StepMetrics:
    return StepMetrics(
        step=int(row["step"]),
        mode=_mode(row["mode"]),
        scalars={name: float(v) for name, v in row["scalars"].items() if v is not None},
        completion_lengths=[int(length) for length in row["completion_lengths"]],
    )


def _sequence_from(row: Mapping[str, Any]) -> SequenceRecord:
    return SequenceRecord(
        step=int(row["step"]),
        mode=_mode(row["mode"]),
        request_id=str(row["request_id"]),
        prompt=str(row["prompt"]),
        tokens=[str(token) for token in row["tokens"]],
        token_ids=[int(token_id) for token_id in row["token_ids"]],
        logprobs=_numbers(row["logprobs"]),
        policy_versions=[(int(version), int(num)) for version, num in row["policy_versions"]],
        reward=None if row["reward"] is None else float(row["reward"]),
        finish_reason=row["finish_reason"],
        # Older runs did not record the following.
        trainer_logprobs=_numbers(row.get("trainer_logprobs", [])),
        entropies=_numbers(row.get("entropies", [])),
        advantage=None if row.get("advantage") is None else float(row["advantage"]),
        mask=[int(value) for value in row.get("mask", [])],
    )


def _numbers(values: list[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _mode(mode: str) -> Mode:
    if mode not in ("train", "eval"):
        raise ValueError(f"mode {mode!r} is neither train nor eval")
    return mode


def _finite(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def _finite_at(values: list[float], position: int) -> float | None:
    return _finite(values[position]) if values else None
