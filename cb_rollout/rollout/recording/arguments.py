"""Check the arguments of `RolloutGenerator.record`, and convert them to plain numbers.

B: outputs, T: columns of padded completions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cb_rollout.errors import InvalidRequestError
from cb_rollout.types import GenerationOutput, RequestStatus

# A log-softmax may round to a little more than 0.
MAX_LOGPROB = 1e-3

UNFINISHED = (RequestStatus.PREFILLING, RequestStatus.DECODING)


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """Outputs of a process, with the loop's rewards, advantages and log-probabilities."""

    outputs: list[GenerationOutput]
    rewards: list[float | None]
    """One for each output; None: not scored."""
    advantages: list[float | None]
    """One for each output; None: not known."""
    trainer_logprobs: list[list[float]] | None
    """One for each generated token of each output; None: not known."""


def recorded_batch(
    outputs: Any,
    rewards: Any = None,
    advantages: Any = None,
    trainer_logprobs: Any = None,
    completion_mask: Any = None,
) -> RecordedBatch:
    """Return the arguments of `RolloutGenerator.record` as plain numbers.

    Args:
        outputs: see `RolloutGenerator.record`.
        rewards: see `RolloutGenerator.record`.
        advantages: see `RolloutGenerator.record`.
        trainer_logprobs: see `RolloutGenerator.record`.
        completion_mask: see `RolloutGenerator.record`.

    Raises:
        InvalidRequestError: see `RolloutGenerator.record`.
    """
    recorded = _outputs_listed(outputs)
    for number, output in enumerate(recorded):
        _require_recordable(number, output)
    return RecordedBatch(
        outputs=recorded,
        rewards=_numbers_of_outputs("rewards", rewards, len(recorded)),
        advantages=_numbers_of_outputs("advantages", advantages, len(recorded)),
        trainer_logprobs=_trainer_logprobs(trainer_logprobs, completion_mask, recorded),
    )


def _outputs_listed(outputs: Any) -> list[Any]:
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    if isinstance(outputs, GenerationOutput):
        raise InvalidRequestError(
            f"outputs is one output, {outputs.request_id}; pass a list of outputs."
        )
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise InvalidRequestError(
            f"outputs is a {type(outputs).__name__}; pass the outputs of generate_batch, its dict "
            "or a list of them."
        )
    return list(outputs)


def _require_recordable(number: int, output: Any) -> None:
    if not isinstance(output, GenerationOutput):
        raise InvalidRequestError(
            f"outputs[{number}] is a {type(output).__name__}; pass the outputs of generate_batch, "
            "its dict or a list of them."
        )
    name = f"outputs[{number}], {output.request_id}"
    if output.status == RequestStatus.FAILED:
        raise InvalidRequestError(
            f"{name}, failed ({output.error}): it is not a sample of the policy. Leave it out, and "
            "its reward, advantage and log-probabilities too."
        )
    if output.status in UNFINISHED:
        raise InvalidRequestError(f"{name}, is {output.status}; record it once it has ended.")
    num_tokens = len(output.generated_tokens)
    num_logprobs = len(output.logprobs)
    if num_logprobs != num_tokens:
        raise InvalidRequestError(
            f"{name}, has {num_logprobs} log-probabilities for {num_tokens} tokens; sample with "
            "return_logprobs=True, and record outputs unchanged."
        )
    num_stamped = sum(num for _, num in output.policy_versions)
    if output.policy_versions and num_stamped != num_tokens:
        raise InvalidRequestError(
            f"{name}, has policy versions for {num_stamped} of its {num_tokens} tokens; record "
            "outputs unchanged."
        )


def _numbers_of_outputs(name: str, values: Any, num_outputs: int) -> list[float | None]:
    """Return one finite number for each output, or None where there is none."""
    if values is None:
        return [None] * num_outputs
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        one_each = "pass one number for each output"
        if math.prod(shape) == num_outputs:
            one_each = f"pass {name}.flatten()"
        raise InvalidRequestError(
            f"{name} has shape {tuple(shape)}, and there are {num_outputs} outputs; {one_each}, in "
            "the outputs' order."
        )
    numbers = [None if value is None else _number(name, value) for value in _listed(name, values)]
    if len(numbers) != num_outputs:
        raise InvalidRequestError(
            f"{name} has {len(numbers)} numbers for {num_outputs} outputs; pass one for each, in "
            "the outputs' order."
        )
    for number, value in enumerate(numbers):
        if value is not None and not math.isfinite(value):
            raise InvalidRequestError(
                f"{name}[{number}] is {value}; pass a finite number, or a list with None where "
                "there is none."
            )
    return numbers


