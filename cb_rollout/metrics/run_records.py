"""Write and read a run's records: one JSON line for each step's metrics and each sequence.

Owns the two files, a folder with each picture of a prompt once, the texts of audits, and their
format. A file may hold several runs; each line has its run's id. Recording again removes the half
line that a killed process left. A full disk stops the recording with a warning. One process of a
run records.
"""

import hashlib
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.jsonl import (
    append_lines,
    json_line,
    read_records,
    remove_half_line,
    write_whole,
)

T = TypeVar("T")

Mode = Literal["train", "eval"]

# Inside a trainer's output_dir, beside its checkpoints.
RUN_DIR_NAME = "cb_rollout"

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
# The texts of the audits, the last one at the end, with an empty line between two.
AUDIT_FILE = "audit.txt"

# Thumbnails of prompts' pictures, by a hash of their bytes.
IMAGES_DIR = "images"
_IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.png")


class TokenRow(NamedTuple):
    """One sampled token of a `SequenceRecord`; None: not recorded, or not finite."""

    prompt: str
    position: int
    """Index among the sampled tokens, from 0."""
    token: str
    token_id: int
    logprob: float | None
    policy_version: int | None
    reward: float | None
    trainer_logprob: float | None = None
    entropy: float | None = None
    advantage: float | None = None
    mask: int | None = None


class Span(NamedTuple):
    """A part of a run's time, in seconds by `time.perf_counter`; in records by `time.time`."""

    name: str
    began: float
    ended: float
    seconds: float
    """Time of its forwards, without what lies between them; else from its begin to its end."""
    number: int
    """Its forwards; of an optimizer step its number."""


class SequenceTimes(NamedTuple):
    """The life of a sequence, by the clock of the spans."""

    request_id: str
    created: float
    admitted: float | None
    """None: it ended in the queue."""
    first_token: float | None
    ended: float


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one training or evaluation step."""

    step: int
    mode: Mode
    scalars: dict[str, float]
    """Values by logged name. A value that is not finite is absent when read back."""
    completion_lengths: list[int]
    """Sampled tokens of each completion of the step; empty when the step sampled nothing."""
    group_rewards: list[list[float]] = field(default_factory=list)
    """Rewards of each group's completions, NaN where there is none; empty: not recorded."""
    spans: list[Span] = field(default_factory=list)
    """Spans of the main process since the last record, in the order of their ends; empty: not
    recorded."""
    sequences: list[SequenceTimes] = field(default_factory=list)
    """Sequences that ended since then, recorded token by token or not."""


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One sampled sequence, token by token."""

    step: int
    """The trainer's global step after it trained on the sequence; in evaluation, at the time."""
    mode: Mode
    request_id: str
    prompt: str
    """Prompt text, special tokens included."""
    tokens: list[str]
    """The text of each sampled token, decoded alone; the end-of-sequence token included."""
    token_ids: list[int]
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
    images: list[str] = field(default_factory=list)
    """Names in `IMAGES_DIR` of the prompt's first pictures, made small; empty: none recorded."""

    def __post_init__(self) -> None:
        num_tokens = len(self.tokens)
        num_stamped = sum(num for _, num in self.policy_versions)
        assert len(self.token_ids) == num_tokens, (len(self.token_ids), num_tokens)
        for values in (self.logprobs, self.trainer_logprobs, self.entropies, self.mask):
            assert len(values) in (0, num_tokens), (len(values), num_tokens)
        assert num_stamped == num_tokens or not self.policy_versions, (num_stamped, num_tokens)

    def token_rows(self) -> Iterator[TokenRow]:
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


@dataclass(frozen=True, slots=True)
class Run:
    """One training whose records are in a directory."""

    run_id: str
    """When it began, UTC: year, month, day - hour, minute, second - microsecond."""
    continues: dict[str, int]
    """Runs that it resumed, by id: the last of their steps that this run counts."""
    steps: list[int]
    """Recorded steps, ascending, those of the runs that it resumed included."""
    num_sequences: dict[int, int]
    """Recorded sequences by ascending step, in the same way."""

    def __str__(self) -> str:
        resumed = [f"{run} (up to step {step:,})" for run, step in self.continues.items()]
        after = f", after {', '.join(resumed)}" if resumed else ""
        return f"{self.run_id}  steps {self.steps[0]:,} to {self.steps[-1]:,}{after}"


