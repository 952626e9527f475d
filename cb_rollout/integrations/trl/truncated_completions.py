"""Mark truncated completions by finish reason, where TRL's test of the last token is wrong.

TRL 1.16 counts a completion as whole if its last token is one of the trainer's end-of-sequence
tokens, or padding. Stop strings, other stop tokens and a `rollout_func`'s sampling parameters
break that test. Reads the trainer's attributes and imports no trl. Called on the trainer's
thread.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cb_rollout.config.combinations import refused
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.integrations.trl.loss_rows import LossRow


def unknown_end(trainer: Any, params: SamplingParams) -> str | None:
    """Return a name for a stop that TRL's test misses; None: the test covers all stops."""
    if params.stop:
        return "a stop string"
    ends: Any = params.eos_token_id or ()
    others = {token for token in (*ends, *params.stop_token_ids) if token >= 0}
    unknown = others - set(trainer.eos_token_ids)
    return f"token {min(unknown)}" if unknown else None


def require_known_ends(trainer: Any, params: SamplingParams) -> None:
    """Refuse to mask truncated completions under RLOO where it does not know every stop."""
    is_rloo = not hasattr(trainer, "rollout_func")
    ended_by = unknown_end(trainer, params)
    if trainer.mask_truncated_completions and is_rloo and ended_by:
        raise refused("masked, unknown stops", ended_by=ended_by)


class TruncatedCompletions:
    """Corrects the trainer's metrics and masks of truncated completions.

    Changes nothing where the trainer's own look at the last token suffices.
    """

    def __init__(self, trainer: Any, params: SamplingParams) -> None:
        self._trainer = trainer
        has_rollout_func = getattr(trainer, "rollout_func", None) is not None
        # The same in every process: the methods below exchange data between all of them.
        self.is_needed = has_rollout_func or unknown_end(trainer, params) is not None

    def are_truncated(self, rows: Sequence[LossRow]) -> list[bool]:
        """Return one flag for each row."""
        trainer = self._trainer
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        return [not row.is_stopped and row.completion_ids[-1] not in ends for row in rows]

    def correct_metrics(self, rows: Sequence[LossRow]) -> None:
        """Replace the trainer's metrics of truncated completions for the rows just generated."""
        if not self.is_needed:
            return
        accelerator = self._trainer.accelerator
        lengths = torch.tensor([sum(row.is_sampled) for row in rows], device=accelerator.device)
        is_cut = torch.tensor(self.are_truncated(rows), device=accelerator.device)
        lengths, is_cut = accelerator.gather(lengths), accelerator.gather(is_cut)
        whole = lengths[~is_cut].float() if not is_cut.all() else torch.zeros(1)
        corrected = {
            "clipped_ratio": is_cut.float().mean(),
            "mean_terminated_length": whole.mean(),
            "min_terminated_length": whole.min(),
            "max_terminated_length": whole.max(),
        }
        metrics = self._trainer._metrics["train" if self._trainer.model.training else "eval"]
        for name, value in corrected.items():
            metrics[f"completions/{name}"][-1] = value.item()

    @contextmanager
    def unmasked(self) -> Iterator[bool]:
        """Keep the trainer from masking inside, and yield whether `mask` must be called after."""
        trainer = self._trainer
        before = trainer.mask_truncated_completions
        is_due = self.is_needed and before
        trainer.mask_truncated_completions = before and not is_due
        try:
            yield is_due
        finally:
            trainer.mask_truncated_completions = before

    def mask(self, batch: dict[str, Any], rows: Sequence[LossRow]) -> None:
        """Mask truncated completions as the trainer would, and count the remaining tokens."""
        is_whole_B1 = ~torch.tensor(self.are_truncated(rows)).unsqueeze(1)
        for name in ("completion_mask", "tool_mask"):
            if name in batch:
                batch[name] = batch[name] * is_whole_B1.to(batch[name].device).int()
        loss_mask_BT = batch["completion_mask"] * batch.get("tool_mask", 1)
        total = self._trainer.accelerator.gather(loss_mask_BT.sum()).sum()
        batch["num_items_in_batch"] = total
