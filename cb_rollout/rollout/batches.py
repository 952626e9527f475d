"""Resolve the arguments of `generate_batch`, and check the outputs of a batch.

Owns the exchange of batches between processes that share a copy of the model. Called by a generator
or a pool.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from cb_rollout.config.hf import from_generation_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import (
    SamplingParams,
    equal_group_warning,
    resolved,
    sequences_per_input,
)
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.lockstep import EngineGroup
from cb_rollout.errors import ConfigurationError, IncompleteRolloutError, InvalidRequestError
from cb_rollout.rollout.prompts import (
    Encoded,
    Padding,
    Prompt,
    encoded_or_refused,
    one_per_input,
    refuse_padding,
)
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
    """True: deliver refused prompts as failed sequences; False: the call raises."""


def batch_arguments(
    inputs: Iterable[Prompt],
    generation_config: Any,
    *,
    tokenizer: Any,
    defaults: SamplingParams,
    engine: RolloutConfig,
    padding: Padding | None = None,
    own_generation_config: Any = None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    num_return_sequences: int | None,
    max_new_tokens: int | Sequence[int] | None,
    record_timestamps: bool = False,
    on_error: str,
) -> BatchArguments:
    """Return the prompts of a `RolloutGenerator.generate_batch` call with their parameters.

    Warns, two frames up, of groups whose sequences would be equal.

    Args:
        inputs: the call's prompts.
        generation_config: the call's; None: the generator's settings apply.
        tokenizer: encodes prompts that are text or chats.
        defaults: fill what the call leaves out.
        engine: settings of the generator's engine.
        padding: the tokenizer's padding; prompts must not begin or end with it. None: unknown.
        own_generation_config: the generator's.
        sampling_params: the call's, for all inputs or one for each.
        num_return_sequences: sequences of each input; None: as a generation config says.
        max_new_tokens: the call's, for all inputs or one for each, in tokens.
        record_timestamps: record when each token was sampled.
        on_error: "raise", or "return" to deliver refused prompts as failed sequences.

    Raises:
        ConfigurationError: `on_error` is unknown, or a generation config asks for another engine.
        InvalidRequestError: `inputs` or a number is refused.
    """
    if on_error not in ("raise", "return"):
        raise ConfigurationError(f"on_error={on_error!r} is neither 'raise' nor 'return'.")
    if num_return_sequences is None:
        config_in_use = generation_config or own_generation_config
        num_return_sequences = getattr(config_in_use, "num_return_sequences", None)
    count = sequences_per_input(num_return_sequences)
    refuse_padding(inputs, padding)
    prompts = encoded_or_refused(inputs, tokenizer)
    if generation_config is not None:
        defaults = from_generation_config(generation_config, engine)
    params_of_inputs = one_per_input("sampling_params", sampling_params, len(prompts))
    limits_of_inputs = one_per_input("max_new_tokens", max_new_tokens, len(prompts))
    params: list[SamplingParams] = []
    for params_of_input, limit in zip(params_of_inputs, limits_of_inputs, strict=True):
        params.append(resolved(params_of_input, defaults, limit))
    for params_of_input in params:
        warning = equal_group_warning(params_of_input, count)
        if warning:
            warnings.warn(warning, stacklevel=3)
            break
    return BatchArguments(
        prompts=prompts,
        params=params,
        count=count,
        records_timestamps=record_timestamps,
        keeps_refused=on_error == "return",
    )


def create_requests(
    manager: Any, batches: Sequence[BatchArguments | None], group: EngineGroup | None
) -> list[list[Request]]:
    """Create the requests of each rank's batch, if it has one, at a manager."""
    created: list[list[Request]] = [[] for _ in batches]
    for rank, batch in enumerate(batches):
        if batch is None:
            continue
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
    """Return the unfinished requests; before a run, the requests that were not refused."""
    requests = chain.from_iterable(created)
    return [request for request in requests if not request.status.is_final]


def outputs_of(
    requests: Iterable[Request], finished: Mapping[str, GenerationOutput]
) -> dict[str, GenerationOutput]:
    """Return the output of each request by its id, including refused requests."""
    outputs: dict[str, GenerationOutput] = {}
    for request in requests:
        request_id = request.request_id
        outputs[request_id] = finished.get(request_id) or request.output()
    return outputs


def require_finished(
    outputs: Mapping[str, GenerationOutput], cause: BaseException | None = None
) -> None:
    """Raise `IncompleteRolloutError`, with its `cause`, unless every sequence finished."""
    failed = [output for output in outputs.values() if output.status is not RequestStatus.FINISHED]
    if not failed:
        return
    first = failed[0]
    raise IncompleteRolloutError(
        f"{len(failed)} of {len(outputs)} sequences could not be produced. The first, "
        f"{first.request_id}: {first.error or first.status.value} "
        "(on_error='return' delivers the rest without raising.)",
        outputs,
    ) from cause


@contextmanager
def broadcast_refusal(group: EngineGroup | None) -> Iterator[None]:
    """Send an error of the block to the group, so that `gathered` raises it on every rank."""
    try:
        yield
    except InvalidRequestError as error:
        if group is not None:
            group.gather(error)
        raise


def gathered(group: EngineGroup | None, value: T) -> tuple[list[T], int]:
    """Return the values of a group's ranks, and this rank; raise an error sent by any rank."""
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
    """Name the rank whose prompts are refused in the block, unless it is this one."""
    try:
        yield
    except InvalidRequestError as error:
        if group is None or rank == group.group_rank:
            raise
        raise InvalidRequestError(
            f"rank {group.ranks[rank]}, whose prompts are rolled out with this one's: {error}"
        ) from error
