"""Which completions the trainer takes for whole, where more ends them than it knows of.

TRL 1.16 looks at the last token alone: one of its own end-of-sequence tokens, or padding, or the
completion was cut off. It knows no stop strings, no other tokens that end a sequence, and not what
a `rollout_func` asked for. Knows the trainer by its attributes only.

Whether what is sampled is what the loss recomputes, and what to say where it is not.

The loss of TRL 1.16 takes a log-softmax of logits/temperature over the whole vocabulary. Knows the
trainer by its attributes only.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cb_rollout.config.enums import LogprobsMode, OldLogps, SamplingMaskMode
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl.rows import Row

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


STACKLEVEL = 3
# Warnings point at the caller of attach().


def are_comparable(config: RolloutConfig, params: SamplingParams) -> bool:
    """Whether sampled and recomputed log-probabilities are of one distribution."""
    if config.sampling_mask == SamplingMaskMode.REPLAY:
        return True
    return config.logprobs_mode == LogprobsMode.POLICY or not params.is_processed


def require_known_distribution(trainer: Any, config: RolloutConfig, params: SamplingParams) -> None:
    """Refuse settings under which the old log-probabilities would be of another distribution."""
    if config.sampling_mask == SamplingMaskMode.REPLAY and params.is_adjusted:
        raise ConfigurationError(
            "sampling_mask='replay' knows top_k, top_p and min_p, not penalties, biases or forced "
            "tokens; take repetition_penalty and the like out of the trainer's settings and "
            "generation_kwargs, or set sampling_mask='ignore'."
        )
    if config.old_logps == OldLogps.ROLLOUT and not are_comparable(config, params):
        raise ConfigurationError(
            "old_logps='rollout' with logprobs_mode='processed' would hold log-probabilities after "
            "truncation or penalties against the loss's, which are before; set "
            "sampling_mask='replay' or logprobs_mode='policy'."
        )
    is_rloo = not hasattr(trainer, "rollout_func")
    ended_by = unknown_end(trainer, params)
    if trainer.mask_truncated_completions and is_rloo and ended_by:
        raise ConfigurationError(
            f"mask_truncated_completions=True would leave out completions that {ended_by} ended: "
            "RLOO's trainer takes for whole only what ends in its own end-of-sequence token, and "
            "computes old log-probabilities and rewards from that; leave it False, or take "
            "stop_strings and eos_token_id out of generation_kwargs."
        )


def warn_of_bias(trainer: Any, config: RolloutConfig, params: SamplingParams) -> None:
    """Say, with numbers, where the loss's policy is not what its samples come from."""
    if params.temperature != trainer.temperature:
        warnings.warn(
            f"generation_kwargs sample at temperature={params.temperature:g}, and the loss divides "
            f"logits by {trainer.temperature:g}: its ratios are of another policy. Set temperature "
            "in the trainer's config instead.",
            stacklevel=STACKLEVEL,
        )
    if not params.is_truncated or config.sampling_mask == SamplingMaskMode.REPLAY:
        return
    settings = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    rest = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    said = ", ".join(f"{k}={v:g}" for k, v in settings.items() if v != rest[k])
    length = trainer.args.max_completion_length
    bound = ""
    if params.top_p < 1 and not params.top_k and not params.min_p:
        lowest = length * math.log(params.top_p)
        bound = f" (at least {params.top_p:g} a token; e**{lowest:.0f} over {length} tokens)"
    effect = "nothing corrects for it"
    corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
    if corrects and config.logprobs_mode == LogprobsMode.PROCESSED:
        effect = "the importance-sampling correction multiplies that mass into the loss"
    warnings.warn(
        f"{said}: completions are sampled from part of the distribution{bound}, the loss is of all "
        f"of it; {effect}. rollout/log_kept_mass says how much is cut. Set sampling_mask='replay' "
        "for exact ratios, or switch truncation off.",
        stacklevel=STACKLEVEL,
    )
