"""Keep one record of each row of a trainer's batch, and run the trainer's own forward of the rows.

A row is a prompt and a completion. With tools, the completion consists of spans, each sampled for
one request, with tool results between them. The forward replays the experts and the sampling masks
of a rollout: "Keep Routing" and "Keep Sampling Mask" in DeepSeek-V3.2's report. TRL's forward never
has the logits that a mask needs, so the model's forward is run instead. Only the trainer's thread
reads and writes this.

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
from typing import Any, NamedTuple

import numpy as np
import torch

from cb_rollout.config.combinations import refused
from cb_rollout.engine.attention.shared_prefix import num_common
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.model.routers import Disagreement, Routers, joined_routes
from cb_rollout.engine.sampling.mask import masked_logprobs
from cb_rollout.integrations.trl.images import COUNTS, image_arguments, of_rows
from cb_rollout.packing.rows import PackedRow
from cb_rollout.types import FinishReason, GenerationOutput

Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Log-probabilities and entropies, (B, T), and the load-balancing loss of a mixture of experts."""

# The column of a scored batch that holds its `LossRow`s. TRL 1.16 shuffles and splits a batch, and
# a strategy sends groups to other processes: each record goes where its row is trained.
ROWS_KEY = "rollout_rows"

# The column of the rows' ids, (B,) int64. A user's own trainer class may reorder what TRL has
# scored, and reorders this tensor like the others.
ROW_IDS = "rollout_row_ids"

# Id of rows that the attached generator did not sample, or whose records are no longer kept.
UNKNOWN_ID = -1


