"""Sequences in flight: enough to keep the batch full, and no more.

Owns which rows are asked for and which results have come. The calling thread encodes and hands
over; the manager's thread generates meanwhile.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import InvalidRequestError
from cb_rollout.tools.dataset.rows import Row
from cb_rollout.types import GenerationOutput

IN_FLIGHT_PER_SEAT = 2
# A full batch runs and another waits, so that a sequence that ends is replaced at once.

POLL_SECONDS = 0.25
# How often whoever waits looks up while nothing ends.


class Landed(NamedTuple):
    """A sequence that ended, well or not."""

    row: Row
    sample: int
    """Its number among the row's sequences, from 0."""
    output: GenerationOutput | None
    """None: it was refused before it was queued."""
    error: str | None


class Flight:
    """Keeps requests in flight until every row has its sequences."""

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        params: SamplingParams,
        token_ids: Callable[[Row], Sequence[int]],
    ) -> None:
        """Ask for nothing yet.

        Args:
            manager: started.
            params: how each sequence is sampled. With a `seed`, a sequence's draws follow from it,
                its row's id and its number alone, whatever was generated before it.
            token_ids: encodes a row; may raise `InvalidRequestError`.
        """
        self._manager, self._params, self._token_ids = manager, params, token_ids
        self._most = IN_FLIGHT_PER_SEAT * manager.engine.limits.max_requests
        self._in_flight: dict[str, tuple[Row, int]] = {}
        self._output_queue = OutputQueue()

    def landings(self, wanted: Iterator[tuple[Row, list[int]]]) -> Iterator[list[Landed]]:
        """Generate all that is wanted; yield what has ended, at least every `POLL_SECONDS`.

        Args:
            wanted: rows, and the numbers of their sequences to generate. Read as room allows.
        """
        upcoming = next(wanted, None)
        while upcoming or self._in_flight:
            landed: list[Landed] = []
            while upcoming and self._has_room_for(len(upcoming[1])):
                landed += self._take_off(*upcoming)
                upcoming = next(wanted, None)
            if self._in_flight:
                output = self._output_queue.take(timeout=POLL_SECONDS)
                while output is not None:
                    row, sample = self._in_flight.pop(output.request_id)
                    landed.append(Landed(row, sample, output, output.error))
                    output = self._output_queue.take(timeout=0)
            yield landed

    def _has_room_for(self, num_sequences: int) -> bool:
        return not self._in_flight or len(self._in_flight) + num_sequences <= self._most

    def _take_off(self, row: Row, samples: list[int]) -> list[Landed]:
        """Queue a row's sequences together, so that their prompt is computed once."""
        params = replace(self._params, seed=_row_seed(self._params.seed, row))
        try:
            requests = self._manager.input_processor.requests(
                [self._token_ids(row)] * len(samples), [params] * len(samples), members=samples
            )
        except InvalidRequestError as error:
            return [Landed(row, sample, None, str(error)) for sample in samples]
        self._manager.loop.submit(requests, self._output_queue)
        for request, sample in zip(requests, samples, strict=True):
            self._in_flight[request.request_id] = (row, sample)
        return []


def _row_seed(seed: int | None, row: Row) -> int | None:
    """A seed for the row; its sequences differ by their numbers."""
    if seed is None:
        return None
    digest = hashlib.blake2b(repr((seed, row.id)).encode(), digest_size=7).digest()
    return int.from_bytes(digest)