class RunRecorder:
    """Append the records of one run to the files, each with one unbuffered write."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self._is_stopped = False
        with self._stopping():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            for name in (METRICS_FILE, ROLLOUTS_FILE):
                remove_half_line(self.run_dir / name)
        self.begin_run()

    def begin_run(self, from_step: int = 0) -> None:
        """Begin a run, after the last run that reached step `from_step`, if not 0."""
        self.run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        self._run: dict[str, Any] = {"run_id": self.run_id}
        runs = _runs_in(self.run_dir) if from_step else []
        if runs:
            resumed = next((run for run in reversed(runs) if run.steps[-1] >= from_step), runs[-1])
            before = {run: min(step, from_step) for run, step in resumed.continues.items()}
            self._run["continues"] = before | {resumed.run_id: from_step}

    def record_metrics(self, metrics: StepMetrics) -> None:
        self._append(METRICS_FILE, metrics)

    def record_sequence(self, sequence: SequenceRecord) -> None:
        self._append(ROLLOUTS_FILE, sequence)

    def record_image(self, png: bytes) -> str:
        """Write a picture, once however often it is recorded, and return its name."""
        name = f"{hashlib.blake2b(png, digest_size=16).hexdigest()}.png"
        path = self.run_dir / IMAGES_DIR / name
        if not (self._is_stopped or path.exists()):
            with self._stopping():
                path.parent.mkdir(exist_ok=True)
                write_whole(path, png)
        return name

    def _append(self, name: str, record: StepMetrics | SequenceRecord) -> None:
        if not self._is_stopped:
            with self._stopping(), (self.run_dir / name).open("ab", buffering=0) as file:
                append_lines(file, json_line(self._run | json_value(asdict(record))))

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Record nothing more, and warn, if a file cannot be written inside the block."""
        try:
            yield
        except OSError as error:
            self._is_stopped = True
            warnings.warn(
                f"{self.run_dir} cannot be written ({error.strerror}); training goes on, and "
                "nothing more of this run is recorded. Make room before the next one.",
                stacklevel=4,
            )


def record_audit(run_dir: str | os.PathLike[str], text: str) -> None:
    """Append an audit, whose text has no empty line, or raise `OSError`."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / AUDIT_FILE).open("ab", buffering=0) as file:
        is_first = file.seek(0, os.SEEK_END) == 0
        separator = "" if is_first else "\n"
        append_lines(file, f"{separator}{text}\n".encode())


def read_last_audit(run_dir: str | os.PathLike[str]) -> str | None:
    """Return the text of the last audit; None: there is none."""
    path = Path(run_dir) / AUDIT_FILE
    if not path.is_file():
        return None
    return path.read_text(encoding="utf-8").rpartition("\n\n")[2]


def list_runs(run_dir: str | os.PathLike[str]) -> list[Run]:
    """Return a directory's runs, the oldest first; `ConfigurationError`: none, or a bad line."""
    runs = _runs_in(find_run_dir(run_dir))
    if not runs:
        raise ConfigurationError(
            f"{run_dir} has no whole record in {METRICS_FILE} or {ROLLOUTS_FILE}; report after the "
            "first step of the run, or check that it is the main process that records."
        )
    return runs


def chosen_run(runs: Sequence[Run], run_id: str | None = None) -> Run:
    """Return the run of an id, or raise `ConfigurationError`; None: the last run."""
    by_id = {run.run_id: run for run in runs}
    run_id = runs[-1].run_id if run_id is None else run_id
    if run_id not in by_id:
        raise ConfigurationError(f"no run is called {run_id!r}; there is {', '.join(by_id)}.")
    return by_id[run_id]


def read_metrics(run_dir: str | os.PathLike[str], run: Run | None = None) -> list[StepMetrics]:
    """Return the metrics of a run of `list_runs`, in recorded order; None: of the last run."""
    run = run or chosen_run(list_runs(run_dir))
    return list(_records_of(run, run_dir, METRICS_FILE, _metrics_from))


def iterate_rollouts(
    run_dir: str | os.PathLike[str], run: Run | None = None, steps: Collection[int] | None = None
) -> Iterator[SequenceRecord]:
    """Yield the sequences of a run, as `read_metrics`, singly; `steps=None`: of all steps."""
    run = run or chosen_run(list_runs(run_dir))
    return _records_of(run, run_dir, ROLLOUTS_FILE, _sequence_from, steps)


