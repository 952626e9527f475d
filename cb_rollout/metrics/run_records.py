"""Write and read a run's records: one JSON line for each step's metrics and each sequence.

Owns the two files, a folder that stores each picture of a prompt once, the texts of audits, and
their format. A file may hold several runs; each line has its run's id. A new recording first
removes the incomplete line that a killed process may have left. A file that cannot be written stops
the recording with a warning. One process of a run records.
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
from cb_rollout.metrics.live_metrics import SequenceTimes, Span
from cb_rollout.metrics.run_settings import Sections, write_settings
from cb_rollout.metrics.write_faults import write_advice

T = TypeVar("T")

Mode = Literal["train", "eval"]

# Inside a trainer's output_dir, beside its checkpoints.
RUN_DIR_NAME = "cb_rollout"

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
# The texts of the audits, oldest first, separated by empty lines.
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
    """Spans of the main process since the last record, in the order in which they ended; empty:
    not recorded."""
    sequences: list[SequenceTimes] = field(default_factory=list)
    """Sequences that ended since the last record, whether recorded token by token or not."""


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One sampled sequence, token by token."""

    step: int
    """The trainer's global step after it trained on the sequence; in evaluation, the step then."""
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
    """Pairs `(policy_version, num_tokens)` for consecutive tokens, which cover all tokens; empty:
    not recorded."""
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
        assert len(self.token_ids) == num_tokens, (len(self.token_ids), num_tokens)
        for values in (self.logprobs, self.trainer_logprobs, self.entropies, self.mask):
            assert len(values) in (0, num_tokens), (len(values), num_tokens)
        if self.policy_versions:
            num_stamped = sum(num for _, num in self.policy_versions)
            assert num_stamped == num_tokens, (num_stamped, num_tokens)

    def token_rows(self) -> Iterator[TokenRow]:
        """Yield each sampled token with its recorded numbers."""
        versions: list[int] = []
        for version, num_tokens in self.policy_versions:
            versions.extend([version] * num_tokens)
        for position, token in enumerate(self.tokens):
            yield TokenRow(
                prompt=self.prompt,
                position=position,
                token=token,
                token_id=self.token_ids[position],
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
    """One recorded training run in a directory."""

    run_id: str
    """When it began, UTC: year, month, day - hour, minute, second - microsecond."""
    continues: dict[str, int]
    """Runs that it resumed: by id, the last step of each that counts as part of this run."""
    steps: list[int]
    """Recorded steps, ascending, including those of the runs that it resumed."""
    num_sequences: dict[int, int]
    """Number of recorded sequences by step, ascending, including resumed runs."""

    def __str__(self) -> str:
        text = f"{self.run_id}  steps {self.steps[0]:,} to {self.steps[-1]:,}"
        if self.continues:
            resumed = [f"{run} (up to step {step:,})" for run, step in self.continues.items()]
            text += f", after {', '.join(resumed)}"
        return text


class RunRecorder:
    """Append the records of one run to the files, each with one unbuffered write."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        describe_run: Callable[[], Sections] | None = None,
    ) -> None:
        """Begin a run; `describe_run` returns its settings when its first record is written."""
        self.run_dir = Path(run_dir)
        self._describe_run = describe_run
        self._described_run = ""
        self._is_stopped = False
        with self._stopping():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            for name in (METRICS_FILE, ROLLOUTS_FILE):
                remove_half_line(self.run_dir / name)
        self.begin_run()

    def begin_run(self, from_step: int = 0) -> None:
        """Begin a run; unless `from_step` is 0, it resumes the last run that reached that step."""
        self.run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        self._run: dict[str, Any] = {"run_id": self.run_id}
        runs = _runs_in(self.run_dir) if from_step else []
        if not runs:
            return
        resumed = runs[-1]
        for run in runs:
            if run.steps[-1] >= from_step:
                resumed = run
        continues: dict[str, int] = {}
        for run_id, last_step in resumed.continues.items():
            continues[run_id] = min(last_step, from_step)
        continues[resumed.run_id] = from_step
        self._run["continues"] = continues

    def record_metrics(self, metrics: StepMetrics) -> None:
        self._append(METRICS_FILE, metrics)

    def record_sequence(self, sequence: SequenceRecord) -> None:
        self._append(ROLLOUTS_FILE, sequence)

    def record_image(self, png: bytes) -> str:
        """Write a picture unless it was written before, and return its name."""
        name = f"{hashlib.blake2b(png, digest_size=16).hexdigest()}.png"
        path = self.run_dir / IMAGES_DIR / name
        if self._is_stopped or path.exists():
            return name
        with self._stopping():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, png)
        return name

    def _append(self, name: str, record: StepMetrics | SequenceRecord) -> None:
        if self._is_stopped:
            return
        self._write_settings()
        row = self._run | json_value(asdict(record))
        with self._stopping(), (self.run_dir / name).open("ab", buffering=0) as file:
            append_lines(file, json_line(row))

    def _write_settings(self) -> None:
        """Write the run's settings before its first record."""
        if self._describe_run is None or self._described_run == self.run_id:
            return
        self._described_run = self.run_id
        with self._stopping():
            write_settings(self.run_dir, self.run_id, self._describe_run())

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Stop recording, with a warning, if a file cannot be written inside the block."""
        try:
            yield
        except OSError as error:
            self._is_stopped = True
            cause = error.strerror or error
            warnings.warn(
                f"{self.run_dir} cannot be written ({cause}); training continues, but nothing "
                f"more of this run is recorded. {write_advice(error, self.run_dir, 'output_dir')}",
                stacklevel=4,
            )


def record_audit(run_dir: str | os.PathLike[str], text: str) -> None:
    """Append the text of an audit, which must have no empty lines, or raise `OSError`."""
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
    _, _, last_audit = path.read_text(encoding="utf-8").rpartition("\n\n")
    return last_audit


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
    """Return the run with an id, or raise `ConfigurationError`; None: the last run."""
    if run_id is None:
        return runs[-1]
    for run in runs:
        if run.run_id == run_id:
            return run
    run_ids = [run.run_id for run in runs]
    raise ConfigurationError(f"no run is called {run_id!r}; there is {', '.join(run_ids)}.")


def read_metrics(run_dir: str | os.PathLike[str], run: Run | None = None) -> list[StepMetrics]:
    """Return the metrics of a run of `list_runs`, in recorded order; None: of the last run."""
    run = run or chosen_run(list_runs(run_dir))
    return list(_records_of(run, run_dir, METRICS_FILE, _metrics_from))


def iterate_rollouts(
    run_dir: str | os.PathLike[str], run: Run | None = None, steps: Collection[int] | None = None
) -> Iterator[SequenceRecord]:
    """Yield the sequences of a run one by one; `run`: see `read_metrics`; `steps=None`: all."""
    run = run or chosen_run(list_runs(run_dir))
    return _records_of(run, run_dir, ROLLOUTS_FILE, _sequence_from, steps)


def read_image(run_dir: str | os.PathLike[str], name: str) -> bytes | None:
    """Return a recorded picture as PNG; None: its file is gone, or the name is not one of ours."""
    # A name from a record may lead out of the folder.
    if not _IMAGE_NAME.fullmatch(name):
        return None
    path = Path(run_dir) / IMAGES_DIR / name
    return path.read_bytes() if path.is_file() else None


def find_run_dir(path: str | os.PathLike[str]) -> Path:
    """Return `path` or its `cb_rollout/`, whichever has records, or raise `ConfigurationError`."""
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
    """Iterate over the records of a run in a file, and of the runs that it resumed.

    Args:
        run: a run of `list_runs`.
        run_dir: a trainer's output_dir, or the folder of records.
        name: the file's name.
        parse: returns the record of a line's JSON.
        steps: yield the records of these steps; None: of all.
    """

    def parse_chosen(row: Mapping[str, Any]) -> T | None:
        step = row["step"]
        if step > _last_step(row["run_id"], run.run_id, run.continues):
            return None
        if steps is not None and step not in steps:
            return None
        return parse(row)

    records = read_records(find_run_dir(run_dir) / name, parse_chosen, "record")
    return (record for record in records if record is not None)


def _last_step(other_id: str, run_id: str, continues: Mapping[str, int]) -> float:
    """Return the last step of a run that counts as a step of `run_id`, which resumed it.

    -1: no step counts.
    """
    if other_id == run_id:
        return math.inf
    return continues.get(other_id, -1)


def _runs_in(run_dir: Path) -> list[Run]:
    """Return the runs of a folder, the oldest first."""
    continues_of: dict[str, dict[str, int]] = {}

    def run_and_step(row: Mapping[str, Any]) -> tuple[str, int]:
        run_id = row["run_id"]
        continues_of.setdefault(run_id, row.get("continues", {}))
        return run_id, int(row["step"])

    metrics = list(read_records(run_dir / METRICS_FILE, run_and_step, "record"))
    sequences = list(read_records(run_dir / ROLLOUTS_FILE, run_and_step, "record"))
    runs: list[Run] = []
    # An id begins with the run's time.
    for run_id in sorted(continues_of):
        continues = continues_of[run_id]
        steps: set[int] = set()
        num_sequences: Counter[int] = Counter()
        for other_id, step in metrics:
            if step <= _last_step(other_id, run_id, continues):
                steps.add(step)
        for other_id, step in sequences:
            if step <= _last_step(other_id, run_id, continues):
                steps.add(step)
                num_sequences[step] += 1
        runs.append(
            Run(
                run_id=run_id,
                continues=continues,
                steps=sorted(steps),
                num_sequences=dict(sorted(num_sequences.items())),
            )
        )
    return runs


def _metrics_from(row: Mapping[str, Any]) -> StepMetrics:
    scalars: dict[str, float] = {}
    for name, value in row["scalars"].items():
        if value is not None:
            scalars[name] = float(value)
    return _record_from(
        StepMetrics,
        row,
        scalars=scalars,
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


def _record_from(record_type: type[T], row: Mapping[str, Any], **converted: Any) -> T:
    """Return a row as a record; `converted`: values that JSON stores in another form."""
    if row["mode"] not in get_args(Mode):
        raise ValueError(f"mode {row['mode']!r} is neither train nor eval")
    values: dict[str, Any] = {}
    for field_of_record in fields(record_type):  # type: ignore[arg-type]
        # Older runs did not record every field.
        if field_of_record.name in row:
            values[field_of_record.name] = row[field_of_record.name]
    return record_type(**values | converted)


def _numbers(values: Iterable[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def json_value(value: Any) -> Any:
    """Return a value as JSON stores it: a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if value is None or isinstance(value, int | str):
        return value
    return _finite(value)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _finite_at(values: list[float], position: int) -> float | None:
    return _finite(values[position]) if values else None
