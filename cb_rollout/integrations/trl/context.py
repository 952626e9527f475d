"""Hold the state of one rollout of a trainer, from its prompts to its scored batch.

Owns the record of what was sampled, and the assignment of sampled sequences to the trainer's rows.
One context is made for each rollout; the trainer's thread alone reads and writes it.

A row is a prompt and a completion. With tools a completion alternates between sampled spans and
tool results, and each sampled span is the end of one request's output.

B: rows of a batch, T: tokens of a completion.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cb_rollout.config.combinations import refused
from cb_rollout.metrics.run_records import Mode
from cb_rollout.types import FinishReason, GenerationOutput

# Metrics of a rollout's turns that are added up; of the others the largest counts.
SUMMED = (
    *("seconds", "tokens", "prefill_tokens", "prefill_tokens_saved", "preemptions"),
    *("drafted_tokens", "accepted_tokens", "drafted_tokens_earlier", "accepted_tokens_earlier"),
    *("drafted_tokens_run", "accepted_tokens_run", "images_encoded", "images_reused"),
)
# Averaged over the turns' tokens.
AVERAGED = ("log_kept_mass", "kept_tokens")


class SampledSpan(NamedTuple):
    """A run of sampled tokens in a completion."""

    start: int
    """Index of its first token in the completion."""
    num_tokens: int
    """At most the output's: the trainer may cut the end off."""
    output: GenerationOutput


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One sequence of the trainer's batch."""

    prompt_ids: list[int]
    completion_ids: list[int]
    is_sampled: list[bool]
    """One for each completion token: False where a tool or an environment wrote it."""
    logprobs: list[float] | None
    """One for each completion token, 0 where it was not sampled; None: the trainer has none."""
    spans: list[SampledSpan] = field(default_factory=list)
    """In order; empty where the completion was not sampled in this rollout."""

    @property
    def token_versions(self) -> list[int | None]:
        """Return the policy version of each completion token; None where it is not known."""
        versions: list[int | None] = [None] * len(self.completion_ids)
        for start, num_tokens, output in self.spans:
            sampled = [version for version, num in output.policy_versions for _ in range(num)]
            versions[start : start + num_tokens] = sampled[:num_tokens]
        return versions

    @property
    def is_stopped(self) -> bool:
        """Return True if its last token was sampled here and finished the request with STOP."""
        if not self.spans:
            return False
        start, num_tokens, output = self.spans[-1]
        is_last = start + num_tokens == len(self.completion_ids)
        is_all = num_tokens == len(output.generated_tokens)
        return is_last and is_all and output.finish_reason is FinishReason.STOP

    @property
    def name(self) -> str:
        """Return the request id, or a description where there is none."""
        return self.spans[-1].output.request_id if self.spans else "a sequence of rollout_func"


class Collected(NamedTuple):
    """Groups that a strategy sampled before the trainer asked for them."""

    examples: list[dict[str, Any]]
    """Rows of the data set, one a group."""
    outputs: list[GenerationOutput]
    """The groups' completions, group after group."""
    metrics: dict[str, float]


