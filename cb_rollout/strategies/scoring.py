"""Rewards of a group, with the retries that a strategy grants.

Owns what a reward may return. Keeps no state.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cb_rollout.errors import RolloutError
from cb_rollout.types import GenerationOutput

Reward = Callable[[Any, list[GenerationOutput]], Sequence[float | None]]
# Of the source's prompt or row, and completions of it: one number each; None: cannot be scored.


@dataclass(frozen=True, slots=True)
class Scores:
    """What could be scored."""

    rewards: dict[str, float]
    """By request id."""
    num_calls: int
    cause: Exception | None
    """What the reward last raised; None if it did not."""


def scored(
    reward: Reward, prompt: Any, outputs: Sequence[GenerationOutput], max_retries: int
) -> Scores:
    """Score completions; those left without a number are tried up to `max_retries` times more.

    Raises:
        RolloutError: the reward gave no numbers, or another number of them than it was given
            completions.
        Exception: whatever the reward raised, if it is not to be retried.
    """
    rewards: dict[str, float] = {}
    cause: Exception | None = None
    num_calls = 0
    missing = list(outputs)
    while missing and num_calls <= max_retries:
        num_calls += 1
        try:
            returned = reward(prompt, missing)
        except Exception as error:
            if not max_retries:
                raise
            cause = error
            continue
        if not isinstance(returned, Iterable):
            raise RolloutError(
                f"the reward gave {returned!r:.60}; it is called with a prompt and a list of its "
                "completions, and must give a list, one number for each."
            )
        found = list(returned)
        if len(found) != len(missing):
            raise RolloutError(
                f"the reward gave {len(found)} values for {len(missing)} completions of one "
                "prompt; it must give one for each, None for one that cannot be scored."
            )
        for output, value in zip(missing, found, strict=True):
            number = _number(value)
            if number is not None and not math.isnan(number):
                rewards[output.request_id] = number
        missing = [output for output in missing if output.request_id not in rewards]
    return Scores(rewards, num_calls, cause)


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise RolloutError(
            f"the reward gave {value!r:.60} for a completion; it must give a number, or None for "
            "one that cannot be scored."
        ) from error
