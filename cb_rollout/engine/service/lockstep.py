"""Keep the engines of a tensor-parallel group in step: together they are one engine.

Each process has a shard of the model, the same requests and its own engine, so equal decisions give
equal batches. The first process decides, and sends each decision as a `LockstepCommand`, which the
others follow in order. Called by the thread that uses the engine.
"""

import enum
import itertools
import threading
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from cb_rollout.compat.torch import default_group_timeout
from cb_rollout.engine.request import Request
from cb_rollout.errors import RolloutError

_ENGINE_NUMBERS = itertools.count()


class CommandKind(enum.StrEnum):
    """Action that a command asks the engines for."""

    STEP = "step"
    TAKE = "take"
    """Admit and cancel, without a step."""
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class LockstepCommand:
    """One decision of the process that leads."""

    kind: CommandKind
    admitted: Sequence[tuple[str, int]] = ()
    """Requests to admit, in order: the id, and a checksum of the request."""
    cancelled: Sequence[str] = ()
    """Ids of the requests to end after that."""
    tokens: int = 0
    """Checksum of all tokens sampled before this command."""


def request_checksum(request: Request) -> int:
    """Return a checksum of a request's prompt, seed and length, equal on every process."""
    asked = (request.prompt_ids, request.seed, request.max_new_tokens)
    return zlib.crc32(repr(asked).encode())


class EngineGroup:
    """Connect the engines of a tensor-parallel group.

    Every process of the group creates it, and calls its collective methods, in the same order. A
    method raises `RolloutError` if another process is gone, or did not make the call in time.
    """

    def __init__(
        self, group: distributed.ProcessGroup, timeout_seconds: float | None = None
    ) -> None:
        """Open the connections of the processes that share a model's layers, in order of rank.

        A wait for another process ends after `timeout_seconds`; None: after the timeout of
        `init_process_group`.
        """
        self._timeout_seconds = timeout_seconds
        self.ranks = distributed.get_process_group_ranks(group)
        """Global ranks of the processes; the first one leads."""
        self.rank = distributed.get_rank()
        self.group_rank = self.ranks.index(self.rank)
        self.number = next(_ENGINE_NUMBERS)
        """Number of this engine among those of its process; equal on all processes of the group."""
        self._commands = self._create_group()
        self._agreements = self._create_group()

    def _create_group(self) -> distributed.ProcessGroup:
        timeout = default_group_timeout()
        if self._timeout_seconds is not None:
            timeout = timedelta(seconds=self._timeout_seconds)
        created = distributed.new_group(
            self.ranks,
            timeout=timeout,
            backend="gloo",
            use_local_synchronization=True,
        )
        assert isinstance(created, distributed.ProcessGroup)
        return created

    @property
    def data_parallel_rank(self) -> int:
        """Return this group's index among the groups of the same size."""
        return self.ranks[0] // len(self.ranks)

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest value of all processes; collective."""
        return min(self.gather(int(value)))

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in order of rank; values are pickled; collective."""
        values: list[Any] = [None] * len(self.ranks)
        with self._awaiting("a value of each process"):
            distributed.all_gather_object(values, value, self._agreements)
        return values

    def send(self, command: LockstepCommand | None) -> Any:
        """Send the leading process's command, and return it; the others pass None, and wait."""
        item = [command]
        with self._awaiting(f"the decisions of rank {self.ranks[0]}"):
            distributed.broadcast_object_list(item, self.ranks[0], self._commands)
        return item[0]

    @contextmanager
    def _awaiting(self, awaited: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            late = ""
            if self._timeout_seconds is not None:
                late = f", within cpu_group_timeout={self._timeout_seconds:g} seconds; raise it"
            raise RolloutError(
                f"rank {self.rank} waited for {awaited}, in the tensor-parallel group of ranks "
                f"{self.ranks}, but another process ended or did not make the same call: {error}. "
                "Every process of a tensor-parallel group must make the same calls in the same "
                f"order{late}."
            ) from error


class Lockstep:
    """Send commands in the process that leads, and take them in the processes that follow.

    Called under the condition of the loop, `changed`, except `record`.
    """

    def __init__(self, group: EngineGroup, changed: threading.Condition) -> None:
        self._group = group
        self._changed = changed
        self.follows = group.group_rank > 0
        """True where another process decides."""
        self._next: LockstepCommand | None = None
        self._pause: LockstepCommand | None = None
        self._tokens_checksum = 0

    def record(self, touched: Iterable[Request]) -> None:
        """Add the newest token of each of these requests to the checksum."""
        sampled = array("q")
        for request in touched:
            sampled.append(request.num_generated)
            sampled.append(request.token_ids[-1])
        self._tokens_checksum = zlib.crc32(sampled, self._tokens_checksum)

    def lead(
        self, kind: CommandKind, admitted: Sequence[Request] = (), cancelled: Sequence[str] = ()
    ) -> None:
        checksums = [(request.request_id, request_checksum(request)) for request in admitted]
        self._group.send(LockstepCommand(kind, checksums, cancelled, self._tokens_checksum))

    def take(self, live: Mapping[str, tuple[Request, Any]]) -> LockstepCommand | None:
        """Wait for the next command to admit, cancel or step; `live` are this process's requests.

        Returns None if this process must first pause or submit a request. Raises `RolloutError` if
        the processes are not in step, or the leading one is gone.
        """
        command = self._next_command()
        is_known = all(request_id in live for request_id, _ in command.admitted)
        if command.kind is CommandKind.PAUSE or not is_known:
            return None
        self._require_in_step(command, live)
        self._next = None
        self._changed.notify_all()
        return command

    def _next_command(self) -> LockstepCommand:
        """Return the command to carry out next; it is received once, and waits until it is due."""
        command = self._next
        if command is None:
            command = self._group.send(None)
            self._next = command
        return command

    def may_pause(self) -> bool:
        """Return whether a pause may begin: in a follower, only when the leading process pauses."""
        if not self.follows:
            return True
        command = self._next_command()
        if command.kind is not CommandKind.PAUSE:
            self._changed.notify_all()
            return False
        self._pause = command
        self._next = None
        return True

    def pause(self) -> None:
        if not self.follows:
            self.lead(CommandKind.PAUSE)
        else:
            assert self._pause is not None
            self._require_in_step(self._pause, {})

    def _require_in_step(
        self, command: LockstepCommand, live: Mapping[str, tuple[Request, Any]]
    ) -> None:
        rank = self._group.rank
        leader = self._group.ranks[0]
        if command.tokens != self._tokens_checksum:
            raise RolloutError(
                f"rank {rank} and rank {leader} of a tensor-parallel group sampled different "
                "tokens; run them on the same kind of device with the same libraries, and make "
                "the same calls on both."
            )
        for request_id, checksum in command.admitted:
            request, _ = live[request_id]
            if request_checksum(request) != checksum:
                raise RolloutError(
                    f"request {request_id!r} has a different prompt, seed or length on rank {rank} "
                    f"than on rank {leader}; every process of a tensor-parallel group must make "
                    "the same calls in the same order."
                )
