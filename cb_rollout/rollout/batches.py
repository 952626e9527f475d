"""Resolve the arguments of `generate_batch`, and check what a batch delivered.

Owns the exchange of batches between processes that share a copy of the model. Called by whatever
samples batches: a generator, or a pool of them.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from cb_rollout.config.hf import from_generation_config
from cb_rollout.config.sampling import SamplingParams, equal_group_warning, resolved
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.lockstep import EngineGroup
from cb_rollout.errors import ConfigurationError, IncompleteRolloutError, InvalidRequestError
from cb_rollout.rollout.prompts import Encoded, Prompt, encoded_or_refused, one_per_input
from cb_rollout.types import GenerationOutput, RequestStatus

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchArguments:
    """Prompts of one batch with their sampling parameters."""

    prompts: list[Encoded | InvalidRequestError]
    """Each prompt, or the error that refuses it."""
    params: list[SamplingParams]
    count: int
    """Sequences of each prompt."""
    records_timestamps: bool = False
    keeps_refused: bool = False
    """Deliver refused prompts as failed sequences, where otherwise the call raises."""


def batch_arguments(
    inputs: Iterable[Prompt],
    generation_config: Any,
    *,
    tokenizer: Any,
    defaults: SamplingParams,
    own_generation_config: Any = None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    num_return_sequences: int | None,
    max_new_tokens: int | Sequence[int] | None,
    record_timestamps: bool = False,
    on_error: str,
) -> BatchArguments:
    """Return the prompts of a `RolloutGenerator.generate_batch` call with their parameters.

    `defaults` fill what the call leaves out; `own_generation_config` is the generator's. Warns, two
    frames up, of groups whose sequences would be equal. Raises `ConfigurationError` for `on_error`,
    `InvalidRequestError` for `inputs` or a number.
    """
    if on_error not in ("raise", "return"):
        raise ConfigurationError(f"on_error={on_error!r} is neither 'raise' nor 'return'.")
    count = num_return_sequences
    if count is None:
        chosen = generation_config or own_generation_config
        count = getattr(chosen, "num_return_sequences", None)
    count = 1 if count is None else count
    if not isinstance(count, int) or count < 1:
        raise InvalidRequestError(f"num_return_sequences={count!r} is not a whole number >= 1.")
    prompts = encoded_or_refused(inputs, tokenizer)
    if generation_config is not None:
        defaults = from_generation_config(generation_config)
    many_params = one_per_input("sampling_params", sampling_params, len(prompts))
    many_lengths = one_per_input("max_new_tokens", max_new_tokens, len(prompts))
    params = [
        resolved(params, defaults, length)
        for params, length in zip(many_params, many_lengths, strict=True)
    ]
    if warning := next(filter(None, (equal_group_warning(p, count) for p in params)), None):
        warnings.warn(warning, stacklevel=3)
    return BatchArguments(prompts, params, count, record_timestamps, on_error == "return")


def create_requests(
    manager: Any, batches: Sequence[BatchArguments | None], group: EngineGroup | None
) -> list[list[Request]]:
    """Create the requests of each rank's batch, or of its absence, at a manager or a pool's."""
    created: list[list[Request]] = [[] for _ in batches]
    for rank, batch in enumerate(batches):
        if batch is not None:
            with tag_rank(group, rank):
                created[rank] = manager.create_requests(
                    batch.prompts,
                    batch.params,
                    members=range(batch.count),
                    records_timestamps=batch.records_timestamps,
                    keeps_refused=batch.keeps_refused,
                )
    return created


def unfinished(created: Iterable[list[Request]]) -> list[Request]:
    """Return the requests that have not ended; before any runs, those that were not refused."""
    return [request for request in chain(*created) if not request.status.is_final]


def outputs_of(
    requests: Iterable[Request], finished: Mapping[str, GenerationOutput]
) -> dict[str, GenerationOutput]:
    """Return outputs by request id; of a refused request its own."""
    return {r.request_id: finished.get(r.request_id) or r.output() for r in requests}


def require_finished(
    outputs: Mapping[str, GenerationOutput], cause: BaseException | None = None
) -> None:
    """Raise `IncompleteRolloutError`, with its `cause`, unless every sequence finished."""
    failed = [o for o in outputs.values() if o.status is not RequestStatus.FINISHED]
    if failed:
        raise IncompleteRolloutError(
            f"{len(failed)} of {len(outputs)} sequences could not be produced. The first, "
            f"{failed[0].request_id}: {failed[0].error or failed[0].status.value} "
            "(on_error='return' delivers the rest without raising.)",
            outputs,
        ) from cause


@contextmanager
def broadcast_refusal(group: EngineGroup | None) -> Iterator[None]:
    """Send a refusal of the block to the group, where `gathered` raises it on every rank."""
    try:
        yield
    except InvalidRequestError as error:
        if group is not None:
            group.gather(error)
        raise


def gathered(group: EngineGroup | None, value: T) -> tuple[list[T], int]:
    """Return the values of a group's ranks, and this rank; raise the refusal of any rank."""
    if group is None:
        return [value], 0
    values = group.gather(value)
    for rank, refusal in enumerate(values):
        with tag_rank(group, rank):
            if isinstance(refusal, InvalidRequestError):
                raise refusal
    return values, group.group_rank


@contextmanager
def tag_rank(group: EngineGroup | None, rank: int) -> Iterator[None]:
    """Name the rank whose prompts the block refuses, unless they are this one's."""
    try:
        yield
    except InvalidRequestError as error:
        if group is None or rank == group.group_rank:
            raise
        raise InvalidRequestError(
            f"rank {group.ranks[rank]}, whose prompts are rolled out with this one's: {error}"
        ) from error
