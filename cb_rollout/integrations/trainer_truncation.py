"""Which completions the trainer takes for whole, where more ends them than it knows of.

TRL 1.16 looks at the last token alone: one of its own end-of-sequence tokens, or padding, or the
completion was cut off. It knows no stop strings, no other tokens that end a sequence, and not what
a `rollout_func` asked for. Knows the trainer by its attributes only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cb_rollout.integrations.trainer_rows import Row
from cb_rollout.sampling_params import SamplingParams

Batch = dict[str, Any]


def unknown_end(trainer: Any, params: SamplingParams) -> str | None:
    """What may end a completion without the trainer's knowing; None: nothing."""
    if params.stop:
        return "a stop string"
    ends: Any = params.eos_token_id or ()
    others = {token for token in (*ends, *params.stop_token_ids) if token >= 0}
    unknown = others - set(trainer.eos_token_ids)
    return f"token {min(unknown)}" if unknown else None


class TrainerTruncation:
    """Says which completions of a trainer's rollouts were cut off, from how each one ended."""

    def __init__(self, trainer: Any, params: SamplingParams) -> None:
        """Change nothing where the trainer's own look at the last token suffices.

        Args:
            trainer: the one that runs.
            params: how it samples.
        """
        self._trainer = trainer
        brings_its_own = getattr(trainer, "rollout_func", None) is not None
        # The same in every process: what follows has exchanges that all of them take part in.
        self.is_needed = brings_its_own or unknown_end(trainer, params) is not None

    def are_cut_off(self, rows: Sequence[Row]) -> list[bool]:
        """One for each row."""
        trainer = self._trainer
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        return [not row.ended_itself and row.completion_ids[-1] not in ends for row in rows]

    def count(self, rows: Sequence[Row]) -> None:
        """Log the trainer's own figures of whole completions anew, for those it just generated."""
        if not self.is_needed:
            return
        accelerator = self._trainer.accelerator
        lengths = torch.tensor([sum(row.is_sampled) for row in rows], device=accelerator.device)
        is_cut = torch.tensor(self.are_cut_off(rows), device=accelerator.device)
        lengths, is_cut = accelerator.gather(lengths), accelerator.gather(is_cut)
        whole = lengths[~is_cut].float() if not is_cut.all() else torch.zeros(1)
        figures = {
            "clipped_ratio": is_cut.float().mean(),
            "mean_terminated_length": whole.mean(),
            "min_terminated_length": whole.min(),
            "max_terminated_length": whole.max(),
        }
        metrics = self._trainer._metrics["train" if self._trainer.model.training else "eval"]
        for name, value in figures.items():
            metrics[f"completions/{name}"][-1] = value.item()

    @contextmanager
    def unmasked(self) -> Iterator[bool]:
        """Have the trainer score without leaving completions out; gives whether `mask` is to."""
        trainer = self._trainer
        is_due = self.is_needed and trainer.mask_truncated_completions
        before = trainer.mask_truncated_completions
        trainer.mask_truncated_completions = before and not is_due
        try:
            yield is_due
        finally:
            trainer.mask_truncated_completions = before

    def mask(self, batch: Batch, rows: Sequence[Row]) -> None:
        """Leave out of the loss what was cut off, as the trainer would, and count what is left."""
        is_whole_B1 = ~torch.tensor(self.are_cut_off(rows)).unsqueeze(1)
        for name in ("completion_mask", "tool_mask"):
            if name in batch:
                batch[name] = batch[name] * is_whole_B1.to(batch[name].device).int()
        loss_mask_BT = batch["completion_mask"] * batch.get("tool_mask", 1)
        total = self._trainer.accelerator.gather(loss_mask_BT.sum()).sum()
        batch["num_items_in_batch"] = total
