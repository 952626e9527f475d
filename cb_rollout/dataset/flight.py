"""Sequences in flight: enough to keep the batch full, and no more.

Owns which rows are asked for and which results have come. The calling thread encodes and hands
over; the manager's thread generates meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cb_rollout.dataset.rows import Row
from cb_rollout.errors import InvalidRequestError
from cb_rollout.manager import ContinuousBatchingManager
from cb_rollout.sampling_params import SamplingParams
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
            params: how each sequence is sampled.
            token_ids: encodes a row; may raise `InvalidRequestError`.
        """
        self._manager, self._params, self._token_ids = manager, params, token_ids
        self._most = IN_FLIGHT_PER_SEAT * manager.engine.limits.max_requests
        self._in_flight: dict[str, tuple[Row, int]] = {}

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
                output = self._manager.get_result(timeout=POLL_SECONDS)
                while output is not None:
                    row, sample = self._in_flight.pop(output.request_id)
                    landed.append(Landed(row, sample, output, output.error))
                    output = self._manager.get_result(timeout=0)
            yield landed

    def _has_room_for(self, num_sequences: int) -> bool:
        return not self._in_flight or len(self._in_flight) + num_sequences <= self._most

    def _take_off(self, row: Row, samples: list[int]) -> list[Landed]:
        """Queue a row's sequences together, so that their prompt is computed once."""
        try:
            token_ids = self._token_ids(row)
            request_ids = self._manager.add_requests(
                [token_ids] * len(samples), sampling_params=self._params
            )
        except InvalidRequestError as error:
            return [Landed(row, sample, None, str(error)) for sample in samples]
        self._in_flight |= {
            request_id: (row, sample)
            for request_id, sample in zip(request_ids, samples, strict=True)
        }
        return []
