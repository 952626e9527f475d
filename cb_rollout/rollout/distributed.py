"""A failure on one process of a training run is raised on all of them.

Owns a note in the process group's store, which every process reads once a second while it trains.
Collectives are torch's: a process that waits in one for a process that failed cannot be woken, so
after a grace it is ended. A process that is killed leaves no note; its launcher ends the others.
"""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from cb_rollout.compat import fsdp as _compat_fsdp
from cb_rollout.errors import RolloutError, error_text

POLL_SECONDS = 1.0
# Between two looks at the note; a look is one small message.
GRACE_SECONDS = 10.0
# In which a process may end by itself, its broken collective raising or its step going on.


class FailureWatch:
    """Tells the other processes of this one's failure, and this one of theirs."""

    def __init__(
        self,
        store: Any,
        rank: int,
        end_process: Callable[[str], None] | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """Watch nothing yet.

        Args:
            store: a `torch.distributed.Store`, shared by all processes.
            rank: this process's.
            end_process: called with what happened when this process is still at work
                `grace_seconds` after another one failed; None: end it with exit code 1.
            grace_seconds: see there.
        """
        self._store, self._rank = store.clone(), rank
        self._end_process = end_process or _end_process
        self._grace_seconds = grace_seconds
        self._num_watches = 0
        self._is_watching = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Work that every process does together; a failure of any raises on all.

        Raises:
            RolloutError: another process failed; what this one met then is its cause.
        """
        if self._is_watching:
            yield
            return
        key = f"cb_rollout/failure/{self._num_watches}"
        self._num_watches += 1
        self._is_watching = True
        done = threading.Event()
        threading.Thread(target=self._watch, args=(key, done), daemon=True).start()
        try:
            yield
        except BaseException as error:
            done.set()
            failure = self._note(key, f"rank {self._rank}: {error_text(error)}")
            if not failure.startswith(f"rank {self._rank}:"):
                raise RolloutError(f"another process failed first. {failure}") from error
            raise
        finally:
            done.set()
            self._is_watching = False

    def watching(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, watched."""

        @functools.wraps(work)
        def watched_work(*args: Any, **kwargs: Any) -> Any:
            with self.watched():
                return work(*args, **kwargs)

        return watched_work

    def _note(self, key: str, failure: str) -> str:
        """Leave the note if it is the first; returns the first."""
        try:
            first = self._store.compare_set(key, "", failure).decode()
        except RuntimeError:
            # Whoever holds the store is gone, and with it every note.
            return failure
        if first == failure:
            # The store may end with this process: the others get time to read it.
            time.sleep(2 * POLL_SECONDS)
        return first

    def _watch(self, key: str, done: threading.Event) -> None:
        while not done.wait(POLL_SECONDS):
            try:
                has_failed = self._store.check([key])
                failure = self._store.get(key).decode() if has_failed else ""
            except RuntimeError:
                return
            if has_failed:
                if not done.wait(self._grace_seconds):
                    self._end_process(failure)
                return


def _end_process(failure: str) -> None:
    """Leave without unwinding: the main thread waits for a process that will not come."""
    print(  # noqa: T201 - the last words of this process
        f"cb_rollout: another process failed first, and this one waits for it. {failure}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def is_distributed() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def create_failure_watch() -> FailureWatch | None:
    """A watch over the processes of the default group; None where this one is alone."""
    if not is_distributed():
        return None
    return FailureWatch(_compat_fsdp.default_store(), dist.get_rank())