@dataclass(frozen=True, slots=True)
class LossRow:
    """One sequence of the trainer's batch, from its generation to its loss."""

    id: int
    """Unique in the run, over all processes; `UNKNOWN_ID`: the row's origin is not known."""
    prompt_ids: list[int]
    completion_ids: list[int]
    is_sampled: list[bool]
    """One for each completion token: False where a tool or an environment wrote it."""
    logprobs: list[float] | None
    """One for each completion token, 0 where it was not sampled; None: the trainer has none."""
    versions: list[int | None]
    """The policy version of each completion token; None where it is not known."""
    request_id: str | None = None
    """Id of its last request; None: the attached generator did not sample it."""
    finish_reason: FinishReason | None = None
    """Finish reason of its last request; None: not sampled here, or cut off at the end."""
    is_stopped: bool = False
    """True: its last token was sampled here and finished the request with STOP."""
    sampling_mask: list[Any] | None = None
    """An `array("i")` of ids for each completion token; None: replay is off."""
    routes: Any = None
    """Experts that the first tokens took, `[tokens, L, K]`; None: not recorded."""

    @classmethod
    def unknown(cls, prompt_ids: list[int], completion_ids: list[int]) -> "LossRow":
        """Return a record with only the tokens."""
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
        row = replace(
            self,
            completion_ids=self.completion_ids[:num_tokens],
            is_sampled=self.is_sampled[:num_tokens],
            versions=self.versions[:num_tokens],
            finish_reason=None,
            is_stopped=False,
        )
        if self.logprobs is not None:
            row = replace(row, logprobs=self.logprobs[:num_tokens])
        if self.sampling_mask is not None:
            row = replace(row, sampling_mask=self.sampling_mask[:num_tokens])
        if self.routes is not None:
            row = replace(row, routes=self.routes[: len(self.prompt_ids) + num_tokens])
        return row

    def was_sampled_by(self, version: int) -> bool:
        """Return whether this policy version sampled a token of the row, or no token has a version.

        False for a row whose origin is not known.
        """
        if self.id == UNKNOWN_ID:
            return False
        sampled_versions = {other for other in self.versions if other is not None}
        return not sampled_versions or version in sampled_versions

    @property
    def name(self) -> str:
        return self.request_id or "a sequence of rollout_func"

    @property
    def turns(self) -> list[range]:
        """Return the completion tokens of each turn that was sampled."""
        turns = []
        start = 0
        for is_sampled, run in groupby(self.is_sampled):
            end = start + len(list(run))
            if is_sampled:
                turns.append(range(start, end))
            start = end
        return turns


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
        """Return the rows at `numbers`, of which one forward of the trainer has `batch_size`."""
        numbers = list(numbers)
        rows: Sequence[LossRow] = ()
        if self.rows:
            rows = [self.rows[number] for number in numbers]
        return replace(
            self,
            input_ids=self.input_ids[numbers],
            attention_mask=self.attention_mask[numbers],
            batch_size=batch_size,
            settings=of_rows(self.settings, numbers),
            rows=rows,
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
        """Return the rows without padding; None: there is padding between tokens.

        The batch's mask decides, not the records, because TRL masks truncated completions later.
        """
        device = self.input_ids.device
        P = self.input_ids.shape[1] - self.logits_to_keep
        prompt_mask_BP = self.attention_mask[:, :P] > 0
        prompt_lengths_B = prompt_mask_BP.sum(1)
        left_padded_BP = torch.arange(P, device=device) >= P - prompt_lengths_B[:, None]

        completion_mask_BT = self.completion_mask > 0
        completion_lengths_B = completion_mask_BT.sum(1)
        columns_T = torch.arange(self.logits_to_keep, device=device)
        right_padded_BT = columns_T < completion_lengths_B[:, None]

        # One wait for the device.
        is_plain = (prompt_mask_BP == left_padded_BP).all()
        is_plain &= (completion_mask_BT == right_padded_BT).all()
        is_plain &= (prompt_lengths_B > 0).all()
        if not is_plain:
            return None
        rows = []
        prompt_lengths = prompt_lengths_B.tolist()
        completion_lengths = completion_lengths_B.tolist()
        for number, ids in enumerate(self.input_ids.tolist()):
            row = PackedRow(
                prompt_ids=ids[P - prompt_lengths[number] : P],
                completion_ids=ids[P : P + completion_lengths[number]],
            )
            if self.rows:
                record = self.rows[number]
                row = row._replace(routes=record.routes, sampling_mask=record.sampling_mask)
            rows.append(row)
        return rows


class SampledSpan(NamedTuple):
    """A run of a completion's tokens that the engine sampled for one request."""

    start: int
    """Index of its first token in the completion."""
    num_tokens: int
    """At most the output's length: the trainer may cut off the end."""
    output: GenerationOutput

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def loss_rows(
    generated: Sequence[Any],
    outputs: Sequence[GenerationOutput],
    ids: Iterator[int],
    *,
    is_in_order: bool,
    replays: bool = False,
) -> list[LossRow]:
    """Return the records of the rows that a trainer's `_generate` returned.

    Args:
        generated: what `_generate` returned. GRPO: prompt ids, completion ids, tool mask,
            completions, log-probabilities and more; RLOO: the first two and completions.
        outputs: all outputs of the engine in the rollout, in order.
        ids: iterator of ids for new rows.
        is_in_order: True if output `n` is row `n`, unless their tokens differ.
        replays: True if log-probabilities are taken over the sampling masks.
    """
    returned = _Generated.of(generated)
    by_prompt: dict[tuple[int, ...], list[GenerationOutput]] = defaultdict(list)
    for output in outputs:
        by_prompt[tuple(output.prompt_ids)].append(output)
    # A user's own `_generate` may have changed the rows.
    is_in_order = is_in_order and returned.are_tokens_of(outputs)
    rows = []
    generated_rows = zip(returned.prompts, returned.completions, returned.masks, strict=True)
    for index, (prompt_ids, completion_ids, mask) in enumerate(generated_rows):
        is_sampled = [bool(value) for value in mask]
        if is_in_order:
            spans = [SampledSpan(0, len(completion_ids), outputs[index])]
        else:
            spans = _matched_spans(prompt_ids, completion_ids, is_sampled, by_prompt)
        sampling_mask = None
        if replays:
            # A token that was not sampled is its own only id: its log-probability is 0 and has no
            # gradient, and no loss counts it.
            sampling_mask = [array("i", [token]) for token in completion_ids]
        row = LossRow(
            id=next(ids),
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            is_sampled=is_sampled,
            logprobs=returned.logprobs_of(index, spans),
            versions=[None] * len(completion_ids),
            sampling_mask=sampling_mask,
        )
        rows.append(_with_spans(row, spans))
    return rows


@dataclass(frozen=True, slots=True)
class _Generated:
    """The values that a trainer's `_generate` returned, of TRL 1.16."""

    is_grpo: bool
    """False: it is RLOO's."""
    prompts: list[list[int]]
    completions: list[list[int]]
    masks: Sequence[Sequence[int]]
    """One number for each completion token: 0 where a tool wrote it."""
    logprobs: Sequence[Sequence[float | None]] | None
    """One for each completion token; None: `_generate` returned none."""

    @classmethod
    def of(cls, generated: Sequence[Any]) -> "_Generated":
        prompts = [list(prompt_ids) for prompt_ids in generated[0]]
        completions = [list(completion_ids) for completion_ids in generated[1]]
        masks = [[1] * len(completion_ids) for completion_ids in completions]
        # RLOO's `_generate` returns three values.
        is_grpo = len(generated) > 3
        if not is_grpo:
            return cls(is_grpo, prompts, completions, masks, logprobs=None)
        tool_masks = generated[2]
        return cls(is_grpo, prompts, completions, tool_masks or masks, logprobs=generated[4])

    def are_tokens_of(self, outputs: Sequence[GenerationOutput]) -> bool:
        """Return whether row `n` has the tokens of output `n`."""
        prompts = [output.prompt_ids for output in outputs]
        completions = [output.generated_tokens for output in outputs]
        return self.prompts == prompts and self.completions == completions

    def logprobs_of(self, index: int, spans: Sequence[SampledSpan]) -> list[float] | None:
        """Return a row's log-probabilities, in nats, NaN where none is known; None: it has none."""
        if self.logprobs is not None:
            # A rollout_func may return None for a token without a log-probability, as vLLM's does.
            return [math.nan if value is None else value for value in self.logprobs[index]]
        if self.is_grpo or not spans:
            return None
        return spans[0].output.logprobs[: len(self.completions[index])]


def _with_spans(row: LossRow, spans: Sequence[SampledSpan]) -> LossRow:
    """Return a row with the records of the requests that sampled it."""
    if not spans:
        return row
    for span in spans:
        output = span.output
        versions: list[int] = []
        for version, num_tokens in output.policy_versions:
            versions += [version] * num_tokens
        row.versions[span.start : span.end] = versions[: span.num_tokens]
        if row.sampling_mask is not None and output.kept_token_ids is not None:
            row.sampling_mask[span.start : span.end] = output.kept_token_ids[: span.num_tokens]
    last = spans[-1]
    reaches_end = last.end == len(row.completion_ids)
    is_whole = reaches_end and last.num_tokens == len(last.output.generated_tokens)
    return replace(
        row,
        request_id=last.output.request_id,
        finish_reason=last.output.finish_reason,
        is_stopped=is_whole and last.output.finish_reason is FinishReason.STOP,
        routes=_joined_routes_of(spans, len(row.prompt_ids) + len(row.completion_ids)),
    )


def _joined_routes_of(spans: Sequence[SampledSpan], num_tokens: int) -> Any:
    """Return the experts of a row's first tokens, `[tokens, L, K]`; None: not recorded.

    A token that a later turn recomputed keeps the experts of the turn that sampled it.
    """
    routes: list[Any] = []
    num_routed = 0
    for span in spans:
        experts = span.output.routed_experts
        if experts is None:
            break
        routes.append(experts[num_routed:])
        num_routed = max(num_routed, len(experts))
    if not routes:
        return None
    return np.concatenate(routes)[:num_tokens]


# TRL 1.16 gives no ids: a tool loop generates for the rows that are left and cuts their ends off,
# and a rollout_func may return its rows in any order, or a row twice.
def _matched_spans(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    is_sampled: list[bool],
    by_prompt: dict[tuple[int, ...], list[GenerationOutput]],
) -> list[SampledSpan]:
    """Return the outputs of a completion, by their tokens; empty: an output is missing.

    Rows with equal tokens and history take different requests, as long as some are left. At any
    token, a sampled span may continue with an output whose prompt ends there: a branch.
    """
    spans: list[SampledSpan] = []
    start = 0
    for sampled, run in groupby(is_sampled):
        end = start + len(list(run))
        # The trainer may cut a completion shorter than its mask.
        end_of_tokens = min(end, len(completion_ids))
        while sampled and start < end_of_tokens:
            history = (*prompt_ids, *completion_ids[:start])
            span = _span_from(start, completion_ids[start:end_of_tokens], history, by_prompt)
            if span is None:
                return []
            spans.append(span)
            start = span.end
        start = end
    return spans


def _span_from(
    start: int,
    tokens: Sequence[int],
    history: tuple[int, ...],
    by_prompt: Mapping[tuple[int, ...], list[GenerationOutput]],
) -> SampledSpan | None:
    """Return the longest span of an output at the start of a sampled run, or None.

    It ends at the end of the run, or at the end of another output's prompt. Its output moves to the
    end of its list, so that another row with equal tokens takes another output.

    Args:
        start: index of the run's first token in the completion.
        tokens: the run's tokens from `start` on.
        history: tokens of the row before `start`.
        by_prompt: outputs by their prompts.
    """
    candidates = by_prompt.get(history, [])
    num_equal = [num_common([output.generated_tokens, tokens]) for output in candidates]
    for num_tokens in range(max(num_equal, default=0), 0, -1):
        is_whole_run = num_tokens == len(tokens)
        if not is_whole_run and (*history, *tokens[:num_tokens]) not in by_prompt:
            continue
        for number, count in enumerate(num_equal):
            if count >= num_tokens:
                output = candidates.pop(number)
                candidates.append(output)
                return SampledSpan(start, num_tokens, output)
    return None


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
    """Refuse trained rows without the record that a setting needs.

    Args:
        rows: all of a batch.
        num_trained: tokens of each row that the loss counts.
        num_earlier: number of rollouts before the latest whose records are kept.
        setting: the setting that needs records.
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
"""Computes TRL's `_get_per_token_logps_and_entropies` with a model."""


class OwnForward:
    """The trainer's own forward, with which other forwards are compared.

    Create it before the trainer's method is replaced. `routers=None`: routers choose the experts.
    """

    def __init__(self, trainer: Any, routers: Routers | None) -> None:
        self._trainer = trainer
        self._routers = routers
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
        return _joined_results(results)

    def plain(self, model: Any, batch: LossBatch) -> Result:
        """Run TRL's own method."""
        return self._logprobs(
            model,
            batch.input_ids,
            batch.attention_mask,
            batch.logits_to_keep,
            batch.batch_size,
            **batch.settings,
        )

    def _masked(self, model: Any, batch: LossBatch) -> Result:
        """Run the model for its logits, and score each token over its sampling mask."""
        T = batch.logits_to_keep
        settings = image_arguments(batch.settings)
        for name in COUNTS:
            settings.pop(name, None)
        if "logits_to_keep" in ModelFacts.of(model).argument_names:
            settings["logits_to_keep"] = T + 1
        if batch.has_aux_loss:
            settings["output_router_logits"] = True
        with self._trainer.accelerator.autocast():
            outputs = model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                use_cache=False,
                **settings,
            )
        logits_BTV = outputs.logits[:, -T - 1 : -1]
        tokens_BT = batch.input_ids[:, -T:]
        kept_N = [array("i", [token]) for token in tokens_BT.flatten().tolist()]
        for number, row in enumerate(batch.rows):
            kept_T = row.sampling_mask or ()
            kept_N[number * T : number * T + len(kept_T)] = kept_T
        logprobs_N, entropies_N = masked_logprobs(
            logits_BTV.reshape(-1, logits_BTV.shape[-1]),
            tokens_BT.flatten(),
            kept_N,
            self._trainer.temperature,
        )
        is_padding_BT = batch.completion_mask == 0
        logprobs_BT = logprobs_N.view_as(tokens_BT).masked_fill(is_padding_BT, 0)
        entropies_BT = entropies_N.view_as(tokens_BT).masked_fill(is_padding_BT, 0)
        aux_loss = outputs.aux_loss if batch.has_aux_loss else None
        return logprobs_BT, entropies_BT, aux_loss

    def _replaying(self, model: Any, batch: LossBatch) -> AbstractContextManager[None]:
        """Make the routers use the experts of the rows' rollout in a forward of the batch."""
        if self._routers is None or not batch.is_routed:
            return nullcontext()
        S = batch.input_ids.shape[1]
        first = S - batch.logits_to_keep
        paddings = (first - batch.attention_mask[:, :first].sum(1)).tolist()
        # The experts of a masked token do not matter.
        columns_S = torch.arange(1, S + 1, device=batch.attention_mask.device)
        ends = (batch.attention_mask * columns_S).amax(1).tolist()
        parts = []
        for row, padding, end in zip(batch.rows, paddings, ends, strict=True):
            routes = row.routes
            if routes is not None:
                routes = routes[: max(0, end - padding)]
            parts.append((routes, padding, S))
        routes_NLK = joined_routes(parts, batch.attention_mask.device)
        return self._routers.replaying(ModelFacts.of(model).module, routes_NLK, batch.counts)


def _joined_results(results: Sequence[Result]) -> Result:
    """Join the results of forwards over parts of the rows; average the router losses."""
    logprobs = []
    entropies = []
    aux_losses = []
    for logprobs_BT, entropies_BT, aux_loss in results:
        logprobs.append(logprobs_BT)
        if entropies_BT is not None:
            entropies.append(entropies_BT)
        if aux_loss is not None:
            aux_losses.append(aux_loss)
    return (
        torch.cat(logprobs),
        torch.cat(entropies) if entropies else None,
        torch.stack(aux_losses).mean() if aux_losses else None,
    )