def read_image(run_dir: str | os.PathLike[str], name: str) -> bytes | None:
    """Return a recorded picture as PNG; None: its file is gone, or the name is not one of ours."""
    path = Path(run_dir) / IMAGES_DIR / name
    return path.read_bytes() if _IMAGE_NAME.fullmatch(name) and path.is_file() else None


def find_run_dir(path: str | os.PathLike[str]) -> Path:
    """Return `path` or its `cb_rollout/`, which holds records; else raise `ConfigurationError`."""
    path = Path(path)
    for candidate in (path, path / RUN_DIR_NAME):
        if any((candidate / name).is_file() for name in (METRICS_FILE, ROLLOUTS_FILE)):
            return candidate
    raise ConfigurationError(
        f"no records of a run in {path}: neither {METRICS_FILE} nor {ROLLOUTS_FILE} is there or in "
        f"{path / RUN_DIR_NAME}; pass a trainer's output_dir, or its {RUN_DIR_NAME} directory."
    )


def _records_of(
    run: Run,
    run_dir: str | os.PathLike[str],
    name: str,
    parse: Callable[[Mapping[str, Any]], T],
    steps: Collection[int] | None = None,
) -> Iterator[T]:
    last_steps = {**run.continues, run.run_id: math.inf}

    def chosen(row: Mapping[str, Any]) -> T | None:
        is_of_run = row["step"] <= last_steps.get(row["run_id"], -1)
        return parse(row) if is_of_run and (steps is None or row["step"] in steps) else None

    records = read_records(find_run_dir(run_dir) / name, chosen, "record")
    return (record for record in records if record is not None)


def _runs_in(run_dir: Path) -> list[Run]:
    continued: dict[str, dict[str, int]] = {}

    def run_and_step(row: Mapping[str, Any]) -> tuple[str, int]:
        run_id = row["run_id"]
        continued.setdefault(run_id, row.get("continues", {}))
        return run_id, int(row["step"])

    metrics, sequences = (
        list(read_records(run_dir / name, run_and_step, "record"))
        for name in (METRICS_FILE, ROLLOUTS_FILE)
    )
    runs = []
    # An id begins with the run's time.
    for run_id in sorted(continued):
        last = {**continued[run_id], run_id: math.inf}
        nums = Counter(step for other, step in sequences if step <= last.get(other, -1))
        steps = {step for other, step in metrics if step <= last.get(other, -1)} | {*nums}
        runs.append(Run(run_id, continued[run_id], sorted(steps), dict(sorted(nums.items()))))
    return runs


def _metrics_from(row: Mapping[str, Any]) -> StepMetrics:
    return _record_from(
        StepMetrics,
        row,
        scalars={name: float(v) for name, v in row["scalars"].items() if v is not None},
        completion_lengths=list(map(int, row["completion_lengths"])),
        group_rewards=[_numbers(group) for group in row.get("group_rewards", ())],
        spans=[Span(*span) for span in row.get("spans", ())],
        sequences=[SequenceTimes(*times) for times in row.get("sequences", ())],
    )


def _sequence_from(row: Mapping[str, Any]) -> SequenceRecord:
    return _record_from(
        SequenceRecord,
        row,
        token_ids=list(map(int, row["token_ids"])),
        logprobs=_numbers(row["logprobs"]),
        policy_versions=[(int(version), int(num)) for version, num in row["policy_versions"]],
        trainer_logprobs=_numbers(row.get("trainer_logprobs", ())),
        entropies=_numbers(row.get("entropies", ())),
    )


def _record_from(kind: type[T], row: Mapping[str, Any], **read: Any) -> T:
    """Return a row as a record; `read`: its values that JSON holds in another form."""
    if row["mode"] not in get_args(Mode):
        raise ValueError(f"mode {row['mode']!r} is neither train nor eval")
    # Older runs did not record every field.
    known = {f.name: row[f.name] for f in fields(kind) if f.name in row}  # type: ignore[arg-type]
    return kind(**known | read)


def _numbers(values: Iterable[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def json_value(value: Any) -> Any:
    """Return a value as JSON holds it: a number that is not finite as null."""
    if isinstance(value, dict):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value if value is None or isinstance(value, int | str) else _finite(value)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _finite_at(values: list[float], position: int) -> float | None:
    return _finite(values[position]) if values else None