@dataclass
class RolloutContext:
    """Everything known of one rollout."""

    mode: Mode
    collected: Collected | None = None
    """Completions for the next prompts that the trainer asks for; None: sample them."""
    outputs: list[GenerationOutput] = field(default_factory=list)
    """Everything sampled, tool turns included, in the order of the trainer's prompts."""
    images: dict[str, list[Any]] = field(default_factory=dict)
    """Pictures of the prompts that have any, by the request's id."""
    turn_metrics: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each call of the engine, by name."""
    rows: list[RolloutRow] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """One for each row, weighted and summed over the reward functions."""
    kept_token_ids: list[list[Any]] | None = None
    """The sampling mask of each row, while the batch is scored; None: replay is off."""
    routed_experts: list[Any] | None = None
    """The experts that each row's tokens took, while the batch is scored; None: replay is off."""
    is_check_due: bool = False
    """True until the guard has compared this rollout's log-probabilities."""
    needs_old_logprobs: bool = False
    """True until the trainer's scoring has asked for old log-probabilities."""

    def metrics(self) -> dict[str, float]:
        """Combine the metrics of the turns; empty where nothing was sampled."""
        turns, combined = self.turn_metrics, {}
        if not turns:
            return combined
        for turn in turns:
            for name, value in turn.items():
                combined[name] = max(value, combined.get(name, value))
        for name in SUMMED:
            combined[f"rollout/{name}"] = sum(turn[f"rollout/{name}"] for turn in turns)
        num_tokens, seconds = combined["rollout/tokens"], combined["rollout/seconds"]
        combined["rollout/tokens_per_second"] = num_tokens / seconds if seconds else 0.0
        for name in (f"rollout/{name}" for name in AVERAGED):
            if name in combined:
                weighted = sum(turn[name] * turn["rollout/tokens"] for turn in turns)
                combined[name] = weighted / num_tokens
        return combined

    def sampled_logprobs(self, mask_BT: torch.Tensor) -> torch.Tensor | None:
        """Return the rows' log-probabilities, (B, T), float32, 0 in the padding.

        None where a value is missing or not finite.
        """
        sampled_BT = torch.zeros(mask_BT.shape, dtype=torch.float32)
        for number, row in enumerate(self.rows):
            if row.logprobs is None or not all(map(math.isfinite, row.logprobs)):
                return None
            sampled_BT[number, : len(row.logprobs)] = torch.tensor(row.logprobs)
        return sampled_BT.to(mask_BT.device)

    def require_sampled_here(self, setting: str, other: str) -> None:
        """Refuse rows that the attached generator did not sample.

        Args:
            setting: the setting that needs them, and its value.
            other: the value that does not.
        """
        if not all(row.spans for row in self.rows):
            raise refused("replay, foreign completions", setting=setting, other=other)


def rows_from(
    generated: Sequence[Any], outputs: Sequence[GenerationOutput], *, is_in_order: bool
) -> list[RolloutRow]:
    """Return the rows that a trainer's `_generate` returned, with the outputs they consist of.

    Args:
        generated: GRPO's prompt ids, completion ids, tool mask, completions, log-probabilities and
            more; or RLOO's prompt ids, completion ids and completions.
        outputs: everything that was sampled meanwhile.
        is_in_order: output `n` is row `n`.
    """
    prompts, completions = generated[0], generated[1]
    is_grpo = len(generated) > 3
    masks = (generated[2] if is_grpo else None) or [[1] * len(ids) for ids in completions]
    logprobs = generated[4] if is_grpo else None
    by_prompt: dict[tuple[int, ...], list[GenerationOutput]] = defaultdict(list)
    if not is_in_order:
        for output in outputs:
            by_prompt[tuple(output.prompt_ids)].append(output)
    rows = []
    for index, (prompt_ids, completion_ids, mask) in enumerate(
        zip(prompts, completions, masks, strict=True)
    ):
        is_sampled = [bool(value) for value in mask]
        if is_in_order:
            spans = [SampledSpan(0, len(completion_ids), outputs[index])]
        else:
            spans = _matched_spans(prompt_ids, completion_ids, is_sampled, by_prompt)
        values = None
        if logprobs is not None:
            # A rollout_func may say None, as vLLM's does, where it knows none.
            values = [math.nan if value is None else value for value in logprobs[index]]
        if not is_grpo and spans:
            values = spans[0].output.logprobs
        rows.append(RolloutRow(list(prompt_ids), list(completion_ids), is_sampled, values, spans))
    return rows


# TRL 1.16 gives no ids: a tool loop generates for the rows that are left and cuts their ends off,
# and a rollout_func may return its rows in any order, or one twice. There rows are found by their
# tokens.
def _matched_spans(
    prompt_ids: Iterable[int],
    completion_ids: Sequence[int],
    is_sampled: list[bool],
    by_prompt: dict[tuple[int, ...], list[GenerationOutput]],
) -> list[SampledSpan]:
    """Find the outputs of a completion by their tokens; return none where one is not found.

    Rows with equal tokens and history take different requests, as long as there are any left.
    """
    spans = []
    starts = [t for t, own in enumerate(is_sampled) if own and not (t and is_sampled[t - 1])]
    for start in starts:
        end = next((t for t in range(start, len(is_sampled)) if not is_sampled[t]), None)
        part = list(completion_ids[start:end])
        candidates = by_prompt.get((*prompt_ids, *completion_ids[:start]), [])
        found = next(
            (n for n, o in enumerate(candidates) if o.generated_tokens[: len(part)] == part), None
        )
        if found is None:
            return []
        candidates.append(candidates.pop(found))
        spans.append(SampledSpan(start, len(part), candidates[-1]))
    return spans
