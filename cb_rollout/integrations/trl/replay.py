"""Compute the trainer's log-probabilities over the sampling mask.

"Keep Sampling Mask" in DeepSeek-V3.2's report. TRL's own forward never has logits, so the model's
is run instead: a micro-batch's logits of the completion exist whole.

B: rows, S: prompt and completion, T: completion, V: vocabulary, N: B x T.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.sampling.mask import SamplingMask, masked_logprobs
from cb_rollout.integrations.trl.context import RolloutRow


def kept_token_ids(row: RolloutRow) -> list[Any]:
    """Return the sampling mask of each completion token, an `array("i")` of ids.

    A token that was not sampled is its own only id: its log-probability is 0 and has no gradient,
    and no loss counts it.
    """
    kept: list[Any] = [array("i", [token]) for token in row.completion_ids]
    for start, num_tokens, output in row.spans:
        if output.kept_token_ids is not None:
            kept[start : start + num_tokens] = output.kept_token_ids[:num_tokens]
    return kept


def replayed_logprobs(
    trainer: Any,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    kept: Sequence[list[Any]],
    batch_size: int | None = None,
    compute_aux_loss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute TRL's `_get_per_token_logps_and_entropies` over each token's sampling mask.

    Args:
        trainer: its temperature and precision are used.
        model: the policy, or the reference.
        input_ids: (B, S), int64: prompts, left-padded, and completions, right-padded.
        attention_mask: (B, S), int64.
        logits_to_keep: T.
        kept: for each row, as many `array("i")` of ids as its completion has tokens.
        batch_size: rows in one forward; None: all.
        compute_aux_loss: also return the load-balancing loss of a mixture of experts.

    Returns:
        Log-probabilities and entropies, both (B, T), float32, in nats, 0 in the padding; and the
        load-balancing loss, or None.
    """
    num_rows = input_ids.shape[0]
    batch_size = batch_size or num_rows
    logprobs, entropies, aux_losses = [], [], []
    for start in range(0, num_rows, batch_size):
        rows = slice(start, start + batch_size)
        outputs = _forward(
            trainer, model, input_ids[rows], attention_mask[rows], logits_to_keep, compute_aux_loss
        )
        logits_BTV = outputs.logits[:, -logits_to_keep - 1 : -1]
        tokens_BT = input_ids[rows, -logits_to_keep:]
        padded = [array("i", [token]) for token in tokens_BT.flatten().tolist()]
        for number, ids in enumerate(kept[rows]):
            first = number * logits_to_keep
            padded[first : first + len(ids)] = ids
        logprobs_N, entropies_N = masked_logprobs(
            logits_BTV.reshape(-1, logits_BTV.shape[-1]),
            tokens_BT.flatten(),
            SamplingMask.joined(padded),
            trainer.temperature,
        )
        is_padding_BT = attention_mask[rows, -logits_to_keep:] == 0
        logprobs.append(logprobs_N.view_as(tokens_BT).masked_fill(is_padding_BT, 0))
        entropies.append(entropies_N.view_as(tokens_BT).masked_fill(is_padding_BT, 0))
        if compute_aux_loss:
            aux_losses.append(outputs.aux_loss)
    aux_loss = torch.stack(aux_losses).mean() if compute_aux_loss else None
    return torch.cat(logprobs), torch.cat(entropies), aux_loss


def _forward(
    trainer: Any,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    compute_aux_loss: bool,
) -> Any:
    """Run the model, with logits of the completion alone where it can leave out the rest."""
    settings: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in hf_compat.forward_argument_names(hf_compat.unwrap(model)):
        settings["logits_to_keep"] = logits_to_keep + 1
    if compute_aux_loss:
        settings["output_router_logits"] = True
    with trainer.accelerator.autocast():
        return model(input_ids=input_ids, attention_mask=attention_mask, **settings)
