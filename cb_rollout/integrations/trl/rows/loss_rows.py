"""Keep one record of each row of a trainer's batch, and run the trainer's own forward of the rows.

A row is a prompt and a completion: with tools, sampled spans, each the end of one request's output,
between tool results. The forward replays the experts and the sampling masks of a rollout: "Keep
Routing" and "Keep Sampling Mask" in DeepSeek-V3.2's report. TRL's forward never has the logits that
a mask needs, so the model's is run instead. The trainer's thread alone reads and writes this.

B: rows of a batch, S: prompt and completion, T: tokens of a completion, V: vocabulary, N: B x T, L:
routers, K: experts of a token.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.combinations import refused
from cb_rollout.engine.attention.shared_prefix import num_common
from cb_rollout.engine.model.routers import Disagreement, Routers, joined_routes
from cb_rollout.engine.sampling.mask import masked_logprobs
from cb_rollout.integrations.trl.images import COUNTS, image_arguments, of_rows
from cb_rollout.packing.batch import PackedRow
from cb_rollout.types import FinishReason, GenerationOutput

Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Log-probabilities and entropies, (B, T), and the load-balancing loss of a mixture of experts."""

# The column of a scored batch that holds its `LossRow`s. TRL 1.16 shuffles and splits a batch, and
# a strategy sends groups to other processes: each record goes where its row is trained.
ROWS_KEY = "rollout_rows"

# The column of the rows' ids, (B,) int64. A trainer class of one's own may reorder what TRL has
# scored, and does to a tensor what it does to the others.
ROW_IDS = "rollout_row_ids"

# Of rows that the attached generator did not sample, or whose records are no longer kept.
UNKNOWN_ID = -1


