"""Submit the sequences of rows, only as many as keep the batch full, and yield the completed ones.

The calling thread encodes and submits; the manager's thread generates meanwhile.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.images.processor import ImagePrompt
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import InvalidRequestError
from cb_rollout.rollout.prompts import Encoded
from cb_rollout.tools.dataset.rows import Row
from cb_rollout.types import GenerationOutput

# A full batch runs and another waits, so that a completed sequence is replaced at once.
BATCHES_IN_FLIGHT = 2

# Longest completion where none is asked for.
DEFAULT_NEW_TOKENS = 512

# Longest wait for a completed sequence.
POLL_SECONDS = 0.25


class CompletedSequence(NamedTuple):
    """A completed or failed sequence of a row."""

    row: Row
    sample: int
    """Number among the row's sequences, from 0."""
    output: GenerationOutput | None
    """None: the request was refused."""
    error: str | None


class CompletionStream:
    """Submission and completion of the sequences of rows, by a manager that is started before.

    Without `max_new_tokens`, at most `DEFAULT_NEW_TOKENS` are sampled, and no more than the model
    takes. With a seed, tokens depend on it, the row's id and the sequence's number only. `encoded`
    encodes a row, and may raise `InvalidRequestError`.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        params: SamplingParams,
        encoded: Callable[[Row], Encoded],
    ) -> None:
        self._manager, self._params, self._encoded = manager, params, encoded
        self._max_in_flight = BATCHES_IN_FLIGHT * manager.memory_plan.num_slots
        self._in_flight: dict[str, tuple[Row, int]] = {}
        self._output_queue = OutputQueue()

    def completed(
        self, wanted: Iterator[tuple[Row, list[int]]]
    ) -> Iterator[list[CompletedSequence]]:
        """Generate sequences; yield the completed ones, at least every `POLL_SECONDS`.

        `wanted` has rows, and the numbers of their sequences; it is read as room allows.
        """
        upcoming = next(wanted, None)
        while upcoming or self._in_flight:
            completed: list[CompletedSequence] = []
            while upcoming and (
                not self._in_flight
                or len(self._in_flight) + len(upcoming[1]) <= self._max_in_flight
            ):
                completed += self._submit(*upcoming)
                upcoming = next(wanted, None)
            if self._in_flight:
                output = self._output_queue.take(timeout=POLL_SECONDS)
                while output is not None:
                    row, sample = self._in_flight.pop(output.request_id)
                    completed.append(CompletedSequence(row, sample, output, output.error))
                    output = self._output_queue.take(timeout=0)
            yield completed

    def _submit(self, row: Row, samples: list[int]) -> list[CompletedSequence]:
        """Submit a row's sequences as a group; return them as failed if they are refused."""
        params = self._params
        if params.seed is not None:
            digest = hashlib.blake2b(repr((params.seed, row.id)).encode(), digest_size=7).digest()
            params = replace(params, seed=int.from_bytes(digest))
        try:
            prompt = self._encoded(row)
            if params.max_new_tokens is None:
                token_ids = prompt.token_ids if isinstance(prompt, ImagePrompt) else prompt
                params = replace(params, max_length=len(token_ids) + DEFAULT_NEW_TOKENS)
            requests = self._manager.create_requests([prompt], [params], members=samples)
        except InvalidRequestError as error:
            return [CompletedSequence(row, sample, None, str(error)) for sample in samples]
        self._manager.submit(requests, self._output_queue)
        for request, sample in zip(requests, samples, strict=True):
            self._in_flight[request.request_id] = (row, sample)
        return []
