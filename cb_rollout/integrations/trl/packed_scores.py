"""Score the rows of TRL's padded batch over packed batches, and count their tokens.

Called by the trainer, on its thread. Imports no trl.

B: rows of a batch, S: prompt and completion, T: completion, K: completion tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.routers import Routers
from cb_rollout.engine.sampling.mask import SamplingMask, masked_logprobs
from cb_rollout.integrations.trl.loss_rows import LossBatch
from cb_rollout.packing.batch import PackedBatch, PackedRow, PackingLayout, pack
from cb_rollout.packing.comparison import Result
from cb_rollout.packing.forward import Scores, score_batches


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Counts of one forward."""

    loss_tokens_computed: int = 0
    """Tokens that went through the model, padding included."""
    loss_tokens_useful: int = 0
    """Tokens that the scores need: each distinct prompt once, completions without the last."""
    prompts_shared: int = 0
    """Completions that used a prompt computed for another one."""
    rows_left_out: int = 0
    """Rows without a gradient: they have no advantage, or are masked."""


def padded_tokens(batch: LossBatch) -> LossTokens:
    """Return the counts of the trainer's own forward."""
    rows, num_tokens = batch.unpadded(), batch.input_ids.numel()
    return LossTokens(num_tokens, _num_needed(rows) if rows else num_tokens)


@dataclass
class PackedScores:
    """Scores of a batch of rows by one model."""

    trainer: Any
    model: torch.nn.Module
    rows: list[PackedRow]
    layout: PackingLayout
    batch: LossBatch
    """The same rows with padding."""
    routers: Routers | None

    def __post_init__(self) -> None:
        self.tokens = LossTokens()
        self._batches: list[PackedBatch] = []

    @property
    def has_images(self) -> bool:
        """Return whether any process's batch has images."""
        return self.rows[0].images is not None

    def scores(self, trained: Sequence[int], max_tokens: int | None) -> list[Scores]:
        """Run the rows at `trained` with gradients, and the others without."""
        device = next(self.model.parameters()).device
        others = sorted(set(range(len(self.rows))) - set(trained))
        names = multimodal.image_argument_names(hf_compat.unwrap(self.model))
        with_gradient, without = (
            pack(self.rows, numbers, self.layout, device, max_tokens, names)
            for numbers in (trained, others)
        )
        self._batches = with_gradient + without
        self._count(trained)
        with self.trainer.accelerator.autocast():
            return score_batches(
                self.model,
                self._batches,
                self._head,
                num_trained=len(with_gradient),
                recompute=len(with_gradient) > 1,
                routers=self.routers,
                counts=self.batch.counts,
            )

    def unpacked(self, scores: list[Scores]) -> Result:
        """Return scores as TRL's forward does: (B, T), and 0 in the padding."""
        T = self.batch.logits_to_keep
        places: list[int] = []
        for batch in self._batches:
            for row, length in zip(batch.rows, batch.lengths, strict=True):
                places += range(row * T, row * T + length)
        device = scores[0].logprobs_K.device
        places_K = devices.to_device(places, device)

        def spread(parts: list[torch.Tensor]) -> torch.Tensor:
            values_K = torch.cat(parts).float()
            flat = torch.zeros(len(self.rows) * T, device=device)
            return flat.index_copy(0, places_K, values_K).view(-1, T)

        entropies = [part.entropies_K for part in scores if part.entropies_K is not None]
        return (
            spread([part.logprobs_K for part in scores]),
            spread(entropies) if entropies else None,
            scores[0].aux_loss,
        )

    def _head(
        self, own_forward: Callable[..., Any], batch: PackedBatch, arguments: dict[str, Any]
    ) -> Scores:
        """Score by TRL's fused head, or over the sampling mask."""
        has_aux_loss = self.batch.has_aux_loss
        if has_aux_loss:
            arguments = arguments | {"output_router_logits": True}
        if self.rows[0].sampling_mask is not None:
            output = own_forward(**arguments, use_cache=False)
            # A masked row has no completion here, and its sampling mask still.
            scored = zip(batch.rows, batch.lengths, strict=True)
            masks = ((self.rows[row].sampling_mask or ())[:length] for row, length in scored)
            kept = [ids for mask in masks for ids in mask]
            logits_KV, mask = output.logits[0], SamplingMask.joined(kept)
            found = masked_logprobs(logits_KV, batch.labels_K, mask, self.trainer.temperature)
            return Scores(*found, output.aux_loss if has_aux_loss else None)
        output = own_forward(**arguments, shift_labels=batch.labels_K[None], fused_lm_head=True)
        entropies = None if output.entropy is None else output.entropy[0]
        return Scores(output.log_probs[0], entropies, output.aux_loss)

    def _count(self, trained: Sequence[int]) -> None:
        num_shared = sum(batch.num_shared_prompts for batch in self._batches)
        self.tokens = LossTokens(
            sum(batch.num_tokens for batch in self._batches),
            _num_needed(self.rows),
            num_shared,
            len(self.rows) - sum(bool(self.rows[number].completion_ids) for number in trained),
        )


def _num_needed(rows: Sequence[PackedRow]) -> int:
    """Return the tokens that the scores of these rows need."""
    scored = [row for row in rows if row.completion_ids]
    prompts = {(tuple(row.prompt_ids), row.images and row.images.digest) for row in scored}
    return sum(len(ids) for ids, _ in prompts) + sum(len(row.completion_ids) - 1 for row in scored)