@dataclass(frozen=True, slots=True)
class LossRow:
    """One sequence of the trainer's batch, from its generation to its loss."""

    id: int
    """No other row of the run, on any process, has it; `UNKNOWN_ID`: its origin is not known."""
    prompt_ids: list[int]
    completion_ids: list[int]
    is_sampled: list[bool]
    """One for each completion token: False where a tool or an environment wrote it."""
    logprobs: list[float] | None
    """One for each completion token, 0 where it was not sampled; None: the trainer has none."""
    versions: list[int | None]
    """The policy version of each completion token; None where it is not known."""
    request_id: str | None = None
    """Of its last request; None: the attached generator did not sample it."""
    finish_reason: FinishReason | None = None
    is_stopped: bool = False
    """True: its last token was sampled here and finished the request with STOP."""
    sampling_mask: list[Any] | None = None
    """An `array("i")` of ids for each completion token; None: replay is off."""
    routes: Any = None
    """Experts that the first tokens took, `[tokens, L, K]`; None: not recorded."""

    @classmethod
    def unknown(cls, prompt_ids: list[int], completion_ids: list[int]) -> "LossRow":
        """Return a record of tokens alone."""
        return cls(
            UNKNOWN_ID,
            prompt_ids,
            completion_ids,
            is_sampled=[True] * len(completion_ids),
            logprobs=None,
            versions=[None] * len(completion_ids),
        )

    def cut(self, num_tokens: int) -> "LossRow":
        """Return the record of the first tokens of the completion."""
        if num_tokens == len(self.completion_ids):
            return self
        masks, routes = self.sampling_mask, self.routes
        return replace(
            self,
            completion_ids=self.completion_ids[:num_tokens],
            is_sampled=self.is_sampled[:num_tokens],
            logprobs=None if self.logprobs is None else self.logprobs[:num_tokens],
            versions=self.versions[:num_tokens],
            finish_reason=None,
            is_stopped=False,
            sampling_mask=None if masks is None else masks[:num_tokens],
            routes=None if routes is None else routes[: len(self.prompt_ids) + num_tokens],
        )

    def was_sampled_by(self, version: int) -> bool:
        """Return whether this policy version sampled a token of the row, or no token has a version.

        False for a row whose origin is not known.
        """
        if self.id == UNKNOWN_ID:
            return False
        sampled_versions = {own for own in self.versions if own is not None}
        return not sampled_versions or version in sampled_versions

    @property
    def name(self) -> str:
        return self.request_id or "a sequence of rollout_func"

    @property
    def turns(self) -> list[range]:
        """Return the completion tokens of each turn that was sampled."""
        runs = groupby(range(len(self.is_sampled)), self.is_sampled.__getitem__)
        turns = [list(positions) for is_sampled, positions in runs if is_sampled]
        return [range(turn[0], turn[-1] + 1) for turn in turns]


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """The padded rows of a forward of the trainer, as TRL 1.16 passes them."""

    input_ids: torch.Tensor
    """(B, S), int64: prompts, left-padded, and completions, right-padded."""
    attention_mask: torch.Tensor
    """(B, S), int64."""
    logits_to_keep: int
    batch_size: int | None = None
    """Rows in one forward of the trainer; None: all."""
    settings: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[LossRow] = ()
    """One for each row; empty: the batch was not generated here."""
    advantages: torch.Tensor | None = None
    """(B,): rows at 0 have no gradient; None: all rows have a gradient."""
    counts: Disagreement | None = None
    """Counts choices of routers that differ from the rows'; None: they are not counted."""

    @classmethod
    def scored(cls, batch: Mapping[str, Any], rows: Sequence[LossRow]) -> "LossBatch":
        """Return all rows of a batch that the trainer has scored."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        width = batch["completion_ids"].shape[1]
        return cls(ids, mask, width, settings=image_arguments(batch), rows=rows)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def completion_mask(self) -> torch.Tensor:
        return self.attention_mask[:, -self.logits_to_keep :]

    @property
    def has_aux_loss(self) -> bool:
        return bool(self.settings.get("compute_aux_loss"))

    @property
    def is_masked(self) -> bool:
        return any(row.sampling_mask is not None for row in self.rows)

    @property
    def is_routed(self) -> bool:
        return any(row.routes is not None for row in self.rows)

    def at(self, numbers: Sequence[int], batch_size: int | None) -> "LossBatch":
        numbers = list(numbers)
        return replace(
            self,
            input_ids=self.input_ids[numbers],
            attention_mask=self.attention_mask[numbers],
            batch_size=batch_size,
            settings=of_rows(self.settings, numbers),
            rows=[self.rows[number] for number in numbers] if self.rows else (),
            advantages=None,
        )

    def sampled_logprobs(self) -> torch.Tensor | None:
        """Return (B, T), float32, 0 in the padding; None: a value is missing or not finite."""
        sampled_BT = torch.zeros(self.completion_mask.shape, dtype=torch.float32)
        for row_T, row in zip(sampled_BT, self.rows, strict=True):
            if row.logprobs is None or not all(map(math.isfinite, row.logprobs)):
                return None
            row_T[: len(row.logprobs)] = torch.tensor(row.logprobs)
        return sampled_BT.to(self.input_ids.device)

    def sampled_mask(self) -> torch.Tensor:
        """Return (B, T), bool: tokens that were sampled, and that the batch's mask keeps."""
        is_sampled_BT = torch.zeros(self.completion_mask.shape, dtype=torch.bool)
        for is_sampled_T, row in zip(is_sampled_BT, self.rows, strict=True):
            is_sampled_T[: len(row.is_sampled)] = torch.tensor(row.is_sampled, dtype=torch.bool)
        return is_sampled_BT.to(self.input_ids.device) & (self.completion_mask > 0)

    def unpadded(self) -> list[PackedRow] | None:
        """Return the rows without padding; None: some padding is not at the two ends.

        The mask decides, not the records: TRL masks truncated completions after they are generated.
        """
        first, T = self.input_ids.shape[1] - self.logits_to_keep, self.logits_to_keep
        prompt_mask_BP, mask_BT = self.attention_mask[:, :first] > 0, self.completion_mask > 0
        prompts_B, completions_B = prompt_mask_BP.sum(1), mask_BT.sum(1)
        at_P, at_T = (torch.arange(n, device=self.input_ids.device) for n in (first, T))
        is_plain = (prompt_mask_BP == (at_P >= first - prompts_B[:, None])).all()
        is_plain &= (mask_BT == (at_T < completions_B[:, None])).all() & (prompts_B > 0).all()
        if not is_plain:
            return None
        lengths = zip(prompts_B.tolist(), completions_B.tolist(), strict=True)
        records = self.rows or [None] * len(self.input_ids)
        return [
            PackedRow(
                ids[first - before : first],
                ids[first : first + after],
                record and record.routes,
                sampling_mask=record and record.sampling_mask,
            )
            for ids, (before, after), record in zip(
                self.input_ids.tolist(), lengths, records, strict=True
            )
        ]


# A run of sampled tokens: the index of its first token in the completion, its number of tokens, at
# most the output's, since the trainer may cut the end off; and the output.
Span = tuple[int, int, GenerationOutput]


