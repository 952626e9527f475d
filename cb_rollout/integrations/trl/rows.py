"""The sequences a trainer will learn from, and which rollouts they were sampled in.

A row is a prompt and a completion; with tools the completion alternates between what was sampled
and what the tools said, and each sampled part is the end of one rollout's output.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cb_rollout.errors import ConfigurationError
from cb_rollout.types import FinishReason, GenerationOutput


class Turn(NamedTuple):
    """One output in a completion, of which the completion may hold only the beginning."""

    start: int
    """Where in the completion it lies."""
    num_tokens: int
    output: GenerationOutput


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence as the trainer put it together."""

    prompt_ids: list[int]
    completion_ids: list[int]
    is_sampled: list[bool]
    """One for each completion token: False where a tool or an environment wrote it."""
    logprobs: list[float] | None
    """One for each completion token, 0 where it was not sampled; None: the trainer has none."""
    turns: list[Turn] = field(default_factory=list)
    """In order; empty where something else than this rollout sampled it."""

    @property
    def token_versions(self) -> list[int | None]:
        """What policy sampled each completion token; None where none did, or it is not known."""
        versions: list[int | None] = [None] * len(self.completion_ids)
        for start, num_tokens, output in self.turns:
            sampled = [version for version, num in output.policy_versions for _ in range(num)]
            versions[start : start + num_tokens] = sampled[:num_tokens]
        return versions

    @property
    def ended_itself(self) -> bool:
        """Whether its last token was sampled here, and ended it: by a token or a stop string."""
        if not self.turns:
            return False
        start, num_tokens, output = self.turns[-1]
        is_last = start + num_tokens == len(self.completion_ids)
        is_all = num_tokens == len(output.generated_tokens)
        return is_last and is_all and output.finish_reason is FinishReason.STOP

    @property
    def name(self) -> str:
        """Which sequence it is, in messages."""
        return self.turns[-1].output.request_id if self.turns else "a sequence of rollout_func"


def rows_from(generated: Sequence[Any], outputs: Iterable[GenerationOutput]) -> list[Row]:
    """The rows of what a trainer's `_generate` returned.

    Args:
        generated: GRPO's prompt ids, completion ids, tool mask, completions, log-probabilities and
            more; or RLOO's prompt ids, completion ids and completions.
        outputs: everything that was sampled meanwhile.
    """
    prompts, completions = generated[0], generated[1]
    is_grpo = len(generated) > 3
    masks = (generated[2] if is_grpo else None) or [[1] * len(ids) for ids in completions]
    logprobs = generated[4] if is_grpo else None
    by_prompt: dict[tuple[int, ...], list[GenerationOutput]] = defaultdict(list)
    for output in outputs:
        by_prompt[tuple(output.prompt_ids)].append(output)
    rows = []
    for index, (prompt_ids, completion_ids, mask) in enumerate(
        zip(prompts, completions, masks, strict=True)
    ):
        is_sampled = [bool(value) for value in mask]
        turns = _turns(list(prompt_ids), list(completion_ids), is_sampled, by_prompt)
        values = None
        if logprobs is not None:
            # A rollout_func may say None, as vLLM's does, where it knows none.
            values = [math.nan if value is None else value for value in logprobs[index]]
        if not is_grpo and turns:
            values = turns[0].output.logprobs
        rows.append(Row(list(prompt_ids), list(completion_ids), is_sampled, values, turns))
    return rows


def _turns(
    prompt_ids: list[int],
    completion_ids: list[int],
    is_sampled: list[bool],
    by_prompt: dict[tuple[int, ...], list[GenerationOutput]],
) -> list[Turn]:
    """The outputs that a completion was put together from; empty where one is not to be found.

    Of equal tokens after an equal history each row takes another request's, as long as there are;
    where a rollout_func repeats one, they are one and the same.
    """
    turns = []
    starts = [t for t, own in enumerate(is_sampled) if own and not (t and is_sampled[t - 1])]
    for start in starts:
        end = next((t for t in range(start, len(is_sampled)) if not is_sampled[t]), None)
        part = completion_ids[start:end]
        candidates = by_prompt.get((*prompt_ids, *completion_ids[:start]), [])
        found = next(
            (n for n, o in enumerate(candidates) if o.generated_tokens[: len(part)] == part), None
        )
        if found is None:
            return []
        candidates.append(candidates.pop(found))
        turns.append(Turn(start, len(part), candidates[-1]))
    return turns


def require_sampled_here(rows: Iterable[Row]) -> None:
    """Refuse rows that were not sampled by the attached generator."""
    if not all(row.turns for row in rows):
        raise ConfigurationError(
            "sampling_mask='replay' needs completions of the attached generator, and rollout_func "
            "brought others; generate with cb_rollout.make_rollout_func, or set "
            "sampling_mask='ignore'."
        )
