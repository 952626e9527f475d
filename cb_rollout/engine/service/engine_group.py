"""Keep the engines of one tensor-parallel group in step: together they are one engine.

Each process of the group has a shard of the model, the same requests and an engine of its own, so
equal decisions give equal batches. The first process leads. It decides when requests are admitted
and cancelled, when a step runs and when the engine pauses, and sends each decision as an
`EngineTurn`. The others take the same turns in the same order.

Owns two process groups of gloo: one carries turns, the other agreements on a number. They wait as
long as the default process group does. Decides nothing itself. Called by the thread that uses the
engine.
"""

import enum
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import distributed

from cb_rollout.compat.torch import default_group_timeout
from cb_rollout.engine.request import Request
from cb_rollout.errors import RolloutError

# Bytes of the first message of a turn, which holds all of most turns.
MESSAGE_BYTES = 512

# Bytes of a message's length, at its start.
_LENGTH_BYTES = 4

_ENGINE_NUMBERS = itertools.count()


class TurnKind(enum.StrEnum):
    """The use of an engine in a turn."""

    STEP = "step"
    """Admit and cancel, then run a step."""
    TAKE = "take"
    """Admit and cancel only."""
    PAUSE = "pause"
    """Pause for the thread that pauses on each process."""


@dataclass(frozen=True, slots=True)
class EngineTurn:
    """One decision of the process that leads."""

    kind: TurnKind
    admitted: Sequence[tuple[str, int]] = ()
    """Requests to admit, in order: the id, and a checksum of what it asks for."""
    cancelled: Sequence[str] = ()
    """Ids of the requests to end after that."""
    tokens: int = 0
    """Checksum of all tokens sampled before this turn."""


def request_checksum(request: Request) -> int:
    """Return a checksum of a request's prompt, seed and length, equal on every process."""
    asked = request.prompt_ids, request.seed, request.max_new_tokens
    return zlib.crc32(repr(asked).encode())


class EngineGroup:
    """Connect the engines of one tensor-parallel group.

    All processes of the group make it, and call its collective methods, at the same places.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        """Open the connections.

        Args:
            group: the processes that share the layers of a model, in order of their rank in it.
        """
        self.ranks = distributed.get_process_group_ranks(group)
        """Global ranks of the processes; the first one leads."""
        self.rank = distributed.get_rank()
        self.number = next(_ENGINE_NUMBERS)
        """Number of this engine among those of the process, equal over the group."""
        self._turns, self._agreements = self._create_group(), self._create_group()

    def _create_group(self) -> distributed.ProcessGroup:
        created = distributed.new_group(
            self.ranks,
            timeout=default_group_timeout(),
            backend="gloo",
            use_local_synchronization=True,
        )
        assert isinstance(created, distributed.ProcessGroup)
        return created

    @property
    def is_leader(self) -> bool:
        """Return whether this process decides."""
        return self.rank == self.ranks[0]

    @property
    def place(self) -> int:
        """Return this process's place in the group, from 0."""
        return self.ranks.index(self.rank)

    @property
    def data_parallel_rank(self) -> int:
        """Return the number of this group among the groups of its size."""
        return self.ranks[0] // len(self.ranks)

    def smallest(self, value: int) -> int:
        """Return the smallest value of all processes; collective.

        Raises:
            RolloutError: a process of the group is gone, or did not call in time.
        """
        shared = torch.tensor([int(value)])
        try:
            distributed.all_reduce(shared, distributed.ReduceOp.MIN, self._agreements)
        except RuntimeError as error:
            self._raise_gone("all processes to agree on the cache", error)
        return int(shared)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every process, in order of their rank in the group; collective.

        Args:
            value: anything that can be pickled.

        Raises:
            RolloutError: a process of the group is gone, or did not call in time.
        """
        values: list[Any] = [None] * len(self.ranks)
        try:
            distributed.all_gather_object(values, value, self._agreements)
        except RuntimeError as error:
            self._raise_gone("a value of each process", error)
        return values

    def send(self, turn: EngineTurn) -> None:
        """Send a turn to the processes that follow; called by the one that leads."""
        text = json.dumps([turn.kind, turn.admitted, turn.cancelled, turn.tokens]).encode()
        size = max(MESSAGE_BYTES, _LENGTH_BYTES + len(text))
        length = len(text).to_bytes(_LENGTH_BYTES, "little")
        message = torch.frombuffer(bytearray((length + text).ljust(size, b"\0")), dtype=torch.uint8)
        self._broadcast(message[:MESSAGE_BYTES])
        if size > MESSAGE_BYTES:
            self._broadcast(message[MESSAGE_BYTES:])

    def receive(self) -> EngineTurn:
        """Wait for the next turn; called by a process that follows.

        Raises:
            RolloutError: the process that leads is gone, or sent nothing in time.
        """
        first = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self._broadcast(first)
        length = int.from_bytes(first[:_LENGTH_BYTES].numpy().tobytes(), "little")
        text = first[_LENGTH_BYTES:].numpy().tobytes()[:length]
        if len(text) < length:
            rest = torch.empty(length - len(text), dtype=torch.uint8)
            self._broadcast(rest)
            text += rest.numpy().tobytes()
        kind, admitted, cancelled, tokens = json.loads(text)
        return EngineTurn(TurnKind(kind), [tuple(pair) for pair in admitted], cancelled, tokens)

    def _broadcast(self, message: torch.Tensor) -> None:
        try:
            distributed.broadcast(message, self.ranks[0], self._turns)
        except RuntimeError as error:
            self._raise_gone(f"the decisions of rank {self.ranks[0]}", error)

    def _raise_gone(self, awaited: str, error: RuntimeError) -> NoReturn:
        raise RolloutError(
            f"rank {self.rank} waited for {awaited}, in the tensor-parallel group of ranks "
            f"{self.ranks}, and a process ended or did not make the same call: {error}. Every "
            "process of a tensor-parallel group must make the same calls in the same order."
        ) from error
