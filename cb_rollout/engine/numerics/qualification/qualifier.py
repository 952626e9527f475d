"""Decide whether code that could crash this process may run in it.

A trial runs the code in a child process, and its verdict decides. Verdicts are stored, so the next
process needs no trial. Any thread may call; usually the one that makes an engine does.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cb_rollout.engine.numerics.qualification.child import run_in_child
from cb_rollout.engine.numerics.qualification.verdicts import (
    Verdict,
    VerdictStore,
    key_hash,
    open_store,
)

# The environment variable, and its values that switch trials off.
SWITCH = "CB_ROLLOUT_QUALIFY"
OFF = ("0", "off", "false", "no")

ADVICE = "`cb-rollout doctor MODEL --qualify` tries again"

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Code that may run in this process after it passed a trial in a child process."""

    name: str
    """For messages."""
    function: str
    """"package.module:name" of the trial. Takes `argument`; returns a dict with "fault", a text
    that is empty where nothing is wrong, and "milliseconds", the time of each path by its name."""
    argument: Mapping[str, Any]
    """JSON values."""
    key: Mapping[str, Any]
    """JSON values: everything that the verdict depends on."""
    otherwise: str
    """The path that runs if the trial is not passed, for messages."""
    if_untried: str = ""
    """The path that runs if there could be no trial; "": the same path."""
    limit_seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the child besides those of this process."""


class UnprovedError(Exception):
    """Code failed its trial in a child process, or had none."""


class UntriedError(UnprovedError):
    """The trial could not run: no process, no device or no memory for it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A subject that this process asked about, and the answer."""

    subject: Subject
    verdict: Verdict | None
    """None: it could not be tried."""
    obstacle: str = ""
    """Why it could not be tried."""

    @property
    def is_proved(self) -> bool:
        return self.verdict is not None and not self.verdict.fault

    def __str__(self) -> str:
        return self.obstacle if self.verdict is None else str(self.verdict)


_QUALIFYING = threading.RLock()
_TRIALS: dict[str, Trial] = {}
"""Trials that this process asked about, by the hash of their keys."""
_believed_since = 0.0


def is_switched_off() -> bool:
    """Return whether the environment switches trials off."""
    return os.environ.get(SWITCH, "").lower() in OFF


def require_proved(subject: Subject) -> Verdict | None:
    """Return the verdict of a subject that may run; None if trials are switched off.

    The subject is tried in a child process unless a verdict for its key is stored.

    Raises:
        UnprovedError: the trial failed, or could not run.
    """
    if is_switched_off():
        return None
    name = key_hash(subject.key)
    with _QUALIFYING:
        trial = _TRIALS.get(name)
        if trial is None:
            trial = _TRIALS[name] = _find(subject)
            if not trial.is_proved:
                otherwise = subject.otherwise
                if trial.verdict is None:
                    otherwise = subject.if_untried or otherwise
                _LOGGER.warning("%s: %s; %s; %s", subject.name, trial, otherwise, ADVICE)
    if trial.verdict is None:
        raise UntriedError(f"{subject.name}: {trial}")
    if not trial.is_proved:
        raise UnprovedError(f"{subject.name}: {trial}")
    return trial.verdict


def trials() -> list[Trial]:
    """Return the trials that this process asked about, in order."""
    with _QUALIFYING:
        return list(_TRIALS.values())


def forget_trials() -> None:
    """Read verdicts from the store again when they are next asked for."""
    with _QUALIFYING:
        _TRIALS.clear()


@contextmanager
def trying_anew() -> Iterator[None]:
    """Ignore verdicts older than this context: every subject is tried again."""
    global _believed_since
    before = _believed_since
    forget_trials()
    _believed_since = time.time()
    try:
        yield
    finally:
        _believed_since = before


def _find(subject: Subject) -> Trial:
    """Read a subject's verdict, or try the subject; one process per machine at a time."""
    store = open_store()
    if store is None:
        return _try(subject)
    verdict = _read(store, subject)
    if verdict is not None:
        return Trial(subject, verdict)
    with store.locked(subject.key, subject.limit_seconds) as has_lock:
        # Another process may have found it meanwhile.
        verdict = _read(store, subject) if has_lock else None
        if verdict is not None:
            return Trial(subject, verdict)
        trial = _try(subject)
        if trial.verdict is not None:
            try:
                store.write(subject.key, trial.verdict)
            except OSError as error:
                _LOGGER.warning("a verdict is kept for this process only: %s", error)
        return trial


def _read(store: VerdictStore, subject: Subject) -> Verdict | None:
    verdict = store.read(subject.key)
    if verdict is None or verdict.tried_at < _believed_since:
        return None
    return verdict


def _try(subject: Subject) -> Trial:
    """Try a subject in a child process."""
    _LOGGER.info("first run of %s here: trying it in a child process", subject.name)
    result = run_in_child(
        subject.function,
        subject.argument,
        limit_seconds=subject.limit_seconds,
        environment=subject.environment,
    )
    if result.obstacle:
        return Trial(subject, None, f"could not be tried, {result.obstacle}")
    fault = result.fault
    milliseconds: dict[str, float] = {}
    if not fault:
        fault = result.answer["fault"]
        milliseconds = result.answer["milliseconds"]
    verdict = Verdict(
        fault=fault,
        ran_out_of_time=result.ran_out_of_time,
        milliseconds=milliseconds,
        seconds=result.seconds,
        tried_at=time.time(),
    )
    _LOGGER.info("%s: %s", subject.name, verdict)
    return Trial(subject, verdict)
