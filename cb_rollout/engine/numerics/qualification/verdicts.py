"""Store verdicts of trials in the user's cache folder, a file each, for later processes.

The folder is the user's alone (`compat.inductor.cache_folder`). A file that is damaged, or that
another user owns or may write to, is ignored. Any thread may call.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cb_rollout.compat.inductor import cache_folder, require_own
from cb_rollout.errors import ConfigurationError, error_text

# Most bytes of a verdict's file; a larger file is damaged.
MOST_BYTES = 64 << 10

# A timeout counts as a fault only for this long: the machine may have been busy.
SECONDS_OF_A_TIMEOUT = 24 * 3600

POLLS_PER_SECOND = 20

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a trial in a child process."""

    fault: str = ""
    """The fault that was found; "": none."""
    ran_out_of_time: bool = False
    """True if the fault is the time limit alone."""
    milliseconds: Mapping[str, float]
    """Time of each path that was tried, by its name."""
    seconds: float
    """Time of the child process."""
    tried_at: float
    """Seconds since 1970."""
    is_stored: bool = False
    """True if an earlier process, or another one, found it."""

    def __str__(self) -> str:
        day = datetime.fromtimestamp(self.tried_at, UTC).strftime("%Y-%m-%d")
        source = "stored" if self.is_stored else f"{self.seconds:.1f} s"
        shown = self.fault or "proved"
        return f"{shown} in a process of its own ({day}, {source})"


def key_hash(key: Mapping[str, Any]) -> str:
    """Return the file name of a key's verdict."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


class VerdictStore:
    """The verdicts of a user's cache folder.

    Raises `ConfigurationError` if no cache folder belongs to the user alone.
    """

    def __init__(self) -> None:
        self.folder = cache_folder("verdicts")
        self._told_of: set[Path] = set()
        """Damaged files that were logged."""

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self.folder / f"{key_hash(key)}.json"

    def read(self, key: Mapping[str, Any]) -> Verdict | None:
        """Return the verdict of a key; None if there is no valid verdict."""
        path = self._path(key)
        try:
            verdict = _read(path, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            # `ConfigurationError` is a ValueError.
            if path not in self._told_of:
                self._told_of.add(path)
                text = error_text(error)
                _LOGGER.warning("a stored verdict is unusable, so its trial runs again: %s", text)
            return None
        age = time.time() - verdict.tried_at
        if verdict.ran_out_of_time and not 0 <= age < SECONDS_OF_A_TIMEOUT:
            return None
        return replace(verdict, is_stored=True)

    def write(self, key: Mapping[str, Any], verdict: Verdict) -> None:
        """Store a verdict, replacing an earlier one.

        Raises:
            OSError: it cannot be written.
        """
        text = json.dumps({"key": dict(key), "verdict": asdict(verdict)})
        # Made with mode 0600, and moved to its place whole.
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".new")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(name).replace(self._path(key))
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def locked(self, key: Mapping[str, Any], limit_seconds: float) -> Iterator[bool]:
        """Let one process at a time find a verdict; yield whether the lock was taken.

        The system drops the lock of a process that dies. If the lock is not free within the time
        limit, or the file system has no locks, go on without it: a repeated trial does no harm.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(self._path(key).with_suffix(".lock"), flags, 0o600)
        except OSError:
            yield False
            return
        try:
            yield _lock(handle, limit_seconds)
        finally:
            os.close(handle)


def _lock(handle: int, limit_seconds: float) -> bool:
    """Lock a file, unless another process keeps it locked past the time limit."""
    deadline = time.monotonic() + limit_seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(1 / POLLS_PER_SECOND)
        except OSError:
            return False
        else:
            return True


def _open_no_link(path: str, flags: int) -> int:
    # Opening a pipe would wait.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _read(path: Path, key: Mapping[str, Any]) -> Verdict:
    """Read a verdict, or raise an error that says what is wrong with its file."""
    with open(path, "rb", opener=_open_no_link) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is no file")
        require_own(path)
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES} bytes")
    try:
        read = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if not isinstance(read, dict) or read.get("key") != json.loads(json.dumps(dict(key))):
        raise ValueError(f"{path} holds the verdict on something else")
    verdict = Verdict(**read["verdict"])
    if not _is_whole(verdict):
        raise ValueError(f"{path} holds no verdict")
    return verdict


def _is_whole(verdict: Verdict) -> bool:
    """Return whether every field that was read has a value of its type."""
    texts = isinstance(verdict.fault, str) and isinstance(verdict.ran_out_of_time, bool)
    if not texts or not isinstance(verdict.milliseconds, dict):
        return False
    numbers = [verdict.seconds, verdict.tried_at, *verdict.milliseconds.values()]
    if not all(isinstance(number, int | float) for number in numbers):
        return False
    # Clocks of machines that share a home may differ by less.
    return 0 <= verdict.tried_at <= time.time() + SECONDS_OF_A_TIMEOUT


def open_store() -> VerdictStore | None:
    """Return the store; log the reason and return None if the user has no cache folder."""
    try:
        return VerdictStore()
    except ConfigurationError as error:
        _LOGGER.warning(
            "verdicts of trials are kept for this process only, so the next one repeats them: %s",
            error,
        )
        return None
