"""The file of results: a JSON line for each sequence, which is never generated again.

A half line that a killed process left is removed. A file is resumed under the settings that it was
started with, which are in a file beside it. One process at a time may write.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from cb_rollout.errors import ConfigurationError, abbreviated
from cb_rollout.metrics import jsonl
from cb_rollout.metrics.write_faults import write_advice
from cb_rollout.tools.dataset.rows import UNREADABLE, RowId

SETTINGS_SUFFIX = ".settings.json"

# Settings that affect only the scores: the function's name, and its code.
SCORE_SETTINGS = ("evaluate", "evaluate_code")

# A killed process loses no written line; a power failure loses at most this much.
SYNC_SECONDS = 1.0


class ResultFile(AbstractContextManager["ResultFile"]):
    """A file of results, resumed after its last whole line, and the index of its sequences.

    Raises `ConfigurationError` for a file that was started under other settings, does not hold
    results, cannot be written, or that another process writes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, Any],
        *,
        overwrite: bool = False,
        scored: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        """Open a file, or begin one.

        Args:
            path: JSONL file; its settings are in a file beside it.
            settings: the inputs that determine the results, as JSON values.
            overwrite: discard the results.
            scored: returns a result with new scores; all results of the file are scored again, and
                the settings of scores may differ. None: the scores stay.
        """
        self.path = Path(path)
        self.num_done = 0
        self.num_failed = 0
        self.first_error: str | None = None
        self._settings_path = Path(f"{path}{SETTINGS_SUFFIX}")
        # Convert the settings as they will be read back: JSON turns tuples into lists.
        self._settings = json.loads(json.dumps(settings))
        self._scored = scored
        self._samples: dict[RowId, int] = {}
        """The sequences of each row that have a result: bit n is sequence n."""
        self._synced = time.monotonic()
        with self._writing():
            self._file = self._opened()
            try:
                self._start(overwrite)
            except BaseException:
                self._file.close()
                raise

    def _start(self, overwrite: bool) -> None:
        if overwrite:
            self._file.truncate(0)
        if not self._file.seek(0, os.SEEK_END):
            self._write_settings()
            return
        self._require_same_settings()
        if self._scored is not None:
            lines = b"".join(jsonl.json_line(self._scored(result)) for result in self)
            self._file.close()
            jsonl.write_whole(self.path, lines, survives_power_failure=True)
            self._file = self._opened()
        self._write_settings()
        for result in self:
            self._index(result)
        jsonl.remove_half_line(self.path)
        self._sync()

    def _write_settings(self) -> None:
        settings = json.dumps(self._settings, indent=1).encode()
        jsonl.write_whole(self._settings_path, settings, survives_power_failure=True)

    def has(self, row_id: RowId, sample: int) -> bool:
        """Return whether sequence number `sample` of a row has a result."""
        samples = self._samples.get(row_id, 0)
        return bool(samples & (1 << sample))

    def append(self, results: list[dict[str, Any]]) -> None:
        """Append results of new sequences with a single write."""
        for result in results:
            self._index(result)
        try:
            jsonl.append_lines(self._file, b"".join(map(jsonl.json_line, results)))
        except OSError as error:
            raise ConfigurationError(
                f"{self.path} cannot be written ({error.strerror}). "
                f"{write_advice(error, self.path, 'output')} {sum(1 for _ in self)} sequences are "
                "in it: run the same again to go on from them."
            ) from error
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return jsonl.read_records(self.path, _checked, "result")

    def __exit__(self, *_: object) -> None:
        try:
            self._sync()
        finally:
            self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an operating-system error inside the block into a `ConfigurationError`."""
        try:
            yield
        except OSError as error:
            raise ConfigurationError(
                f"{error.filename or self.path} cannot be written ({error.strerror}). "
                f"{write_advice(error, error.filename or self.path, 'output')}"
            ) from error

    def _sync(self) -> None:
        with self._writing():
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _opened(self) -> FileIO:
        file = self.path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConfigurationError(
                f"another process writes {self.path}; wait for it, or name another output."
            ) from error
        except OSError:
            # The file system has no locks.
            pass
        return file

    def _require_same_settings(self) -> None:
        advice = "name another output, or overwrite this one"
        try:
            started_with = dict(json.loads(self._settings_path.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{self.path} is there but {self._settings_path.name}, which says what it was made "
                f"with, cannot be read; {advice}."
            ) from error
        may_differ = () if self._scored is None else SCORE_SETTINGS
        changed = list(_differences("", started_with, self._settings, may_differ))
        if not changed:
            return
        if all(name in SCORE_SETTINGS for name, _ in changed):
            advice = f"set rescore=True to score all results again, {advice}"
        texts = [text for _, text in changed]
        why = f"was started with other settings: {abbreviated(texts, '; ')}"
        raise ConfigurationError(f"{self.path} {why}. Resume with the same, {advice}.")

    def _index(self, result: Mapping[str, Any]) -> None:
        row_id = result["id"]
        sample = result["sample"]
        if self.has(row_id, sample):
            twice = f"sequence {sample} of row {row_id!r} twice"
            raise ConfigurationError(f"{self.path} has {twice}; remove one line.")
        samples = self._samples.get(row_id, 0)
        self._samples[row_id] = samples | (1 << sample)
        self.num_done += 1
        if "error" in result:
            self.num_failed += 1
            self.first_error = self.first_error or str(result["error"])


def _differences(
    prefix: str, before: Mapping[str, Any], now: Mapping[str, Any], left_out: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the path of each setting that differs, nested settings too, and a text about it."""
    for name in dict.fromkeys([*before, *now]):
        old = before.get(name)
        new = now.get(name)
        if old == new or name in left_out:
            continue
        # A row without its picture was an error; the picture may come later.
        if old == UNREADABLE:
            continue
        path = f"{prefix}{name}"
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(f"{path}.", old, new)
        else:
            yield path, f"{path} was {old!r:.60} and is {new!r:.60}"


def _checked(result: dict[str, Any]) -> dict[str, Any]:
    row_id = result["id"]
    sample = result["sample"]
    if not isinstance(row_id, int | str) or not isinstance(sample, int) or sample < 0:
        raise TypeError(f"id {row_id!r} and sample {sample!r} name no sequence")
    return result