def loss_rows(
    generated: Sequence[Any],
    outputs: Sequence[GenerationOutput],
    ids: Iterator[int],
    *,
    is_in_order: bool,
    replays: bool = False,
) -> list[LossRow]:
    """Return the rows that a trainer's `_generate` returned, by all outputs of its rollout.

    GRPO returns prompt ids, completion ids, tool mask, completions, log-probabilities and more;
    RLOO the first two and completions. `is_in_order`: output `n` is row `n`, if its tokens are.
    `replays`: log-probabilities are taken over the sampling masks.
    """
    prompts, completions = generated[0], generated[1]
    is_grpo = len(generated) > 3
    masks = (generated[2] if is_grpo else None) or [[1] * len(ids) for ids in completions]
    logprobs = generated[4] if is_grpo else None
    by_prompt: dict[tuple[int, ...], list[GenerationOutput]] = defaultdict(list)
    for output in outputs:
        by_prompt[tuple(output.prompt_ids)].append(output)
    pairs = [(list(own), list(ids)) for own, ids in zip(prompts, completions, strict=True)]
    # A `_generate` of one's own may have changed the rows.
    is_in_order = is_in_order and pairs == [(o.prompt_ids, o.generated_tokens) for o in outputs]
    rows = []
    for index, ((prompt_ids, completion_ids), mask) in enumerate(zip(pairs, masks, strict=True)):
        is_sampled = [bool(value) for value in mask]
        if is_in_order:
            spans = [(0, len(completion_ids), outputs[index])]
        else:
            spans = _matched_spans(prompt_ids, completion_ids, is_sampled, by_prompt)
        values = None
        if logprobs is not None:
            # A rollout_func may say None, as vLLM's does, where it knows none.
            values = [math.nan if value is None else value for value in logprobs[index]]
        elif not is_grpo and spans:
            values = spans[0][2].logprobs[: len(completion_ids)]
        row = LossRow(
            id=next(ids),
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            is_sampled=is_sampled,
            logprobs=values,
            versions=[None] * len(completion_ids),
            # A token that was not sampled is its own only id: its log-probability is 0 and has no
            # gradient, and no loss counts it.
            sampling_mask=[array("i", [t]) for t in completion_ids] if replays else None,
        )
        rows.append(_with_spans(row, spans))
    return rows


def _with_spans(row: LossRow, spans: Sequence[Span]) -> LossRow:
    if not spans:
        return row
    routes: list[Any] = []
    num_routed = 0
    # A token that a later turn computed again keeps the experts of the turn that sampled it.
    for _, _, output in spans:
        if output.routed_experts is None:
            break
        routes.append(output.routed_experts[num_routed:])
        num_routed = max(num_routed, len(output.routed_experts))
    for start, num_tokens, output in spans:
        end = start + num_tokens
        versions = [version for version, num in output.policy_versions for _ in range(num)]
        row.versions[start:end] = versions[:num_tokens]
        if row.sampling_mask is not None and output.kept_token_ids is not None:
            row.sampling_mask[start:end] = output.kept_token_ids[:num_tokens]
    start, num_tokens, last = spans[-1]
    num_completion, num_row = len(row.completion_ids), len(row.prompt_ids + row.completion_ids)
    is_whole = start + num_tokens == num_completion and num_tokens == len(last.generated_tokens)
    return replace(
        row,
        request_id=last.request_id,
        finish_reason=last.finish_reason,
        is_stopped=is_whole and last.finish_reason is FinishReason.STOP,
        routes=np.concatenate(routes)[:num_row] if routes else None,
    )


# TRL 1.16 gives no ids: a tool loop generates for the rows that are left and cuts their ends off,
# and a rollout_func may return its rows in any order, or a row twice.
def _matched_spans(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    is_sampled: list[bool],
    by_prompt: dict[tuple[int, ...], list[GenerationOutput]],
) -> list[Span]:
    """Return the outputs of a completion, by their tokens; empty: an output is missing.

    Rows with equal tokens and history take different requests, as long as there are any left. A
    sampled span may go on, at any token, with an output whose prompt ends there: a branch.
    """
    spans = []
    starts = [t for t, own in enumerate(is_sampled) if own and not (t and is_sampled[t - 1])]
    for start in starts:
        end = next((t for t in range(start, len(is_sampled)) if not is_sampled[t]), None)
        while start < len(completion_ids[:end]):
            part = list(completion_ids[start:end])
            history = (*prompt_ids, *completion_ids[:start])
            candidates = by_prompt.get(history, [])
            equal = [num_common([own.generated_tokens, part]) for own in candidates]
            shared = range(max(equal, default=0), 0, -1)
            forks = (n for n in shared if n == len(part) or (*history, *part[:n]) in by_prompt)
            num_tokens = next(forks, 0)
            if not num_tokens:
                return []
            number = next(n for n, count in enumerate(equal) if count >= num_tokens)
            candidates.append(candidates.pop(number))
            spans.append((start, num_tokens, candidates[-1]))
            start += num_tokens
    return spans


def require_sampled_here(rows: Sequence[LossRow], setting: str, other: str) -> None:
    """Refuse rows that the attached generator did not sample, which a setting needs."""
    if any(row.request_id is None for row in rows):
        raise refused("replay, foreign completions", setting=setting, other=other)


