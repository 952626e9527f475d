"""Raise one process's failure on all processes of a run, and exchange values between them.

Owns a key in the process group's store, which a thread of every process polls once a second. A
process blocked in a torch collective cannot be interrupted, so it is ended after a grace period. A
killed process writes no key; its launcher ends the others. Called from the training thread.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import gather_object, send_to_device

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.engine.service.lockstep import EngineGroup
from cb_rollout.errors import RolloutError, error_text

T = TypeVar("T")

# Polling interval of the key; a poll is one small message.
POLL_SECONDS = 1.0
# Time for a process to end by itself: its broken collective raises, or its step completes.
GRACE_SECONDS = 10.0


class FailureWatch:
    """Report this process's failure to the others, and raise theirs here."""

    def __init__(self, store: Any, rank: int) -> None:
        """Clone the store that all processes share; no thread starts before `watched()`."""
        self._store, self._rank = store.clone(), rank
        self._num_watches = 0
        self._is_watching = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a block that every process runs; a failure in any of them raises in all.

        A process that did not fail first raises `RolloutError`, caused by its own error.
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
            failure = self._report(key, f"rank {self._rank}: {error_text(error)}")
            if not failure.startswith(f"rank {self._rank}:"):
                raise RolloutError(f"another process failed first. {failure}") from error
            raise
        finally:
            done.set()
            self._is_watching = False

    def _report(self, key: str, failure: str) -> str:
        """Store the failure if it is the first; return the first."""
        try:
            first = self._store.compare_set(key, "", failure).decode()
        except RuntimeError:
            # The process that holds the store has ended, and so has the store.
            return failure
        if first == failure:
            # The store may end with this process, so leave the others time to read it.
            time.sleep(2 * POLL_SECONDS)
        return first

    def _watch(self, key: str, done: threading.Event) -> None:
        while not done.wait(POLL_SECONDS):
            try:
                if not self._store.check([key]):
                    continue
                failure = self._store.get(key).decode()
            except RuntimeError:
                return
            if not done.wait(GRACE_SECONDS):
                self.end_process(failure)
            return

    def end_process(self, failure: str) -> None:
        """Exit without unwinding, because the main thread is blocked in a collective."""
        print(  # noqa: T201 - the process exits before a logger would flush
            f"cb_rollout: another process failed first, and this one waits for it. {failure}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def create_failure_watch() -> FailureWatch | None:
    """Create a watch over the default process group; None for a single process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    return FailureWatch(fsdp_compat.default_store(), dist.get_rank())


def create_group_watch(group: EngineGroup) -> FailureWatch:
    """Create a watch over the processes that share the layers of one engine's model."""
    name = f"cb_rollout/engine/{group.ranks[0]}/{group.number}"
    return FailureWatch(dist.PrefixStore(name, fsdp_compat.default_store()), group.rank)


def largest_of_all(accelerator: Any, here: float) -> float:
    """Return the largest value of all processes, so that they act alike; all call this."""
    value = torch.tensor([here], dtype=torch.float32, device=accelerator.device)
    return float(accelerator.gather(value).max())


def of_all_processes(value: T) -> list[T]:
    """Return the value of every process by rank, pickled in transit; all call this.

    Without a process group, returns only this process's value.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rank_of_all() -> int:
    """Return the index of this process in the list that `of_all_processes` returns."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def deal(accelerator: Any, items: list[T], num_wanted: int) -> tuple[list[T], int]:
    """Move surplus items to processes that have too few; all call this.

    Items are tensors and picklable objects. Returns this process's items, at most `num_wanted`, and
    how many items all processes together still lack.
    """
    counts = gather_object([len(items)])
    num_lacking = [max(0, num_wanted - count) for count in counts]
    surplus = max(0, sum(counts) - num_wanted * len(counts) + sum(num_lacking))
    if not surplus or not sum(num_lacking):
        return items[:num_wanted], sum(num_lacking)
    spare = gather_object(send_to_device(items[num_wanted:], "cpu"))
    rank = accelerator.process_index
    start = sum(num_lacking[:rank])
    dealt = spare[start : start + num_lacking[rank]]
    kept = items[:num_wanted] + send_to_device(dealt, accelerator.device)
    return kept, max(0, sum(num_lacking) - surplus)