def _listed(name: str, values: Any) -> list[Any]:
    if hasattr(values, "tolist"):
        return values.tolist()
    # A set has no order.
    has_order = isinstance(values, Iterable) and not isinstance(values, str | Mapping | Set)
    if not has_order:
        raise InvalidRequestError(
            f"{name} is a {type(values).__name__}; pass a list or a 1-d tensor, with one number "
            "for each output."
        )
    return list(values)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(
            f"{name} holds a {type(value).__name__}, not one number for each output; for values "
            "per token, pass their mean."
        ) from error


def _trainer_logprobs(
    values: Any, completion_mask: Any, outputs: Sequence[GenerationOutput]
) -> list[list[float]] | None:
    """Return the log-probabilities of each output's tokens, checked."""
    if values is None:
        if completion_mask is not None:
            raise InvalidRequestError("completion_mask without trainer_logprobs; pass both.")
        return None
    if hasattr(values, "shape"):
        of_outputs = _unpadded(torch.as_tensor(values), completion_mask, outputs)
    else:
        if completion_mask is not None:
            raise InvalidRequestError(
                "completion_mask is for a padded tensor of trainer_logprobs, not for a list of "
                "tensors; leave it out."
            )
        of_outputs = [_one_row(row) for row in _listed("trainer_logprobs", values)]
    if len(of_outputs) != len(outputs):
        raise InvalidRequestError(
            f"trainer_logprobs has {len(of_outputs)} tensors for {len(outputs)} outputs; pass one "
            "for each, as packed_logprobs returns them."
        )
    for number, (logprobs, output) in enumerate(zip(of_outputs, outputs, strict=True)):
        _require_logprobs(f"trainer_logprobs[{number}], {output.request_id}", logprobs, output)
    return of_outputs


def _one_row(row: Any) -> list[float]:
    shape = getattr(row, "shape", None)
    if shape is not None and len(shape) != 1:
        raise InvalidRequestError(
            f"trainer_logprobs holds a tensor of shape {tuple(shape)}; pass a 1-d tensor for each "
            "output, as packed_logprobs returns them, before they are joined."
        )
    if shape is not None:
        return row.tolist()
    return [_number("trainer_logprobs", value) for value in _listed("trainer_logprobs", row)]


def _unpadded(
    logprobs_BT: torch.Tensor, completion_mask: Any, outputs: Sequence[GenerationOutput]
) -> list[list[float]]:
    """Return the completions' values of a padded tensor."""
    shape = tuple(logprobs_BT.shape)
    lengths = [len(output.generated_tokens) for output in outputs]
    if len(shape) != 2 or shape[0] != len(outputs):
        raise InvalidRequestError(
            f"trainer_logprobs has shape {shape}, and there are {len(outputs)} outputs; pass a "
            "list with a 1-d tensor for each output, as packed_logprobs returns it, or a tensor "
            "(outputs, columns) with its completion_mask."
        )
    if completion_mask is None:
        if any(length != shape[1] for length in lengths):
            raise InvalidRequestError(
                f"trainer_logprobs has {shape[1]} columns, and outputs have {min(lengths)} to "
                f"{max(lengths)} tokens, so it is unclear which columns are padding. Pass "
                "completion_mask of the same shape, with 1 at each completion token."
            )
        return logprobs_BT.tolist()
    mask_BT = torch.as_tensor(completion_mask).to(logprobs_BT.device)
    if tuple(mask_BT.shape) != shape:
        raise InvalidRequestError(
            f"completion_mask has shape {tuple(mask_BT.shape)}, and trainer_logprobs {shape}; pass "
            "equal shapes."
        )
    if not ((mask_BT == 0) | (mask_BT == 1)).all():
        raise InvalidRequestError("completion_mask holds numbers other than 0 and 1.")
    is_token_BT = mask_BT.bool()
    values = logprobs_BT[is_token_BT].tolist()
    rows, start = [], 0
    for count in is_token_BT.sum(1).tolist():
        rows.append(values[start : start + count])
        start += count
    return rows


def _require_logprobs(name: str, logprobs: Sequence[float], output: GenerationOutput) -> None:
    num_tokens = len(output.generated_tokens)
    if len(logprobs) != num_tokens:
        raise InvalidRequestError(
            f"{name}: {len(logprobs)} numbers for {num_tokens} generated tokens; pass one per "
            "generated token, including the end-of-sequence token, and none for the prompt."
        )
    values = np.asarray(logprobs, dtype=np.float64)
    (unfit,) = np.nonzero(~(np.isfinite(values) & (values <= MAX_LOGPROB)))
    if len(unfit):
        position = unfit[0]
        raise InvalidRequestError(
            f"{name}: {values[position]:g} at token {position} is not a log-probability; pass the "
            "natural logarithms from the loss's forward, finite and at most 0."
        )