def require_records(
    rows: Sequence[LossRow],
    num_trained: Sequence[int],
    num_earlier: int,
    setting: str,
    other: str,
) -> None:
    """Refuse rows that are trained on without the record that a setting needs.

    Args:
        rows: all of a batch.
        num_trained: tokens of each row that the loss counts.
        num_earlier: rollouts before the latest whose records are kept.
        setting: the one that needs records.
        other: the setting that needs none.
    """
    for number, row in enumerate(rows):
        if row.request_id is None and num_trained[number]:
            raise refused(
                "replay, unknown row",
                number=number,
                num_rows=len(rows),
                num_prompt_tokens=len(row.prompt_ids),
                num_completion_tokens=len(row.completion_ids),
                num_earlier=num_earlier,
                setting=setting,
                other=other,
            )


Forward = Callable[[Any, LossBatch], Result]
"""Computes TRL's `_get_per_token_logps_and_entropies` by a model."""


class OwnForward:
    """The forward that the trainer would run; other forwards are compared with it.

    Made before the trainer's method is replaced. `routers` None: they choose for themselves.
    """

    def __init__(self, trainer: Any, routers: Routers | None) -> None:
        self._trainer, self._routers = trainer, routers
        self._logprobs = trainer._get_per_token_logps_and_entropies

    def __call__(self, model: Any, batch: LossBatch) -> Result:
        """Return float32 nats; over a sampling mask they are 0 in the padding."""
        if not (batch.is_masked or batch.is_routed):
            return self.plain(model, batch)
        forward = self._masked if batch.is_masked else self.plain
        results = []
        num_rows = len(batch.input_ids)
        for numbers in torch.arange(num_rows).split(batch.batch_size or num_rows):
            part = batch.at(numbers.tolist(), None)
            with self._replaying(model, part):
                results.append(forward(model, part))
        logprobs, entropies, aux_losses = zip(*results, strict=True)
        return (
            torch.cat(logprobs),
            None if entropies[0] is None else torch.cat(entropies),
            None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
        )

    def plain(self, model: Any, batch: LossBatch) -> Result:
        padded = batch.input_ids, batch.attention_mask, batch.logits_to_keep
        return self._logprobs(model, *padded, batch.batch_size, **batch.settings)

    def _masked(self, model: Any, batch: LossBatch) -> Result:
        T = batch.logits_to_keep
        images = image_arguments(batch.settings)
        settings: dict[str, Any] = {n: v for n, v in images.items() if n not in COUNTS}
        if "logits_to_keep" in hf_compat.forward_argument_names(hf_compat.unwrap(model)):
            settings["logits_to_keep"] = T + 1
        if batch.has_aux_loss:
            settings["output_router_logits"] = True
        ids, mask = batch.input_ids, batch.attention_mask
        with self._trainer.accelerator.autocast():
            outputs = model(input_ids=ids, attention_mask=mask, use_cache=False, **settings)
        logits_BTV, tokens_BT = outputs.logits[:, -T - 1 : -1], ids[:, -T:]
        padded = [array("i", [token]) for token in tokens_BT.flatten().tolist()]
        for number, row in enumerate(batch.rows):
            kept = row.sampling_mask or ()
            padded[number * T : number * T + len(kept)] = kept
        scores = masked_logprobs(
            logits_BTV.reshape(-1, logits_BTV.shape[-1]),
            tokens_BT.flatten(),
            padded,
            self._trainer.temperature,
        )
        is_padding_BT = batch.completion_mask == 0
        logprobs_BT, entropies_BT = (
            values_N.view_as(tokens_BT).masked_fill(is_padding_BT, 0) for values_N in scores
        )
        return logprobs_BT, entropies_BT, outputs.aux_loss if batch.has_aux_loss else None

    def _replaying(self, model: Any, batch: LossBatch) -> AbstractContextManager[None]:
        if self._routers is None or not batch.is_routed:
            return nullcontext()
        S = batch.input_ids.shape[1]
        first = S - batch.logits_to_keep
        paddings = (first - batch.attention_mask[:, :first].sum(1)).tolist()
        # A masked token may have any experts.
        columns_S = torch.arange(1, S + 1, device=batch.attention_mask.device)
        ends = (batch.attention_mask * columns_S).amax(1).tolist()
        parts = []
        for row, padding, end in zip(batch.rows, paddings, ends, strict=True):
            routes = None if row.routes is None else row.routes[: max(0, end - padding)]
            parts.append((routes, padding, S))
        routes_NLK = joined_routes(parts, batch.attention_mask.device)
        return self._routers.replaying(hf_compat.unwrap(model), routes_NLK, batch.counts)
